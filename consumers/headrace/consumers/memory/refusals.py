"""What is said of refused trajectories, and how refusals are counted. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from headrace.consumers.memory.state_bounds import DETAIL_LIMIT
from headrace.consumers.memory.waiting import Waiting
from headrace.schemas.events import GroupRejected, TrajectoryRejected
from headrace.schemas.reasons import RejectionReason
from headrace.trainer.groups import RejectedTrajectory

REPORTED = 5_000
"""Refusals that the report of one step lists."""


def member_events(model_id: str, lane: int, waiting: Waiting, members: Iterable[RejectedTrajectory]) -> list[TrajectoryRejected]:
    """What subscribers are told of members that can't train."""
    return [
        TrajectoryRejected(
            model_id=model_id,
            group_id=waiting.group.group_id,
            job_id=waiting.job_id,
            reason=member.reason,
            detail=member.detail[:DETAIL_LIMIT],
            trajectory=member.index,
            partition=lane,
            offset=waiting.offset,
        )
        for member in members
    ]


def counted(
    events: Sequence[GroupRejected] | Sequence[TrajectoryRejected], before: Mapping[RejectionReason, int] | None = None
) -> dict[RejectionReason, int]:
    """Refusals by reason, on top of what was counted before."""
    return dict(Counter(before) + Counter(event.reason for event in events))
