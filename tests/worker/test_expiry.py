"""What has waited too long, by the clock and the limits alone."""

from datetime import UTC, datetime, timedelta

import pytest
from tests.worker.test_selection import group, run_of

from headrace.consumers.worker.clock import expired, timed_out
from headrace.consumers.worker.lane_model import LaneModel
from headrace.consumers.worker.pending import PendingGroup
from headrace.schemas.jobs import JobState, TrainingJob
from headrace.schemas.reasons import RejectionReason
from headrace.schemas.state import OpenJob

DAY_MS = 24 * 3600 * 1000
SENT = datetime(2026, 1, 1, tzinfo=UTC)
LIMIT = 3600.0


def waiting(offset: int, timestamp_ms: int, job_id: str | None = None) -> PendingGroup:
    return PendingGroup(offset=offset, group=group(f"g{offset}"), job_id=job_id, timestamp_ms=timestamp_ms)


def test_scanned_and_pending_a_group_is_refused_before_retention_takes_its_record() -> None:
    week = 7 * DAY_MS
    held = [waiting(1, 0), waiting(2, DAY_MS, "j"), waiting(3, -1)]
    at_90_percent = round(0.9 * week)
    assert expired(held, now_ms=at_90_percent - 1, retention_ms=week) == []
    (first,) = expired(held, now_ms=at_90_percent, retention_ms=week)
    assert first.waiting is held[0]
    assert first.detail.startswith("group g1 waited 6.3 days in the stream, and its topic keeps records for 7 days: ")
    both = expired(held, now_ms=at_90_percent + DAY_MS, retention_ms=week)
    assert [found.waiting.offset for found in both] == [1, 2], "one without a time is left alone"
    assert "in job j" in both[1].detail
    assert "and the worker's clock shows 1970-01-" in first.detail


@pytest.mark.parametrize("retention_ms", [None, -1])
def test_nothing_expires_where_the_log_is_kept_for_ever(retention_ms: int | None) -> None:
    assert expired([waiting(1, 0)], now_ms=10**15, retention_ms=retention_ms) == []


def job_with(came: int, of: int) -> LaneModel:
    """A model with one job of `of` groups, `g0` to …, of which so many came; everything was sent at `SENT`."""
    run = run_of()
    run.open_job(TrainingJob(job_id="j", group_ids=tuple(f"g{i}" for i in range(of))), 100)
    for i in range(came):
        run.admit(waiting(i, 0, "j"))
    run.jobs["j"] = replace_since(run, SENT)
    return run


def replace_since(run: LaneModel, since: datetime | None) -> OpenJob:
    return run.jobs["j"].model_copy(update={"since": since})


def messages(run: LaneModel, seconds: float) -> list[str]:
    found = timed_out(run.jobs, run.waiting.values(), now=SENT + timedelta(seconds=seconds), timeout_seconds=LIMIT)
    assert all(job.job_id == "j" for job in found)
    return [job.message for job in found]


def test_a_job_that_lacks_groups_times_out_and_says_how_many_came_and_which_did_not() -> None:
    run = job_with(came=2, of=5)
    assert messages(run, LIMIT - 1) == []
    (message,) = messages(run, LIMIT)
    assert message == (
        "2 of 5 groups came within 60 min (worker.job_timeout_seconds); missing: g2, g3, g4. Send the job again with all its groups. "
        "The broker stamped the record at 2026-01-01 00:00:00 UTC, and the worker's clock shows 2026-01-01 01:00:00 UTC: if less time has "
        "passed, set that clock"
    )


def test_at_most_eight_missing_groups_are_named() -> None:
    (message,) = messages(job_with(came=0, of=200), LIMIT)
    assert "0 of 200 groups came" in message
    assert "missing: g0, g1, g2, g3, g4, g5, g6, g7, …. " in message


def test_a_group_that_was_refused_came() -> None:
    run = job_with(came=1, of=2)
    run.reject_group(offset=7, group_id="g1", job_id="j", reason=RejectionReason.TOO_LONG, detail="long")
    assert messages(run, 2 * LIMIT) == [], "the job is complete: it waits for its turn"
    run = job_with(came=1, of=3)
    run.reject_group(offset=7, group_id="g1", job_id="j", reason=RejectionReason.TOO_LONG, detail="long")
    assert messages(run, LIMIT)[0].startswith("2 of 3 groups came (1 of them refused) within")


def test_a_complete_job_a_paused_one_and_one_without_a_time_do_not_time_out() -> None:
    assert messages(job_with(came=3, of=3), 100 * LIMIT) == []
    paused = job_with(came=1, of=3)
    paused.move_job("j", JobState.PAUSED)
    assert messages(paused, 100 * LIMIT) == []
    older = job_with(came=1, of=3)
    older.jobs["j"] = replace_since(older, None)
    assert messages(older, 100 * LIMIT) == []


def test_groups_whose_job_never_came_time_out_too() -> None:
    run = run_of()
    run.admit(waiting(3, 0, "j"))
    run.jobs["j"] = replace_since(run, SENT)
    (found,) = timed_out(run.jobs, run.waiting.values(), now=SENT + timedelta(seconds=LIMIT), timeout_seconds=LIMIT)
    assert found.message.startswith("the record of job j did not come within 60 min")
