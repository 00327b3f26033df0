"""Pending groups of a committed state, fetched one by one (exactly-once rule 7).

Guarantees: what waits for its bucket waits again, in log order, without reading what stands between; groups that retention took stop their
model, and no other, with an error that names them; an operator who resumes it has them refused as `expired`. Groups that were held
while the model did not train are taken up in the same way.
"""

import logging

from headrace.consumers.lanes.intake import LaneIntake
from headrace.consumers.memory.held import Held
from headrace.consumers.memory.model_run import ModelRun
from headrace.core.fetching import fetch_offsets
from headrace.core.kafka import ClientOptions
from headrace.core.reading import OffsetLostError
from headrace.schemas.reasons import RejectionReason

logger = logging.getLogger(__name__)


async def recover_pending(options: ClientOptions, topic: str, run: ModelRun, intake: LaneIntake) -> None:
    """Put the pending groups of a run back, or stop it.

    Args:
        options: From `client_options`.
        topic: Where its groups are.
        run: With pending groups that are not in memory.
        intake: Takes them in.

    Raises:
        BaseUnusableError: the base model can't be used; nothing has changed.
        HeadraceError: the broker or the store is away.
    """
    try:
        records = await fetch_offsets(options, topic, run.lane, {*run.recovering, *run.held})
    except OffsetLostError as error:
        if not run.expire_lost:
            logger.error("%s stops: %s", run.state.name, error)  # noqa: TRY400 - the message says all, a traceback nothing more
            left = len(run.recovering) + len(run.held) - len(error.missing)
            run.set_status("stopped", f"{error}. {_resume(len(error.missing), left)}")
            return
        _refuse(run, error.missing)
        records = await fetch_offsets(options, topic, run.lane, {*run.recovering, *run.held})
    run.expire_lost = False
    await intake.recover(run, [records[offset] for offset in sorted(records)])


def _resume(lost: int, left: int) -> str:
    groups = "this 1 group" if lost == 1 else f"these {lost} groups"
    return f"`headrace models resume` refuses {groups} as expired and trains on what waits: {left} groups, and all that comes behind them"


def _refuse(run: ModelRun, missing: tuple[int, ...]) -> None:
    jobs = {pending.offset: pending.job_id for pending in run.state.pending}
    run.recovering -= frozenset(missing)
    for offset in missing:
        held = run.held.get(offset, Held(job_id=jobs.get(offset)))
        run.refuse(
            offset=offset,
            group_id=held.group_id or f"{run.lane}-{offset}",
            job_id=held.job_id,
            reason=RejectionReason.EXPIRED,
            detail=f"retention deleted the record at offset {offset} while the group waited"
            + ("; its id is not known any more" if held.group_id is None else ""),
        )
