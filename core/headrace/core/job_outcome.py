"""What of a job did not train, or not whole, and why, in sentences for people and clients. Pure.

Guarantees: counts by reason cover all rejected groups and trajectories of the job; the first of them are named by their indices. A
completed job that trained nothing says so. Limitations: the document lists 20 rejections; all of them are events in `training-events`.
"""

from collections.abc import Mapping

from headrace.schemas.jobs import JobDocument, JobRejection, JobRejections, JobState
from headrace.schemas.reasons import RejectionReason

_MOST_SENTENCES = 5
_ENDS_OF_JOBS = frozenset(
    {
        RejectionReason.STEP_FAILED,
        RejectionReason.MODEL_STOPPED,
        RejectionReason.MODEL_DELETED,
        RejectionReason.JOB_CANCELLED,
        RejectionReason.JOB_TIMED_OUT,
        RejectionReason.JOB_KIND_MISMATCH,
        RejectionReason.BACKLOG_FULL,
    }
)
"""Groups are rejected for these since their job ended: the job's own message says why, once."""


def trained_nothing(document: JobDocument) -> bool:
    """Whether the job is completed and its weights are those before it, although it asked for training."""
    return document.state is JobState.COMPLETED and not document.options.forward_only and document.num_sequences == 0


def outcome_messages(document: JobDocument) -> tuple[str, ...]:
    """What of the job did not train: the counts, the first rejections, and a sentence if nothing was left."""
    rejections = document.rejections if document.state is JobState.COMPLETED else _of_the_groups(document.rejections)
    messages: list[str] = []
    if rejections.groups:
        total = sum(rejections.groups.values())
        messages.append(f"{total} of {document.num_groups} groups were rejected: {by_reason(rejections.groups)}")
    if rejections.trajectories:
        total = sum(rejections.trajectories.values())
        messages.append(f"{total} trajectories were rejected, the rest of their groups was kept: {by_reason(rejections.trajectories)}")
    messages.extend(map(sentence, rejections.listed[:_MOST_SENTENCES]))
    if len(rejections.listed) > _MOST_SENTENCES:
        messages.append("more rejections are listed in the job's `rejections`, and each is an event in training-events")
    messages.extend(turn_messages(document.metrics).values())
    if trained_nothing(document):
        messages.append(f"the job trained nothing: {_why_nothing(document)}")
    return tuple(messages)


def turn_messages(metrics: Mapping[str, float]) -> dict[str, str]:
    """What of a step's turns trained otherwise than a sender may expect, in a sentence, by the metric that counts it."""
    found: dict[str, str] = {}
    if count := metrics.get("turns_without_end", 0.0):
        found["turns_without_end"] = (
            f"{count:.0f} turns trained without their end: the chat template writes no token that ends a turn, so that the model does not "
            "learn to stop; send token_ids with the token that ended the turn"
        )
    if count := metrics.get("turns_as_context", 0.0):
        found["turns_as_context"] = (
            f"{count:.0f} assistant turns are context: choices without log-probabilities, and assistant messages before the last user "
            "message or among choices; `weight` 1 trains a message, 0 says that it is context"
        )
    return found


def _of_the_groups(rejections: JobRejections) -> JobRejections:
    return JobRejections(
        groups={reason: count for reason, count in rejections.groups.items() if reason not in _ENDS_OF_JOBS},
        trajectories=rejections.trajectories,
        listed=tuple(entry for entry in rejections.listed if entry.reason not in _ENDS_OF_JOBS),
    )


def by_reason(counts: Mapping[RejectionReason, int]) -> str:
    """`too_long 2, stale 1`: the most frequent first."""
    return ", ".join(f"{reason} {count}" for reason, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def sentence(rejection: JobRejection) -> str:
    """`group 3, trajectory 1: too_long: …`; a group whose index is not known is named by its id."""
    group = f"group {rejection.group_id!r}" if rejection.group is None else f"group {rejection.group}"
    trajectory = "" if rejection.trajectory is None else f", trajectory {rejection.trajectory}"
    return f"{group}{trajectory}: {rejection.reason}: {rejection.detail}"


def _why_nothing(document: JobDocument) -> str:
    groups, flat = document.metrics.get("groups", 0.0), document.metrics.get("groups_zero_variance", 0.0)
    if not document.num_groups:
        return "it has no groups"
    if not groups:
        return "no group was left"
    if flat == groups:
        return f"the rewards of each of its {groups:.0f} groups are equal, so that no advantage is left"
    return "no trajectory that was left has a token to train on and an advantage that is not zero"
