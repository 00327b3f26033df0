"""What on a lane is decided by a clock: lingers, time-outs, expiry, starvation, snapshots of idle models, and news that no step carries.

Guarantees: nothing here makes a step by itself: a linger is a mark that the training task turns into an intent, the rest are refusals and
events, committed before anything follows from them (exactly-once rule 9). Refusals that come together go together, or with the step that
comes first. Gives up: precision below its tick.
"""

import asyncio
import time
from dataclasses import dataclass

from headrace.consumers.lanes.committer import LaneCommitter
from headrace.consumers.lanes.expiry import expired, timed_out
from headrace.consumers.memory.book import LaneBook
from headrace.consumers.memory.model_run import ModelRun
from headrace.consumers.memory.refusals import counted
from headrace.core.settings import WorkerSettings
from headrace.schemas.base import utc_now
from headrace.schemas.events import Starved
from headrace.schemas.reasons import RejectionReason

TICK_SECONDS = 0.25
_IDLE_SECONDS = 60.0
"""The lane's position is committed this often although nothing happened: retention may take what stands below it."""


@dataclass(slots=True, kw_only=True)
class _Watched:
    """What the clock knows of a model."""

    version: int
    since: float
    said: int = -1
    """Refusals when it was last said to starve; -1: it was not."""
    said_at: float = 0.0
    settled: bool = False
    """A snapshot was asked for."""


class LaneClock:
    """Watches one lane.

    Args:
        settings: Lingers and time-outs.
        book: The lane's memory.
        committer: Commits it.
        retention_ms: Of the topic that the groups are in; None: nothing is deleted.
    """

    def __init__(self, settings: WorkerSettings, book: LaneBook, committer: LaneCommitter, retention_ms: int | None) -> None:
        self._settings = settings
        self._book = book
        self._committer = committer
        self._retention_ms = retention_ms
        self._watched: dict[tuple[str, str], _Watched] = {}
        self._committed_at = time.monotonic()

    async def report(self) -> None:
        """Commit what no step carries."""
        while True:
            await self._book.unreported.wait()
            # A linger, not a wait for something: refusals that come together go together, or with the step that comes first.
            await asyncio.sleep(self._settings.refusal_linger_seconds)
            self._book.unreported.clear()
            if self._book.has_news:
                await self._committer.commit()

    async def tick(self) -> None:
        """Look at the clock, again and again."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            for run in list(self._book.runs.values()):
                if run.status == "active":
                    self._linger(run)
                    if not run.unread:  # a job may have all its groups among those that are not read yet
                        self._give_up_late(run)
                    self._idle(run)
            self._book.note_unreported()
            if self._book.position > self._book.state.scanned and time.monotonic() - self._committed_at > _IDLE_SECONDS:
                await self._committer.commit()
                self._committed_at = time.monotonic()

    def _linger(self, run: ModelRun) -> None:
        seconds = run.state.settings.batch.linger_seconds
        if seconds is None:
            return
        oldest = min((waiting.admitted_at for waiting in run.waiting.values() if waiting.job_id is None), default=None)
        run.lingered = oldest is not None and time.monotonic() - oldest >= seconds
        if run.lingered:
            self._book.changed.set()

    def _give_up_late(self, run: ModelRun) -> None:
        now = utc_now()
        for group in expired(run.waiting.values(), now_ms=int(now.timestamp() * 1000), retention_ms=self._retention_ms):
            if not self._runs(run, group.waiting.offset):
                run.refuse(
                    offset=group.waiting.offset,
                    group_id=group.waiting.group.group_id,
                    job_id=group.waiting.job_id,
                    reason=RejectionReason.EXPIRED,
                    detail=group.detail,
                )
        for job in timed_out(run.jobs, run.waiting.values(), now=now, timeout_seconds=self._settings.job_timeout_seconds):
            run.time_out(job.job_id, job.message)

    def _runs(self, run: ModelRun, offset: int) -> bool:
        """Whether the group is in the step that runs: that step is about to use it up."""
        running = self._book.running
        return running is not None and running.model_id == run.state.model_id and offset in running.offsets

    def _idle(self, run: ModelRun) -> None:
        key = (run.state.model_id, run.state.incarnation)
        watched = self._watched.get(key)
        now = time.monotonic()
        if watched is None or watched.version != run.state.policy_version:
            self._watched[key] = watched = _Watched(version=run.state.policy_version, since=now)
        if self._book.running is not None and self._book.running.model_id == run.state.model_id:
            return
        seconds = now - watched.since
        if seconds >= self._settings.settle_seconds and run.state.steps_since and not watched.settled:
            watched.settled = run.settling = True
            self._book.changed.set()
        if seconds < self._settings.starved_after_seconds:
            return
        before = run.state.refusals_before
        refusals = {
            reason: count - before.get(reason, 0)
            for reason, count in counted(run.rejected, run.state.refusals).items()
            if count > before.get(reason, 0)
        }
        total = sum(refusals.values())
        if total <= watched.said or (watched.said >= 0 and now - watched.said_at < self._settings.starved_after_seconds):
            return
        watched.said, watched.said_at = total, now
        run.notices.append(
            Starved(
                model_id=run.state.model_id,
                policy_version=run.state.policy_version,
                pending=len(run.waiting),
                seconds=round(seconds, 3),
                refusals=refusals,
            )
        )
        run.touch()
