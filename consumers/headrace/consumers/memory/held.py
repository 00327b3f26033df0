"""What becomes of a model's groups while it does not train: they are held, each by its offset, until it does.

A model does not train while it is stopped, has diverged, or waits for its base model. Its records are read as far as their ids, and stay
pending (`ModelState.held_from`): when the model trains again they are fetched and admitted in the order of the log, to the batches that
they would have made.

Guarantees: a held group is refused only by what the log says (its model is deleted, a bound is reached, retention took its record).
Limitations: a state lists no ids of held groups; after another claim a held group that is refused unread is called by its offset.
"""

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.consumers.memory.state_bounds import MESSAGE_LIMIT, pending_room
from headrace.schemas.events import ModelStatusChanged
from headrace.schemas.reasons import RejectionReason

if TYPE_CHECKING:  # a run holds these
    from headrace.consumers.memory.model_run import ModelRun

logger = logging.getLogger(__name__)

MAX_PENDING = 5_000
"""Groups that wait, of one model: its state lists them and must fit into a record."""
FIRST_RETRY_SECONDS = 1.0
LAST_RETRY_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A group that was not admitted yet."""

    job_id: str | None
    group_id: str | None = None
    """None: another owner of the lane read it."""


@dataclass(slots=True, kw_only=True)
class Retry:
    """When a model that waits tries its base model again."""

    seconds: float = FIRST_RETRY_SECONDS
    at: float = 0.0
    """By the process's clock."""
    ranks: bool = False
    """It is the ranks that could not load it: the next step tells whether they can."""
    step: bool = False
    """The next step may try."""

    def failed(self, *, ranks: bool) -> None:
        """Wait again, twice as long."""
        self.at, self.step, self.ranks = time.monotonic() + self.seconds, False, ranks
        self.seconds = min(2 * self.seconds, LAST_RETRY_SECONDS)

    @property
    def due(self) -> bool:
        """Whether to try now."""
        return not self.step and time.monotonic() >= self.at


def say_status(run: "ModelRun", status: str, detail: str | None) -> None:
    """The next commit tells subscribers that the model's status changes."""
    run.status_changes += 1
    run.notices.append(
        ModelStatusChanged(
            model_id=run.state.model_id,
            incarnation=run.state.incarnation,
            status=status,
            previous=run.shown_status,
            detail=detail,
            policy_version=run.state.policy_version,
            changes=run.status_changes,
        )
    )
    run.touch(urgent=True)


def wait(run: "ModelRun", why: str, *, ranks: bool = False) -> None:
    """The model's base model can't be used: it trains nothing until that is repaired, and is tried again by itself."""
    known = run.waiting_for == (why := why[:MESSAGE_LIMIT])
    run.retry = run.retry if known else Retry()
    run.retry.failed(ranks=ranks)
    if known:
        return
    logger.warning("%s waits, and tries again by itself: %s", run.state.name, why)
    say_status(run, "waiting", why)
    run.waiting_for = why


def go_on(run: "ModelRun") -> None:
    """The model's base model can be used."""
    run.retry = Retry()
    if run.waiting_for is not None:
        logger.info("%s goes on: its base model can be used", run.state.name)
        say_status(run, "active", None)
        run.waiting_for = None
        run.clear_waiting()


def why_it_waits(run: "ModelRun") -> str:
    """For messages."""
    if run.waiting_for is not None:
        return f"the model waits: {run.waiting_for}"
    return "the model is taken up again" if run.status == "active" else f"the model is {run.status}: {run.status_detail}"


def hold(run: "ModelRun", offset: int, group_id: str, job_id: str | None) -> None:
    """Keep a group pending; beyond the bound it is refused."""
    room = pending_room(MAX_PENDING, job_id)
    if len(run.waiting) + len(run.recovering) + len(run.held) >= room:
        detail = f"{room} groups wait already, and {why_it_waits(run)}"
        run.refuse(offset=offset, group_id=group_id, job_id=job_id, reason=RejectionReason.BACKLOG_FULL, detail=detail)
        return
    run.held[offset] = Held(job_id=job_id, group_id=group_id)
    run.touch()


def refuse_unread(run: "ModelRun", reason: RejectionReason, detail: str) -> None:
    """Refuse the pending groups that are not in memory."""
    jobs = {pending.offset: pending.job_id for pending in run.state.pending}
    for offset in sorted(run.recovering):
        run.refuse(offset=offset, group_id=f"{run.lane}-{offset}", job_id=jobs.get(offset), reason=reason, detail=detail)
    for offset, one in list(run.held.items()):
        run.refuse(offset=offset, group_id=one.group_id or f"{run.lane}-{offset}", job_id=one.job_id, reason=reason, detail=detail)
    run.recovering = frozenset()
