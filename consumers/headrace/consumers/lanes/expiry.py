"""What has waited too long: groups that retention is about to take, and jobs that lack groups (exactly-once rule 7).

A group is refused as `expired` at 90 % of its topic's retention, while its record is still there to be read again; the rest is room for
clocks that differ (Kafka stamps the record, the worker judges it) and for the time between two looks. A job times out that still lacks
its record or a group so long after the log took its first record; one that is complete waits for its turn, and one that is paused for a
person.

Guarantees: pure functions of what waits, the time and the limits; they refuse nothing themselves. Gives up: retention by size
(`retention.bytes`), which says of no record when it goes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from headrace.consumers.memory.waiting import Waiting
from headrace.schemas.jobs import JobState
from headrace.schemas.state import OpenJob

SHARE = 0.9
"""Of the retention: older groups are refused."""
_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Expired:
    """A group that must be refused as `expired` now."""

    waiting: Waiting
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedOut:
    """A job that must fail now, and its groups be refused as `job_timed_out`; also one whose record never came, which nobody sees yet."""

    job_id: str
    message: str


def expired(waiting: Iterable[Waiting], *, now_ms: int, retention_ms: int | None) -> list[Expired]:
    """The groups that retention would take soon, in the order given.

    Args:
        waiting: Groups in their buckets.
        now_ms: Milliseconds since 1970. Ask again before another 5 % of the retention have passed.
        retention_ms: `retention.ms` of `trajectory-groups`, as `topic_admin.retention_ms` reads it; None or below 0: nothing ever goes.
    """
    if retention_ms is None or retention_ms < 0:
        return []
    limit_ms = retention_ms * SHARE
    return [
        Expired(waiting=held, detail=_expired(held, now_ms, retention_ms))
        for held in waiting
        if held.timestamp_ms >= 0 and now_ms - held.timestamp_ms >= limit_ms
    ]


def timed_out(jobs: Mapping[str, OpenJob], waiting: Iterable[Waiting], *, now: datetime, timeout_seconds: float) -> list[TimedOut]:
    """The jobs that lack something for too long, in the order of `jobs`.

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
    for held in waiting:
        if held.job_id in there:
            there[held.job_id].add(held.group.group_id)
    found = []
    for job in late.values():
        if job.document is not None and job.document.state is JobState.PAUSED:
            continue
        came = there[job.job_id] | set(job.refused)
        if job.record_offset is not None and set(job.group_ids) <= came:
            continue
        found.append(TimedOut(job_id=job.job_id, message=f"{_timed_out(job, came, timeout_seconds)}. {_clocks(job.since or now, now)}"))
    return found


def _expired(held: Waiting, now_ms: int, retention_ms: int) -> str:
    whose = "the stream" if held.job_id is None else f"job {held.job_id}"
    stamped, now = datetime.fromtimestamp(held.timestamp_ms / 1000, UTC), datetime.fromtimestamp(now_ms / 1000, UTC)
    return (
        f"group {held.group.group_id} waited {_time((now_ms - held.timestamp_ms) / 1000)} in {whose}, and its topic keeps records for "
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
    """What tells waiting from a clock that is wrong."""
    return (
        f"The broker stamped the record at {stamped:%Y-%m-%d %H:%M:%S} UTC, and the worker's clock shows {now:%Y-%m-%d %H:%M:%S} UTC: "
        "if less time has passed, set that clock"
    )


def _time(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
