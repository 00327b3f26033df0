"""A version that trains nothing: the first of a fork, or the one with which a diverged model resumes. Its files are written again.

Guarantees: the ledger has a record of it (`forked` with the state that it begins with, or `rebased` with both digests).
"""

import shutil
from dataclasses import replace

from headrace.consumers.worker.lane_model import LaneModel
from headrace.consumers.worker.recovery import Reached
from headrace.consumers.worker.selection import Batch
from headrace.consumers.worker.step import LaneSteps
from headrace.consumers.worker.step_tools import StepTools, Timer
from headrace.consumers.worker.transaction import StepToCommit
from headrace.schemas.state import ModelState, Rebased, StartFrom
from headrace.trainer.plan import StateKey


async def restart(model: LaneModel, tools: StepTools, steps: LaneSteps) -> StepToCommit:
    """Run the version that a fork begins with, or with which a diverged model resumes.

    Raises:
        StepFailedError, RankDiedError: the ranks could not take the state over.
        ModelDivergedError: the ledger itself lacks steps.
        HeadraceError: the store can't be reached, or lacks the state that is to be copied.
    """
    state, origin = model.state, model.draft.start_from
    attempt = await tools.attempts.new(state.model_id)
    if origin is not None:
        begins = StateKey(model_id=origin.forked_from, incarnation=origin.incarnation, step=origin.step, attempt=origin.attempt)
        reached = Reached(state=begins, scalars=origin.scalars, snapshot=origin.snapshot, trained=state.policy_version, stopped=None)
    else:
        reached = await tools.recovery.reach(state)
    plan = replace(tools.plans.restart(model, reached.state, attempt), scalars=reached.scalars)
    timer = Timer()
    try:
        result = await tools.world.run(plan, reached.snapshot)
        timer.lap("in_world")
        batch = Batch(groups=(), job_id=None, cut="rebased" if origin is None else "forked", completed_at=-1)
        step = await steps.store(model, batch, plan, result, timer)
    except BaseException:
        shutil.rmtree(plan.out_dir, ignore_errors=True)
        raise
    return replace(step, record=step.record.model_copy(update=_origin(step, state, model.draft.rebasing, reached, origin)))


def _origin(step: StepToCommit, state: ModelState, rebasing: str | None, reached: Reached, origin: StartFrom | None) -> dict[str, object]:
    if origin is not None:
        return {"forked": origin}
    if rebasing is None or state.weights is None:
        return {}
    rebased = Rebased(
        step=min(reached.trained + 1, state.policy_version),
        reason=rebasing if reached.stopped is None else f"{rebasing}; resumed from step {reached.trained}: {reached.stopped}",
        expected_digest=state.weights.digest,
        found_digest=step.record.weights.digest,
        resumed_from=reached.trained,
    )
    return {"rebased": rebased}
