"""What is known of jobs: their documents, with the commands folded over them that no owner has read yet. Pure; `jobs` reads the log.

What users of the hosted APIs would see (exactly-once rule 16):

- A cancel shows at once, as JOB_STATE_CANCELLING. The job may still end as COMPLETED, where its step is committed before the owner reads
  the command, so CANCELLED would be a promise that no one can keep.
- A pause does not change the state: a step may run until the owner reads it, and those APIs have no state for it. `requested` says it.
- A resumed job is JOB_STATE_PENDING: it is in the queue again, whether or not a worker is there to take it.

Commands count in the order of the log; a cancel is final. Those below the lane's, or the document's, `commands_through` are folded in.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, cast

from aiokafka import ConsumerRecord

from headrace.core.kept import latest_kept, open_kept
from headrace.core.model_views import command_of, latest_states
from headrace.schemas.commands import CancelJob, PauseJob, ResumeJob
from headrace.schemas.jobs import TRANSITIONS, JobDocument, JobState
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
