"""What is known of jobs: their documents, with the commands folded over them that no owner has read yet. Pure; `jobs` reads the log.

What users of the hosted APIs would see (exactly-once rule 16):

- A cancel shows at once, as JOB_STATE_CANCELLING. The job may still end as COMPLETED, where its step is committed before the owner reads
  the command, so CANCELLED would be a promise that no one can keep.
- A pause does not change the state: a step may run until the owner reads it, and those APIs have no state for it. `requested` says it.
- A resumed job is JOB_STATE_PENDING: it is in the queue again, whether or not a worker is there to take it.

Commands count in the order of the log; a cancel is final. Those below the lane's, or the document's, `commands_through` are folded in.

What of a job did not train, or not whole, and why, in sentences for people and clients. Pure.

Guarantees: counts by reason cover all rejected groups and trajectories of the job; the first of them are named by their indices. A
completed job that trained nothing says so. Limitations: the document lists 20 rejections; all of them are events in `training-events`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, cast

from aiokafka import ConsumerRecord

from headrace.core.kept import latest_kept, open_kept
from headrace.core.model_views import command_of, latest_states
from headrace.schemas.commands import CancelJob, PauseJob, ResumeJob
from headrace.schemas.jobs import TRANSITIONS, JobDocument, JobRejection, JobRejections, JobState
from headrace.schemas.reasons import RejectionReason
from headrace.schemas.state import LaneState, ModelState

Cancelling = Literal["JOB_STATE_CANCELLING"]
CANCELLING: Cancelling = "JOB_STATE_CANCELLING"
"""Shown, never stored: someone asked for it and no owner has answered."""
ShownState = JobState | Cancelling
JobCommand = CancelJob | PauseJob | ResumeJob
Request = Literal["cancel", "pause", "resume"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """A job as it stands, with what was asked of it."""

    job_id: str
    model_id: str
    state: ShownState
    document: JobDocument | None
    """As it was written last; None: no owner has read the job's record, but someone wants it cancelled."""
    requested: Request | None = None
    """What no owner has read yet."""
    command: tuple[int, int] | None = None
    """(lane, offset) of the last command that no owner has read yet."""
    worker_group: str | None = None
    """Whose workers train the model."""
    shadow_of: str | None = None
    """Of a shadow's job: the model that it shadows."""

    @property
    def final(self) -> bool:
        """Whether the job has ended."""
        return self.state != CANCELLING and not TRANSITIONS[JobState(self.state)]


def fold_jobs(
    states: Iterable[ConsumerRecord], commands: Iterable[ConsumerRecord], documents: Iterable[ConsumerRecord]
) -> dict[str, JobView]:
    """Views by job id; what is not ours is left out.

    Args:
        states: Of `models`, each partition in offset order.
        commands: Of `commands`, likewise.
        documents: Of `jobs`, likewise, read after the others: an answer may then be seen before its question is known to be read, which
            does no harm; the other way round an answered cancel would show as no cancel.
    """
    models: dict[str, ModelState] = {}
    through: dict[int, int] = {}
    for state in latest_states(states):
        if isinstance(state, LaneState):
            through[state.lane] = state.commands_through
        else:
            models[state.model_id] = state
    views = {job_id: _cancelled(job_id, model.model_id, model) for model in models.values() for job_id in model.cancelled_early}
    for document in sorted((cast("JobDocument", kept) for _, kept in latest_kept(documents, (JobDocument,))), key=_moves):
        owner = models.get(document.model_id)
        views[document.job_id] = JobView(
            job_id=document.job_id,
            model_id=document.model_id,
            state=document.state,
            document=document,
            worker_group=None if owner is None else owner.worker_group,
            shadow_of=None if owner is None else owner.shadow_of,
        )
    for record in commands:
        command = _job_command(record)
        if command is None or record.offset < through.get(record.partition, 0):
            continue
        known = views.get(command.job_id)
        if known is None:
            if not isinstance(command, CancelJob):
                continue
            known = _cancelled(command.job_id, command.model_id, models.get(command.model_id))
        if known.model_id == command.model_id and record.offset >= (known.document.commands_through if known.document else 0):
            views[command.job_id] = asked(known, command, (record.partition, record.offset))
    return views


def asked(view: JobView, command: JobCommand, place: tuple[int, int]) -> JobView:
    """A view after one more command that no owner has read."""
    if view.final:
        return view
    match command:
        case CancelJob():
            return replace(view, state=CANCELLING, requested="cancel", command=place)
        case PauseJob() if view.state in {JobState.PENDING, JobState.RUNNING}:
            return replace(view, requested="pause", command=place)
        case ResumeJob() if view.state is JobState.PAUSED:
            return replace(view, state=JobState.PENDING, requested="resume", command=place)
        case ResumeJob() if view.requested == "pause":
            return replace(view, requested="resume", command=place)
    return view


def open_document(record: ConsumerRecord) -> JobDocument:
    """A record of `jobs`. Raises as `open_kept`."""
    return cast("JobDocument", open_kept(record, (JobDocument,)))


def _cancelled(job_id: str, model_id: str, model: ModelState | None) -> JobView:
    """A job that someone wants cancelled and of which nothing else is known."""
    return JobView(
        job_id=job_id,
        model_id=model_id,
        state=CANCELLING,
        document=None,
        worker_group=None if model is None else model.worker_group,
        shadow_of=None if model is None else model.shadow_of,
    )


def _moves(document: JobDocument) -> int:
    """Of two copies in different partitions the later one counts."""
    return document.moves


def _job_command(record: ConsumerRecord) -> JobCommand | None:
    command = command_of(record)
    return command if isinstance(command, JobCommand) else None


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
