"""One model on its lane: what was committed of it, and what happened since.

Guarantees: `state_at` is the state that a transaction may commit at any moment: everything below the lane's position is used, refused and
reported with it, or pending. Gives up: any truth after a failed commit; the lane then throws its runs away and reads again (rule 5).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.consumers.memory.duplicates import DuplicateWindow
from headrace.consumers.memory.held import Held, Retry, say_status
from headrace.consumers.memory.job_documents import change_of, moved, opened, since, with_rejection
from headrace.consumers.memory.refusals import REPORTED, counted, member_events
from headrace.consumers.memory.state_bounds import DETAIL_LIMIT, MESSAGE_LIMIT, OPEN_JOBS_BYTES, JobSizes, latest
from headrace.consumers.memory.waiting import Waiting
from headrace.schemas.base import utc_now
from headrace.schemas.events import GroupRejected, JobStateChanged, ModelStatusChanged, Starved, TrajectoryRejected
from headrace.schemas.jobs import TRANSITIONS, JobDocument, JobRejection, JobRejections, JobState, TrainingJob
from headrace.schemas.reasons import RejectionReason
from headrace.schemas.state import DoomedWeights, Intent, ModelState, OpenJob, Pending, StartFrom
from headrace.trainer.groups import RejectedTrajectory

ModelStatus = Literal["active", "deleted", "diverged", "stopped"]


@dataclass(slots=True, kw_only=True)
class ModelRun:
    """The moving part of a model's state."""

    state: ModelState
    window: DuplicateWindow
    lane: int
    waiting: dict[int, Waiting] = field(default_factory=dict)
    """Admitted groups by offset, in offset order."""
    jobs: dict[str, OpenJob] = field(default_factory=dict)
    recovering: frozenset[int] = frozenset()
    """Offsets that the committed state lists as admitted and pending: read again, and no duplicates of themselves."""
    held: dict[int, Held] = field(default_factory=dict)
    """Groups that came while the model did not train, by offset, in offset order."""
    rejected: list[GroupRejected] = field(default_factory=list)
    """Groups refused as a whole."""
    rejected_trajectories: list[TrajectoryRejected] = field(default_factory=list)
    """Refused alone: the rest of the group went on."""
    job_events: list[JobStateChanged] = field(default_factory=list)
    notices: list[ModelStatusChanged | Starved] = field(default_factory=list)
    """What else subscribers should hear."""
    refused_since: list[GroupRejected] = field(default_factory=list)
    """Since the last step, committed or not: its report lists them."""
    refused_trajectories_since: list[TrajectoryRejected] = field(default_factory=list)
    refused_unlisted: int = 0
    """Those beyond the lists' bound."""
    documents: dict[str, JobDocument] = field(default_factory=dict)
    closed: list[str] = field(default_factory=list)
    status: ModelStatus = "active"
    status_detail: str | None = None
    status_changes: int = 0
    waiting_for: str | None = None
    """What is wrong with its base model: an active model trains nothing until that is repaired."""
    retry: Retry = field(default_factory=Retry)
    intent: Intent | None = None
    rebasing: str | None = None
    start_from: StartFrom | None = None
    cancelled_early: list[str] = field(default_factory=list)
    doomed: list[DoomedWeights] = field(default_factory=list)
    lingered: bool = False
    """The clock says that the stream's groups have waited long enough."""
    settling: bool = False
    """It has had no step for long, and its last ones are in no snapshot."""
    expire_lost: bool = False
    """An operator lets the model go on without the pending groups that are lost."""
    sizes: JobSizes = field(default_factory=JobSizes)
    revision: int = 0
    """Goes up with everything that happens; a commit notes which revision it says."""
    said: int = 0
    """The last revision that is committed."""
    urgent: bool = False
    """The model itself changed (created, deleted, stopped): somebody waits for that."""

    @classmethod
    def of(cls, state: ModelState, window: DuplicateWindow, lane: int) -> "ModelRun":
        """A run that continues a committed state."""
        return cls(
            state=state,
            window=window,
            lane=lane,
            jobs={job.job_id: job for job in state.open_jobs},
            recovering=frozenset(p.offset for p in state.pending if state.held_from is None or p.offset < state.held_from),
            held={p.offset: Held(job_id=p.job_id) for p in state.pending if state.held_from is not None and p.offset >= state.held_from},
            closed=list(state.closed_jobs),
            status=state.status,
            status_detail=state.status_detail,
            status_changes=state.status_changes,
            waiting_for=state.waiting_for,
            intent=state.intent,
            rebasing=state.rebasing,
            start_from=state.start_from,
            cancelled_early=list(state.cancelled_early),
            doomed=list(state.doomed),
        )

    @property
    def dirty(self) -> bool:
        """Whether something happened that no committed record says."""
        return self.revision != self.said

    def touch(self, *, urgent: bool = False) -> None:
        """Something happened."""
        self.revision += 1
        self.urgent = self.urgent or urgent

    def set_status(self, status: ModelStatus, detail: str | None) -> None:
        """The model is deleted, stopped, diverged or active again."""
        detail = detail and detail[:MESSAGE_LIMIT]
        say_status(self, status, detail)
        self.status, self.status_detail, self.waiting_for, self.retry = status, detail, None, Retry()
        self.clear_waiting()

    def clear_waiting(self) -> None:
        """What open jobs waited for may be another thing now."""
        for job_id in list(self.jobs):
            self.note_waiting(job_id, None)

    @property
    def shown_status(self) -> str:
        """As `models list` shows it."""
        return self.status if self.waiting_for is None else "waiting"

    @property
    def trains(self) -> bool:
        """Whether groups go into buckets, and steps of them begin: no pending group is still to be read."""
        return self.usable and not self.unread

    @property
    def usable(self) -> bool:
        """Whether it is active, and its base model can be used as far as is known."""
        return self.status == "active" and (self.waiting_for is None or self.retry.step)

    @property
    def unread(self) -> bool:
        """Whether pending groups are not in their buckets."""
        return bool(self.recovering or self.held)

    @property
    def waiting_bytes(self) -> int:
        """Memory of the groups that wait."""
        return sum(waiting.group.nbytes for waiting in self.waiting.values())

    @property
    def unreported(self) -> bool:
        """Whether subscribers wait for something that no step may come to carry."""
        return bool(self.rejected or self.rejected_trajectories or self.job_events or self.documents or self.notices or self.urgent)

    def handled(self, offset: int) -> bool:
        """Whether a committed state covers the record already (and it is not pending)."""
        return offset < self.state.scanned and offset not in self.recovering and offset not in self.held

    def admit(self, waiting: Waiting, *, report_rejected: bool = True) -> None:
        """Put a group into its bucket, and report its members that can't train.

        Args:
            waiting: The group.
            report_rejected: False for a group that a committed state lists: that commit reported them.
        """
        self.waiting[waiting.offset] = waiting
        if waiting.job_id is not None and waiting.job_id not in self.jobs:
            self.jobs[waiting.job_id] = OpenJob(job_id=waiting.job_id, since=since(waiting.timestamp_ms))
        if report_rejected:
            self.reject_members(waiting, waiting.group.rejected)
            # Of a pending one the committed window knows already, and may have let it go since (rule 11).
            self.window.add(waiting.group.group_id)
        if waiting.job_id is not None:
            self._bound_jobs(waiting.job_id)
        self.touch()

    def refuse(
        self,
        *,
        offset: int,
        group_id: str,
        job_id: str | None,
        reason: RejectionReason,
        detail: str,
        trajectory: int | None = None,
    ) -> None:
        """Refuse a group: it leaves its bucket, and the next commit reports it."""
        self.waiting.pop(offset, None)
        self.held.pop(offset, None)
        if self.intent is not None and offset in self.intent.offsets:
            self.intent = None  # that batch will not be
        event = GroupRejected(
            model_id=self.state.model_id,
            group_id=group_id,
            job_id=job_id,
            reason=reason,
            detail=detail[:DETAIL_LIMIT],
            trajectory=trajectory,
            partition=self.lane,
            offset=offset,
        )
        self.rejected.append(event)
        if len(self.refused_since) < REPORTED:
            self.refused_since.append(event)
        else:
            self.refused_unlisted += 1
        # A duplicate is not the job's loss where the job has the group itself; where another job or the stream has it, nothing is to come.
        had = reason is RejectionReason.JOB_CLOSED or (reason is RejectionReason.DUPLICATE and self._knows(job_id, group_id))
        if job_id is not None and job_id not in self.closed and not had:
            job = self.jobs.get(job_id, OpenJob(job_id=job_id))
            document = job.document and job.document.model_copy(update={"groups_rejected": job.document.groups_rejected + 1})
            job = job.model_copy(update={"refused": (*job.refused, group_id), "document": document})
            rejection = JobRejection(group_id=group_id, trajectory=trajectory, reason=reason, detail=event.detail)
            self.jobs[job_id] = with_rejection(job, rejection)
            self._bound_jobs(job_id)
        self.touch()

    def _knows(self, job_id: str | None, group_id: str) -> bool:
        """Whether a group waits in this job, or was refused with it."""
        job = None if job_id is None else self.jobs.get(job_id)
        refused = job is not None and group_id in job.refused
        return refused or any(waiting.job_id == job_id and waiting.group.group_id == group_id for waiting in self.waiting.values())

    def reject_members(self, waiting: Waiting, members: Iterable[RejectedTrajectory], *, listed: bool = False) -> None:
        """Refuse trajectories of a group that goes on without them; the next commit reports them.

        Args:
            waiting: The group.
            members: Who can't train.
            listed: The report of the step that is committed with this has them already.
        """
        events = member_events(self.state.model_id, self.lane, waiting, members)
        self.rejected_trajectories.extend(events)
        room = 0 if listed else max(0, REPORTED - len(self.refused_trajectories_since))
        self.refused_trajectories_since.extend(events[:room])
        self.refused_unlisted += 0 if listed else len(events[room:])
        self._tell_job(events)
        self.touch()

    def _tell_job(self, events: Sequence[TrajectoryRejected]) -> None:
        for event in events:
            if event.job_id is not None and event.job_id not in self.closed:
                job = self.jobs.get(event.job_id, OpenJob(job_id=event.job_id))
                rejection = JobRejection(
                    group_id=event.group_id, trajectory=event.trajectory, whole_group=False, reason=event.reason, detail=event.detail
                )
                self.jobs[event.job_id] = with_rejection(job, rejection)

    def refuse_all(self, reason: RejectionReason, detail: str, job_id: str | None = None) -> None:
        """Refuse the groups that wait in memory: all, or those of one job."""
        for waiting in list(self.waiting.values()):
            if job_id is None or waiting.job_id == job_id:
                self.refuse(offset=waiting.offset, group_id=waiting.group.group_id, job_id=waiting.job_id, reason=reason, detail=detail)

    def open_job(self, record: TrainingJob, offset: int, timestamp_ms: int = -1) -> None:
        """Take a job's record; one that is known, or ended, is dropped (rule 17)."""
        known = self.jobs.get(record.job_id)
        if record.job_id in self.closed or (known is not None and known.record_offset is not None):
            return
        refused = known.refused if known is not None else ()
        rejections = known.rejections if known is not None else JobRejections()
        document = opened(record, self.state.model_id, rejected=len(refused), rejections=rejections)
        self.jobs[record.job_id] = OpenJob(
            job_id=record.job_id,
            record_offset=offset,
            group_ids=record.group_ids,
            refused=refused,
            document=document,
            since=(known.since if known is not None else None) or since(timestamp_ms),
        )
        self._changed(document, previous=None, message=None)
        self._bound_jobs(record.job_id)
        if record.job_id in self.jobs and record.job_id in self.cancelled_early:
            self.cancel_job(record.job_id, "cancelled on request, before its record came")

    def cancel_job(self, job_id: str, message: str) -> None:
        """Cancel an open job and refuse its groups; one whose record has not come is noted, and cancelled when it comes."""
        job = self.jobs.get(job_id)
        if job_id in self.closed:
            return
        if job is None or job.document is None:
            if job_id not in self.cancelled_early:
                self.cancelled_early = latest([*self.cancelled_early, job_id])
                self.touch()
            return
        self.cancelled_early = [early for early in self.cancelled_early if early != job_id]
        self.move_job(job_id, JobState.CANCELLED, message=message)
        self.refuse_all(RejectionReason.JOB_CANCELLED, "the job was cancelled", job_id)

    def time_out(self, job_id: str, message: str) -> None:
        """Give an incomplete job up and refuse its groups; one whose record never came is closed without a document."""
        job = self.jobs[job_id]
        if job.document is not None:
            self.move_job(job_id, JobState.FAILED, message=message)
        else:
            del self.jobs[job_id]
            self._close(job_id)
        self.refuse_all(RejectionReason.JOB_TIMED_OUT, message, job_id)

    def _close(self, job_id: str) -> None:
        self.closed = latest([*self.closed, job_id])

    def _bound_jobs(self, job_id: str) -> None:
        """End the job that has just grown, if the state has no room for it; one whose record is to come is closed without a document."""
        if self.sizes.fit(self.jobs, job_id):
            return
        message = f"backlog_full: the open jobs of this model take more than {OPEN_JOBS_BYTES} bytes: send it again when some have ended"
        if self.jobs[job_id].document is not None:
            self.move_job(job_id, JobState.FAILED, message=message)
        else:
            del self.jobs[job_id]
            self._close(job_id)
        self.refuse_all(RejectionReason.BACKLOG_FULL, message, job_id)

    def move_job(self, job_id: str, to: JobState, *, message: str | None = None, **fields: Any) -> None:  # noqa: ANN401 - document fields
        """Move a job to another state; a job in a final state is closed.

        Raises:
            RuntimeError: the transition is not allowed; always a defect of ours.
        """
        job = self.jobs[job_id]
        document = job.document
        if document is None:
            raise RuntimeError(f"job {job_id} can't go to {to}: its record was not read")
        now = moved(document, to, message, fields)
        self.jobs[job_id] = job.model_copy(update={"document": now})
        self._changed(now, previous=document.state, message=now.error_message)
        if self.intent is not None and self.intent.job_id == job_id and to is not JobState.RUNNING:
            self.intent = None
        if not TRANSITIONS[to]:
            del self.jobs[job_id]
            self._close(job_id)

    def note_waiting(self, job_id: str, why: str | None) -> None:
        """Say in a job's document why it is not begun; the next commit publishes it."""
        job = self.jobs[job_id]
        if job.document is not None and job.document.waiting_for != why:
            document = job.document.model_copy(update={"waiting_for": why, "updated_at": utc_now()})
            self.jobs[job_id] = job.model_copy(update={"document": document})
            self.documents[job_id] = document
            self.touch()

    def _changed(self, document: JobDocument, *, previous: JobState | None, message: str | None) -> None:
        self.documents[document.job_id] = document
        self.job_events.append(change_of(document, previous=previous, message=message))
        self.touch()

    def state_at(self, position: int, **update: Any) -> ModelState:  # noqa: ANN401 - fields of the state
        """The state to commit when the lane stands at `position`; `update` is what a step adds."""
        still_to_read = (Pending(offset=p.offset, job_id=p.job_id) for p in self.state.pending if p.offset in self.recovering)
        now_waiting = (Pending(offset=w.offset, job_id=w.job_id) for w in self.waiting.values())
        held = (Pending(offset=offset, job_id=one.job_id) for offset, one in self.held.items())
        pending = sorted((*still_to_read, *now_waiting, *held), key=lambda p: p.offset)
        return self.state.model_copy(
            update={
                "scanned": max(self.state.scanned, position),
                "pending": tuple(pending),
                "held_from": min(self.held, default=None),
                "open_jobs": tuple(self.jobs.values()),
                "closed_jobs": tuple(self.closed),
                "refusals": counted(self.rejected, self.state.refusals),
                "trajectory_refusals": counted(self.rejected_trajectories, self.state.trajectory_refusals),
                "status": self.status,
                "status_detail": self.status_detail,
                "status_changes": self.status_changes,
                "waiting_for": self.waiting_for,
                "intent": self.intent,
                "rebasing": self.rebasing,
                "start_from": self.start_from,
                "cancelled_early": tuple(self.cancelled_early),
                "doomed": tuple(self.doomed),
                "window_since": self.window.since_text(),
                "updated_at": utc_now(),
                **update,
            }
        )

    def committed(
        self,
        state: ModelState,
        *,
        revision: int,
        rejected: int,
        rejected_trajectories: int,
        job_events: int,
        notices: int = 0,
        documents: dict[str, JobDocument],
    ) -> None:
        """A transaction with this state is in: forget what it said, and only that, since more may have come meanwhile."""
        self.state = state
        self.said = revision
        self.urgent = self.urgent and self.dirty
        del self.rejected[:rejected]
        del self.rejected_trajectories[:rejected_trajectories]
        del self.job_events[:job_events]
        del self.notices[:notices]
        for job_id, document in documents.items():
            if self.documents.get(job_id) is document:
                del self.documents[job_id]
