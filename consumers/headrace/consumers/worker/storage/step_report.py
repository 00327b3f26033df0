"""The report of a step: what was trained on, what was refused, and how long it took.

Guarantees: a pure function of the step; group ids, offsets, producers, rewards, tokens, versions and advantages of everything that the step
trained on. An advantage is the trajectory's own, before a KL penalty moves it token by token; `rows.safetensors` has those that were used.
Limitations: refusals that the worker did not see (another owner's, before it); all of them are in `training-events`.
"""

from collections.abc import Mapping, Sequence
from math import isfinite

from headrace.consumers.worker.pending import PendingGroup
from headrace.consumers.worker.selection import Batch
from headrace.schemas.events import GroupRejected, TrajectoryRejected
from headrace.schemas.state import ReportedGroup, ReportedTrajectory, RowsKept, StepReport
from headrace.trainer.advantages import batch_credits
from headrace.trainer.options import resolve
from headrace.trainer.plan import StepPlan, StepResult

_PHASE = "seconds_"


def build_report(
    *,
    plan: StepPlan,
    batch: Batch,
    result: StepResult,
    lane: int,
    refused: Sequence[GroupRejected],
    refused_trajectories: Sequence[TrajectoryRejected],
    unlisted: int,
    timings: Mapping[str, float],
    rows: RowsKept,
) -> StepReport:
    """The report of a step that has run.

    Args:
        plan: As it was run.
        batch: Its groups, as they waited.
        result: What the ranks answered.
        lane: Partition number.
        refused: Groups refused since the step before.
        refused_trajectories: Trajectories refused alone since then.
        unlisted: Refusals beyond those.
        timings: Seconds of the worker's own phases; those of the ranks come from the result: each phase, and `step` for all of it.
        rows: How many packed rows the ranks were asked to keep.
    """
    return StepReport(
        model_id=result.key.model_id,
        incarnation=result.key.incarnation,
        step=result.key.step,
        attempt=plan.attempt,
        lane=lane,
        job_id=batch.job_id,
        groups=_groups(plan, batch.groups),
        refused=tuple(refused),
        refused_trajectories=tuple(refused_trajectories),
        refused_unlisted=unlisted,
        timings={
            **{name.removeprefix(_PHASE): s for name, s in result.metrics.items() if name.startswith(_PHASE) and isfinite(s)},
            "step": result.seconds,
            **timings,
        },
        rows=rows if result.num_sequences else "none",
    )


def _groups(plan: StepPlan, waiting: Sequence[PendingGroup]) -> tuple[ReportedGroup, ...]:
    advantages = None if plan.sft is not None or plan.forward_only else _advantages(plan)
    return tuple(
        ReportedGroup(
            group_id=group.group_id,
            offset=held.offset,
            producer=held.producer,
            trajectories=tuple(
                ReportedTrajectory(
                    index=index,
                    reward=trajectory.reward,
                    # One without a sampled token is part of its group's baseline and has none of its own.
                    advantage=advantages.get((g, t), 0.0) if advantages is not None and trajectory.trainable_tokens else None,
                    tokens=trajectory.tokens,
                    trainable_tokens=trajectory.trainable_tokens,
                    initial_policy_version=trajectory.initial_policy_version,
                    final_policy_version=trajectory.final_policy_version,
                )
                for t, (index, trajectory) in enumerate(zip(group.indices, group.trajectories, strict=True))
            ),
        )
        for g, (held, group) in enumerate(zip(waiting, plan.groups, strict=True))
    )


def _advantages(plan: StepPlan) -> dict[tuple[int, int], float]:
    """By (group, trajectory) of the plan, as the ranks compute them; what has no variance is not in it."""
    options = resolve(plan.config)
    found = batch_credits(plan.groups, options.advantages, options.aggregation, options.aggregation_constant)
    return {(credit.group, credit.trajectory): credit.advantage for credit in found}
