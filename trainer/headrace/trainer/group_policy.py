"""Whether what is left of a group trains: the model's policy for incomplete groups and for equal rewards.

A member is missing when its trajectory was rejected, or when its rollout failed (an exception of the group). One function decides, at
admission and again at the cut, where versions are judged.

Guarantees: a pure function of group and policy. A group with no one left is refused with the first member's own reason, whatever the
policy; groups of examples (`sft`) have no baseline that a lost member could move, so nothing else refuses them. A group that lost no one is
complete, however small it was sent. Limitations: the details of all members of a refused group: the first one's is quoted, all are named.
"""

from dataclasses import dataclass

from headrace.schemas.reasons import RejectionReason
from headrace.schemas.training import BatchPolicy
from headrace.trainer.groups import TokenizedGroup

_NAMED = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRefusal:
    """Why a group is refused as a whole."""

    reason: RejectionReason
    detail: str
    trajectory: int | None = None
    """Index of the first member at fault, where one is."""


def refusal_of(group: TokenizedGroup, policy: BatchPolicy) -> GroupRefusal | None:
    """Why the group, as it is now, is not trained on; None where it is."""
    if group.rejected and not group.trajectories:
        first, *others = group.rejected
        detail = first.detail if not others else f"{first.detail} (no trajectory is left: {_named(group)})"
        return GroupRefusal(reason=first.reason, detail=detail, trajectory=first.index)
    if group.sft:
        return None
    return _incomplete(group, policy) or _without_variance(group, policy)


def _incomplete(group: TokenizedGroup, policy: BatchPolicy) -> GroupRefusal | None:
    missing, left = len(group.rejected) + group.exceptions, len(group.trajectories)
    if missing == 0 or policy.incomplete_groups == "partial":
        return None
    wanted = f"incomplete_groups={policy.incomplete_groups}"
    if policy.incomplete_groups == "minimum":
        minimum = policy.minimum_group_size or 1  # the schema asks for one
        if left >= minimum:
            return None
        wanted = f"{wanted}, minimum_group_size={minimum}"
    first = group.rejected[0] if group.rejected else None
    detail = f"{missing} of {missing + left} members are missing ({wanted}): {_named(group)}"
    return GroupRefusal(
        reason=RejectionReason.INCOMPLETE_GROUP,
        detail=detail if first is None else f"{detail}; {first.detail}",
        trajectory=None if first is None else first.index,
    )


def _without_variance(group: TokenizedGroup, policy: BatchPolicy) -> GroupRefusal | None:
    if policy.zero_variance == "count" or not group.zero_variance:
        return None
    n = len(group.trajectories)
    lost = f" (without {_named(group)})" if group.rejected else ""
    rewards = [trajectory.reward for trajectory in group.trajectories]
    equal = f"are {rewards[0]}" if max(rewards) == min(rewards) else f"are {rewards[0]} but for rounding"
    detail = f"all {n} rewards {equal}{lost}: nothing to learn from (batch.zero_variance=refuse)"
    return GroupRefusal(reason=RejectionReason.ZERO_VARIANCE, detail=detail)


def _named(group: TokenizedGroup) -> str:
    """Members with their reasons: `trajectories[1] too_long, trajectories[4] missing_logprobs, 1 exception`."""
    names = [f"trajectories[{member.index}] {member.reason}" for member in group.rejected[:_NAMED]]
    if len(group.rejected) > _NAMED:
        names.append(f"{len(group.rejected) - _NAMED} more")
    if group.exceptions:
        names.append("1 exception" if group.exceptions == 1 else f"{group.exceptions} exceptions")
    return ", ".join(names)
