"""One model on its lane: its pending groups, its jobs, and its rejections.

Guarantees: `next_change` gives a state that may be committed at any moment: every record below the lane's position is used, rejected and
reported with it, or pending (the scanned-and-pending invariant). Limitations: after a failed commit the model in memory is void; the lane
reads the committed state again.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from headrace.consumers.worker.duplicates import DuplicateWindow
from headrace.consumers.worker.jobs import (
    MESSAGE_LIMIT,
    OPEN_JOBS_BYTES,
    JobSizes,
    latest_ids,
    log_time,
    moved_document,
    new_document,
    state_event,
    with_rejection,
)
from headrace.consumers.worker.model_draft import ModelChange, ModelDraft, ModelStatus, counted
from headrace.consumers.worker.pending import MAX_PENDING, HeldGroup, PendingGroup, Retry, pending_room
from headrace.schemas.base import utc_now
from headrace.schemas.events import GroupRejected, TrajectoryRejected
from headrace.schemas.jobs import TRANSITIONS, JobDocument, JobRejection, JobRejections, JobState, TrainingJob
from headrace.schemas.reasons import RejectionReason
from headrace.schemas.state import DoomedWeights, ModelState, OpenJob, Pending
from headrace.trainer.groups import RejectedTrajectory

_DETAIL_LIMIT = 1000
_REPORTED = 5_000
"""Rejections that the report of one step lists."""


@dataclass(slots=True)
class RejectedSinceStep:
    """Rejections since the last step, committed or not: the next step's report lists them."""

    groups: list[GroupRejected] = field(default_factory=list)
    trajectories: list[TrajectoryRejected] = field(default_factory=list)
    unlisted: int = 0
    """Rejections beyond the bound of the lists."""

    @property
    def counts(self) -> tuple[int, int, int]:
        """Listed groups, listed trajectories, unlisted."""
        return len(self.groups), len(self.trajectories), self.unlisted

    def remove(self, counts: tuple[int, int, int]) -> None:
        """A report with so many is committed."""
        del self.groups[: counts[0]], self.trajectories[: counts[1]]
        self.unlisted -= counts[2]


@dataclass(slots=True, kw_only=True)
class LaneModel(ModelDraft):
    """A model on the lane that owns it: its state, its groups and its jobs."""

    window: DuplicateWindow
    lane: int
    waiting: dict[int, PendingGroup] = field(default_factory=dict)
    """Admitted groups by offset, in offset order."""
    jobs: dict[str, OpenJob] = field(default_factory=dict)
    recovering: frozenset[int] = frozenset()
    """Offsets that the committed state lists as admitted and pending. They are read again, and are no duplicates of themselves."""
    held: dict[int, HeldGroup] = field(default_factory=dict)
    """Groups that came while the model did not train, by offset, in offset order."""
    doomed: list[DoomedWeights] = field(default_factory=list)
    """Weights that a client deleted and that are still stored."""
    since_step: RejectedSinceStep = field(default_factory=RejectedSinceStep)
    retry: Retry = field(default_factory=Retry)
    linger_over: bool = False
    """The clock decided that the stream's groups have waited long enough."""
    snapshot_wanted: bool = False
    """The model has had no step for long, and no snapshot contains its last steps."""
    drop_lost: bool = False
    """An operator lets the model continue without the pending groups that are lost."""
    sizes: JobSizes = field(default_factory=JobSizes)

    @classmethod
    def from_state(cls, state: ModelState, window: DuplicateWindow, lane: int) -> "LaneModel":
        """A model that continues a committed state."""
        held_from = state.held_from
        return cls(
            state=state,
            draft=state,
            window=window,
            lane=lane,
            jobs={job.job_id: job for job in state.open_jobs},
            recovering=frozenset(p.offset for p in state.pending if held_from is None or p.offset < held_from),
            held={p.offset: HeldGroup(job_id=p.job_id) for p in state.pending if held_from is not None and p.offset >= held_from},
            doomed=list(state.doomed),
        )

    @property
    def usable(self) -> bool:
        """Whether the model is active, and nothing is known against its base model."""
        return self.status == "active" and (self.draft.waiting_for is None or self.retry.step)

    @property
    def unread(self) -> bool:
        """Whether pending groups are not in their buckets."""
        return bool(self.recovering or self.held)

    @property
    def trains(self) -> bool:
        """Whether groups go into buckets and steps begin. Not before every pending group is back in its bucket."""
        return self.usable and not self.unread

    @property
    def restarts(self) -> bool:
        """Whether its next version trains nothing: the first of a fork, or the first after a divergence."""
        return self.usable and (self.draft.rebasing is not None or self.draft.start_from is not None)

    @property
    def waiting_bytes(self) -> int:
        """Memory of the groups in buckets."""
        return sum(waiting.group.nbytes for waiting in self.waiting.values())

    def job_state(self, job_id: str) -> JobState | None:
        """The state of an open job whose record was read."""
        job = self.jobs.get(job_id)
        return None if job is None or job.document is None else job.document.state

    def handled(self, offset: int) -> bool:
        """Whether a committed state covers the record already, and it is not pending."""
        return offset < self.state.scanned and offset not in self.recovering and offset not in self.held

    def why_it_does_not_train(self) -> str:
        """For messages."""
        if self.draft.waiting_for is not None:
            return f"the model waits: {self.draft.waiting_for}"
        return "the model is taken up again" if self.status == "active" else f"the model is {self.status}: {self.draft.status_detail}"

    def set_status(self, status: ModelStatus, detail: str | None) -> None:
        """The model is deleted, stopped, diverged or active again."""
        detail = detail and detail[:MESSAGE_LIMIT]
        self.report_status(status, detail)
        self.change(status=status, status_detail=detail, waiting_for=None)
        self.retry = Retry()
        self.clear_job_waits()

    def admit(self, waiting: PendingGroup, *, report_rejected: bool = True) -> None:
        """Put a group into its bucket, and report its members that can't train.

        Args:
            waiting: The group.
            report_rejected: False for a group that a committed state lists: that commit reported them.
        """
        self.waiting[waiting.offset] = waiting
        if waiting.job_id is not None and waiting.job_id not in self.jobs:
            self.jobs[waiting.job_id] = OpenJob(job_id=waiting.job_id, since=log_time(waiting.timestamp_ms))
        if report_rejected:
            self.reject_members(waiting, waiting.group.rejected)
            # The committed window already knew a pending group, and may have dropped it since (the duplicate-window invariant).
            self.window.add(waiting.group.group_id)
        if waiting.job_id is not None:
            self._bound_jobs(waiting.job_id)
        self.touch()

    def hold(self, offset: int, group_id: str, job_id: str | None) -> None:
        """Keep a group pending without admitting it. Beyond the bound it is rejected."""
        room = pending_room(MAX_PENDING, job_id)
        if len(self.waiting) + len(self.recovering) + len(self.held) >= room:
            detail = f"{room} groups wait already, and {self.why_it_does_not_train()}"
            self.reject_group(offset=offset, group_id=group_id, job_id=job_id, reason=RejectionReason.BACKLOG_FULL, detail=detail)
            return
        self.held[offset] = HeldGroup(job_id=job_id, group_id=group_id)
        self.touch()

    def reject_group(
        self, *, offset: int, group_id: str, job_id: str | None, reason: RejectionReason, detail: str, trajectory: int | None = None
    ) -> None:
        """Reject a group: it leaves its bucket, and the next commit reports it."""
        self.waiting.pop(offset, None)
        self.held.pop(offset, None)
        if self.intent is not None and offset in self.intent.offsets:
            self.change(intent=None)  # that batch no longer exists
        event = GroupRejected(
            model_id=self.state.model_id,
            group_id=group_id,
            job_id=job_id,
            reason=reason,
            detail=detail[:_DETAIL_LIMIT],
            trajectory=trajectory,
            partition=self.lane,
            offset=offset,
        )
        self.events.append(event)
        if len(self.since_step.groups) < _REPORTED:
            self.since_step.groups.append(event)
        else:
            self.since_step.unlisted += 1
        # The job still has the first copy of a duplicate of its own. Where another job or the stream has it, the job waits for nothing.
        kept = reason is RejectionReason.JOB_CLOSED or (reason is RejectionReason.DUPLICATE and self._job_has(job_id, group_id))
        if job_id is not None and job_id not in self.draft.closed_jobs and not kept:
            job = self.jobs.get(job_id, OpenJob(job_id=job_id))
            document = job.document and job.document.model_copy(update={"groups_rejected": job.document.groups_rejected + 1})
            job = job.model_copy(update={"refused": (*job.refused, group_id), "document": document})
            rejection = JobRejection(group_id=group_id, trajectory=trajectory, reason=reason, detail=event.detail)
            self.jobs[job_id] = with_rejection(job, rejection)
            self._bound_jobs(job_id)
        self.touch()

    def _job_has(self, job_id: str | None, group_id: str) -> bool:
        job = None if job_id is None else self.jobs.get(job_id)
        rejected = job is not None and group_id in job.refused
        return rejected or any(waiting.job_id == job_id and waiting.group.group_id == group_id for waiting in self.waiting.values())

    def reject_members(self, waiting: PendingGroup, members: Iterable[RejectedTrajectory], *, in_report: bool = False) -> None:
        """Reject trajectories of a group that trains without them; the next commit reports them.

        Args:
            waiting: The group.
            members: Those that can't train.
            in_report: The report of the step that is committed with this lists them already.
        """
        events = member_events(self.state.model_id, self.lane, waiting, members)
        self.events.extend(events)
        room = 0 if in_report else max(0, _REPORTED - len(self.since_step.trajectories))
        self.since_step.trajectories.extend(events[:room])
        self.since_step.unlisted += 0 if in_report else len(events[room:])
        for event in events:
            if event.job_id is not None and event.job_id not in self.draft.closed_jobs:
                job = self.jobs.get(event.job_id, OpenJob(job_id=event.job_id))
                rejection = JobRejection(
                    group_id=event.group_id, trajectory=event.trajectory, whole_group=False, reason=event.reason, detail=event.detail
                )
                self.jobs[event.job_id] = with_rejection(job, rejection)
        self.touch()

    def reject_waiting(self, waiting: PendingGroup, reason: RejectionReason, detail: str, trajectory: int | None = None) -> None:
        """Reject a group that is in its bucket."""
        self.reject_group(
            offset=waiting.offset,
            group_id=waiting.group.group_id,
            job_id=waiting.job_id,
            reason=reason,
            detail=detail,
            trajectory=trajectory,
        )

    def reject_all(self, reason: RejectionReason, detail: str, job_id: str | None = None) -> None:
        """Reject the groups in memory: all, or those of one job."""
        for waiting in list(self.waiting.values()):
            if job_id is None or waiting.job_id == job_id:
                self.reject_waiting(waiting, reason, detail)

    def reject_unread(self, reason: RejectionReason, detail: str, offsets: Iterable[int] | None = None) -> None:
        """Reject pending groups that are not in memory: all, or those at these offsets."""
        jobs = {pending.offset: pending.job_id for pending in self.state.pending}
        for offset in sorted({*self.recovering, *self.held} if offsets is None else offsets):
            held = self.held.get(offset, HeldGroup(job_id=jobs.get(offset)))
            self.recovering -= {offset}
            name = held.group_id or f"{self.lane}-{offset}"
            self.reject_group(offset=offset, group_id=name, job_id=held.job_id, reason=reason, detail=detail)

    def use_groups(self, offsets: Iterable[int]) -> None:
        """A step that is committed next trained on these groups: they leave their bucket."""
        for offset in offsets:
            del self.waiting[offset]
        self.linger_over = False
        self.change(intent=None, rebasing=None, start_from=None)

    def open_job(self, record: TrainingJob, offset: int, timestamp_ms: int = -1) -> None:
        """Take a job's record. A record that is known already, or whose job ended, is dropped (the idempotent-submit invariant)."""
        known = self.jobs.get(record.job_id)
        if record.job_id in self.draft.closed_jobs or (known is not None and known.record_offset is not None):
            return
        rejected = known.refused if known is not None else ()
        rejections = known.rejections if known is not None else JobRejections()
        document = new_document(record, self.state.model_id, rejected=len(rejected), rejections=rejections)
        self.jobs[record.job_id] = OpenJob(
            job_id=record.job_id,
            record_offset=offset,
            group_ids=record.group_ids,
            refused=rejected,
            document=document,
            since=(known.since if known is not None else None) or log_time(timestamp_ms),
        )
        self._report_job(document, previous=None, message=None)
        self._bound_jobs(record.job_id)
        if record.job_id in self.jobs and record.job_id in self.draft.cancelled_early:
            self.cancel_job(record.job_id, "cancelled on request, before its record came")

    def cancel_job(self, job_id: str, message: str) -> None:
        """Cancel an open job and reject its groups. A job whose record has not come is noted, and cancelled when it comes."""
        job = self.jobs.get(job_id)
        if job_id in self.draft.closed_jobs:
            return
        early = self.draft.cancelled_early
        if job is None or job.document is None:
            if job_id not in early:
                self.change(cancelled_early=latest_ids([*early, job_id]))
            return
        self.change(cancelled_early=tuple(one for one in early if one != job_id))
        self.move_job(job_id, JobState.CANCELLED, message=message)
        self.reject_all(RejectionReason.JOB_CANCELLED, "the job was cancelled", job_id)

    def end_incomplete_job(self, job_id: str, reason: RejectionReason, message: str) -> None:
        """Fail a job and reject its groups. A job whose record never came is closed without a document."""
        if self.jobs[job_id].document is not None:
            self.move_job(job_id, JobState.FAILED, message=message)
        else:
            self._close_job(job_id)
        self.reject_all(reason, message, job_id)

    def _close_job(self, job_id: str) -> None:
        del self.jobs[job_id]
        self.change(closed_jobs=latest_ids([*self.draft.closed_jobs, job_id]))

    def _bound_jobs(self, job_id: str) -> None:
        """End the job that has just grown, if the state has no room for it."""
        if not self.sizes.fit(self.jobs, job_id):
            message = (
                f"backlog_full: the open jobs of this model take more than {OPEN_JOBS_BYTES} bytes: send it again when some have ended"
            )
            self.end_incomplete_job(job_id, RejectionReason.BACKLOG_FULL, message)

    def move_job(self, job_id: str, to: JobState, *, message: str | None = None, **fields: Any) -> None:  # noqa: ANN401 - document fields
        """Move a job to another state; a job in a final state is closed.

        Raises:
            RuntimeError: the transition is not allowed; always a defect of Headrace.
        """
        job = self.jobs[job_id]
        if job.document is None:
            raise RuntimeError(f"job {job_id} can't go to {to}: its record was not read")
        document = moved_document(job.document, to, message, fields)
        self.jobs[job_id] = job.model_copy(update={"document": document})
        self._report_job(document, previous=job.document.state, message=document.error_message)
        if self.intent is not None and self.intent.job_id == job_id and to is not JobState.RUNNING:
            self.change(intent=None)
        if not TRANSITIONS[to]:
            self._close_job(job_id)

    def _report_job(self, document: JobDocument, *, previous: JobState | None, message: str | None) -> None:
        self.documents[document.job_id] = document
        self.events.append(state_event(document, previous=previous, message=message))
        self.touch()

    def note_waiting(self, job_id: str, why: str | None) -> None:
        """Note in a job's document why it has not begun; the next commit publishes it."""
        job = self.jobs[job_id]
        if job.document is not None and job.document.waiting_for != why:
            document = job.document.model_copy(update={"waiting_for": why, "updated_at": utc_now()})
            self.jobs[job_id] = job.model_copy(update={"document": document})
            self.documents[job_id] = document
            self.touch()

    def clear_job_waits(self) -> None:
        """The reason why open jobs waited may have changed."""
        for job_id in list(self.jobs):
            self.note_waiting(job_id, None)

    def next_change(self, position: int, **fields: Any) -> ModelChange:  # noqa: ANN401 - fields of the state
        """What a transaction commits of the model when the lane's position is `position`. Changes nothing."""
        unread = (p for p in self.state.pending if p.offset in self.recovering)
        admitted = (Pending(offset=w.offset, job_id=w.job_id) for w in self.waiting.values())
        held = (Pending(offset=offset, job_id=one.job_id) for offset, one in self.held.items())
        return self.change_with(
            {
                "scanned": max(self.state.scanned, position),
                "pending": tuple(sorted((*unread, *admitted, *held), key=lambda p: p.offset)),
                "held_from": min(self.held, default=None),
                "open_jobs": tuple(self.jobs.values()),
                "refusals": counted(self.events, GroupRejected, self.state.refusals),
                "trajectory_refusals": counted(self.events, TrajectoryRejected, self.state.trajectory_refusals),
                "doomed": tuple(self.doomed),
                "window_since": self.window.since_text(),
                "updated_at": utc_now(),
                **fields,
            }
        )


def member_events(model_id: str, lane: int, waiting: PendingGroup, members: Iterable[RejectedTrajectory]) -> list[TrajectoryRejected]:
    """The events for members of a group that can't train."""
    return [
        TrajectoryRejected(
            model_id=model_id,
            group_id=waiting.group.group_id,
            job_id=waiting.job_id,
            reason=member.reason,
            detail=member.detail[:_DETAIL_LIMIT],
            trajectory=member.index,
            partition=lane,
            offset=waiting.offset,
        )
        for member in members
    ]
