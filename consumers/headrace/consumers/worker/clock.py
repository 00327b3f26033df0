"""What a lane decides by a clock: lingers, expiry, time-outs, starvation, snapshots of idle models, and reports that no step carries.

A group is rejected as `expired` at 90 % of its topic's retention, while its record can still be read again. The rest allows for clocks that
differ (Kafka stamps the record, the worker judges it) and for the time between two ticks. A job times out that still lacks its record or a
group so long after the log took its first record. A complete job waits for its step, and a paused job waits for a person.

Guarantees: the clock makes no step. A linger is a mark that the training task turns into an intent; everything else is a rejection or an
event, committed before anything follows from it (the intent-first invariant). Rejections that come together are reported together, or with
the next step. Limitations: precision below one tick; retention by size (`retention.bytes`), which does not say when a record is deleted.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from headrace.consumers.worker.commits import LaneCommitter
from headrace.consumers.worker.lane_model import LaneModel
from headrace.consumers.worker.lane_models import LaneModels
from headrace.consumers.worker.model_draft import counted
from headrace.consumers.worker.pending import PendingGroup
from headrace.core.settings import WorkerSettings
from headrace.schemas.base import utc_now
from headrace.schemas.events import GroupRejected, Starved
from headrace.schemas.jobs import JobState
from headrace.schemas.reasons import RejectionReason
from headrace.schemas.state import OpenJob

TICK_SECONDS = 0.25
_IDLE_SECONDS = 60.0
"""The lane's position is committed this often without any other change: retention may delete the records below it."""
SHARE = 0.9
"""Of the retention: older groups are rejected."""
_NAMED = 8


@dataclass(slots=True, kw_only=True)
class _Watched:
    """What the clock remembers of a model."""

    version: int
    since: float
    starved_count: int = -1
    """Rejections when starvation was last reported; -1: it was not."""
    starved_at: float = 0.0
    snapshot_wanted: bool = False


class LaneClock:
    """Watches one lane."""

    def __init__(self, settings: WorkerSettings, models: LaneModels, committer: LaneCommitter, retention_ms: int | None) -> None:
        self._settings = settings
        self._models = models
        self._committer = committer
        self._retention_ms = retention_ms
        self._watched: dict[tuple[str, str], _Watched] = {}
        self._committed_at = time.monotonic()

    async def report(self) -> None:
        """Commit what no step carries, until cancelled."""
        while True:
            await self._models.unreported.wait()
            # This collects rejections that come together: they are committed together, or with the next step.
            await asyncio.sleep(self._settings.refusal_linger_seconds)
            self._models.unreported.clear()
            if self._models.reportable:
                await self._committer.commit()

    async def tick(self) -> None:
        """Check every model each tick, until cancelled."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            for model in list(self._models.models.values()):
                if model.status == "active":
                    self._check_linger(model)
                    if not model.unread:  # groups that are not read yet may complete a job
                        self._reject_late(model)
                    self._check_idle(model)
            self._models.note_unreported()
            if self._models.position > self._models.state.scanned and time.monotonic() - self._committed_at > _IDLE_SECONDS:
                await self._committer.commit()
                self._committed_at = time.monotonic()

    def _check_linger(self, model: LaneModel) -> None:
        seconds = model.state.settings.batch.linger_seconds
        if seconds is None:
            return
        oldest = min((waiting.admitted_at for waiting in model.waiting.values() if waiting.job_id is None), default=None)
        model.linger_over = oldest is not None and time.monotonic() - oldest >= seconds
        if model.linger_over:
            self._models.changed.set()

    def _reject_late(self, model: LaneModel) -> None:
        now = utc_now()
        running = self._models.running
        in_step = running.offsets if running is not None and running.model_id == model.state.model_id else frozenset()
        for group in expired(model.waiting.values(), now_ms=int(now.timestamp() * 1000), retention_ms=self._retention_ms):
            if group.waiting.offset not in in_step:  # that step is about to train on it
                model.reject_waiting(group.waiting, RejectionReason.EXPIRED, group.detail)
        for job in timed_out(model.jobs, model.waiting.values(), now=now, timeout_seconds=self._settings.job_timeout_seconds):
            model.end_incomplete_job(job.job_id, RejectionReason.JOB_TIMED_OUT, job.message)

    def _check_idle(self, model: LaneModel) -> None:
        state = model.state
        key = (state.model_id, state.incarnation)
        watched = self._watched.get(key)
        now = time.monotonic()
        if watched is None or watched.version != state.policy_version:
            self._watched[key] = watched = _Watched(version=state.policy_version, since=now)
        if self._models.runs_step_of(state.model_id):
            return
        seconds = now - watched.since
        if seconds >= self._settings.settle_seconds and state.steps_since and not watched.snapshot_wanted:
            watched.snapshot_wanted = model.snapshot_wanted = True
            self._models.changed.set()
        if seconds >= self._settings.starved_after_seconds:
            self._report_starved(model, watched, seconds)

    def _report_starved(self, model: LaneModel, watched: _Watched, seconds: float) -> None:
        """Report that the model gets no step, unless it was reported already or nothing new was rejected since."""
        now, before = time.monotonic(), model.state.refusals_before
        refusals = {
            reason: count - before.get(reason, 0)
            for reason, count in counted(model.events, GroupRejected, model.state.refusals).items()
            if count > before.get(reason, 0)
        }
        total = sum(refusals.values())
        reported_lately = watched.starved_count >= 0 and now - watched.starved_at < self._settings.starved_after_seconds
        if total <= watched.starved_count or reported_lately:
            return
        watched.starved_count, watched.starved_at = total, now
        model.events.append(
            Starved(
                model_id=model.state.model_id,
                policy_version=model.state.policy_version,
                pending=len(model.waiting),
                seconds=round(seconds, 3),
                refusals=refusals,
            )
        )
        model.touch()


@dataclass(frozen=True, slots=True, kw_only=True)
class Expired:
    """A group that must be rejected as `expired` now."""

    waiting: PendingGroup
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedOut:
    """A job that must fail now, with its groups as `job_timed_out`. Its record may never have come."""

    job_id: str
    message: str


def expired(waiting: Iterable[PendingGroup], *, now_ms: int, retention_ms: int | None) -> list[Expired]:
    """The groups that retention would soon delete, in the order given.

    Args:
        waiting: Groups in their buckets.
        now_ms: Milliseconds since 1970. Call again before another 5 % of the retention have passed.
        retention_ms: `retention.ms` of `trajectory-groups`, as `topic_admin.retention_ms` reads it; None or below 0: nothing is deleted.
    """
    if retention_ms is None or retention_ms < 0:
        return []
    limit_ms = retention_ms * SHARE
    return [
        Expired(waiting=one, detail=_expired(one, now_ms, retention_ms))
        for one in waiting
        if one.timestamp_ms >= 0 and now_ms - one.timestamp_ms >= limit_ms
    ]


def timed_out(jobs: Mapping[str, OpenJob], waiting: Iterable[PendingGroup], *, now: datetime, timeout_seconds: float) -> list[TimedOut]:
    """The jobs that have lacked something for too long, in the order of `jobs`.

    Args:
        jobs: Open jobs by id. Time counts from `since`; one without is never timed out.
        waiting: Groups in their buckets.
        now: With a time zone.
        timeout_seconds: `worker.job_timeout_seconds`.
    """
    late = {job.job_id: job for job in jobs.values() if job.since is not None and (now - job.since).total_seconds() >= timeout_seconds}
    if not late:
        return []
    there: dict[str, set[str]] = {job_id: set() for job_id in late}
    for one in waiting:
        if one.job_id in there:
            there[one.job_id].add(one.group.group_id)
    found = []
    for job in late.values():
        if job.document is not None and job.document.state is JobState.PAUSED:
            continue
        came = there[job.job_id] | set(job.refused)
        if job.record_offset is not None and set(job.group_ids) <= came:
            continue
        found.append(TimedOut(job_id=job.job_id, message=f"{_timed_out(job, came, timeout_seconds)}. {_clocks(job.since or now, now)}"))
    return found


def _expired(one: PendingGroup, now_ms: int, retention_ms: int) -> str:
    whose = "the stream" if one.job_id is None else f"job {one.job_id}"
    stamped, now = datetime.fromtimestamp(one.timestamp_ms / 1000, UTC), datetime.fromtimestamp(now_ms / 1000, UTC)
    return (
        f"group {one.group.group_id} waited {_time((now_ms - one.timestamp_ms) / 1000)} in {whose}, and its topic keeps records for "
        f"{_time(retention_ms / 1000)}: send it again when the step can fill, set batch.linger_seconds or fewer groups_per_step, or raise "
        f"the topic's retention.ms. {_clocks(stamped, now)}"
    )


def _timed_out(job: OpenJob, came: set[str], timeout_seconds: float) -> str:
    within = f"within {_time(timeout_seconds)} (worker.job_timeout_seconds)"
    if job.record_offset is None:
        return f"the record of job {job.job_id} did not come {within} of the first of its groups, of which {len(came)} came: send all again"
    missing = [group_id for group_id in dict.fromkeys(job.group_ids) if group_id not in came]
    names = ", ".join(missing[:_NAMED]) + (", …" if len(missing) > _NAMED else "")
    wanted = len(set(job.group_ids))
    refused = f" ({len(job.refused)} of them refused)" if job.refused else ""
    return f"{wanted - len(missing)} of {wanted} groups came{refused} {within}; missing: {names}. Send the job again with all its groups"


def _clocks(stamped: datetime, now: datetime) -> str:
    """Both clocks, so that a reader can tell a long wait from a wrong clock."""
    return (
        f"The broker stamped the record at {stamped:%Y-%m-%d %H:%M:%S} UTC, and the worker's clock shows {now:%Y-%m-%d %H:%M:%S} UTC: "
        "if less time has passed, set that clock"
    )


def _time(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
