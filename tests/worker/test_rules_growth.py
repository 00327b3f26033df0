"""Rule 15: whatever comes, what a lane must commit fits into a record. Floods that a state grew with, against a record's 1 MiB."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.core.ledgers import record
from tests.worker.stage import Stage
from tests.worker.test_selection import group, reported, run_of

from headrace.consumers.worker.commits import LaneWriter
from headrace.consumers.worker.duplicates import LISTED, DuplicateWindow
from headrace.consumers.worker.lane_model import LaneModel
from headrace.consumers.worker.lane_models import LaneModels
from headrace.consumers.worker.pending import MAX_PENDING, PendingGroup, pending_room
from headrace.consumers.worker.transaction import StepToCommit, build
from headrace.core.kafka import client_options
from headrace.core.reading import read_to_end
from headrace.schemas.events import GroupRejected, JobStateChanged, StepCompleted
from headrace.schemas.jobs import JobState, TrainingJob
from headrace.schemas.reasons import RejectionReason
from headrace.schemas.state import Intent, LaneState, ModelState, StepRecord
from headrace.schemas.training import TrainConfig
from headrace.schemas.weights import WeightsPublished

ROOM = 1_000_000
LONG = "é" * 256
"""The longest id that a group may have."""


def admit(run: LaneModel, offset: int, job_id: str | None = None) -> None:
    run.admit(PendingGroup(offset=offset, group=group(f"{offset:08d}-7d2f-4c3a-9b1e-0c5d2a6b8f"), job_id=job_id))


def many_jobs(run: LaneModel) -> None:
    """An offline batch: each job is complete and waits for its turn."""
    for i in range(1500):
        job_id = f"{i:08d}-7d2f-4c3a-9b1e-0c5d2a6b8f11"
        admit(run, 2 * i, job_id)
        run.open_job(TrainingJob(job_id=job_id, group_ids=(run.waiting[2 * i].group.group_id,), config=TrainConfig()), 2 * i + 1)
    failed = [event for event in reported(run, JobStateChanged) if event.state is JobState.FAILED]
    assert len(failed) + len(run.jobs) == 1500
    assert "backlog_full" in (failed[0].message or "")
    assert {event.reason for event in reported(run, GroupRejected)} == {RejectionReason.BACKLOG_FULL}


def groups_of_jobs_that_never_come(run: LaneModel) -> None:
    for i in range(3500):
        admit(run, i, f"{i:08d}-7d2f-4c3a-9b1e-0c5d2a6b8f11")


def a_job_id_that_somebody_gives_every_group(run: LaneModel) -> None:
    for i in range(4000):
        run.reject_group(offset=i, group_id=f"{i:06d}{LONG[:250]}", job_id="train", reason=RejectionReason.TOO_LONG, detail="x")
    assert run.draft.closed_jobs == ("train",)


def a_job_that_names_one_group_again_and_again(run: LaneModel) -> None:
    run.open_job(TrainingJob(job_id="j", group_ids=("a",) * 200_000), 0)
    assert run.jobs == {}


def groups_that_never_train(run: LaneModel) -> None:
    """Each is admitted, and found stale at the cut."""
    run.window = DuplicateWindow(100_000)
    for i in range(110_000):
        run.window.add(str(i))


def jobs_with_long_ids_that_ended(run: LaneModel) -> None:
    for i in range(600):
        run.cancel_job(f"early {i} {LONG}"[:256], "x")
        run.open_job(TrainingJob(job_id=f"{i} {LONG}"[:256], group_ids=()), i)
        run.cancel_job(f"{i} {LONG}"[:256], "x")
    assert run.draft.closed_jobs[-1].startswith("599 ")


def an_error_that_quotes_what_it_read(run: LaneModel) -> None:
    run.open_job(TrainingJob(job_id="j", group_ids=()), 0)
    run.move_job("j", JobState.FAILED, message=LONG * 5000)
    run.set_status("diverged", LONG * 5000)
    assert len(run.documents["j"].model_dump_json()) < 20_000


@pytest.mark.parametrize(
    "flood",
    [
        many_jobs,
        groups_of_jobs_that_never_come,
        a_job_id_that_somebody_gives_every_group,
        a_job_that_names_one_group_again_and_again,
        groups_that_never_train,
        jobs_with_long_ids_that_ended,
        an_error_that_quotes_what_it_read,
    ],
)
def test_bounded_records_a_state_fits_into_a_record_whatever_comes(flood: Callable[[LaneModel], None]) -> None:
    run = run_of()
    flood(run)
    assert len(run.next_change(10**9).state.model_dump_json().encode()) < ROOM


def test_bounded_records_fewer_groups_may_wait_where_the_id_of_their_job_is_long() -> None:
    uuid = "00000000-7d2f-4c3a-9b1e-0c5d2a6b8f11"
    assert (pending_room(MAX_PENDING, None), pending_room(MAX_PENDING, uuid)) == (MAX_PENDING, MAX_PENDING)
    for job_id in ("j" * 256, LONG, "\x01" * 256):
        run = run_of()
        for i in range(pending_room(MAX_PENDING, job_id)):
            admit(run, 10**9 + i, job_id)
        for i in range(pending_room(MAX_PENDING, job_id), pending_room(MAX_PENDING, None)):
            admit(run, 10**9 + i)
        assert len(run.next_change(2 * 10**9).state.model_dump_json().encode()) < ROOM / 2


def test_bounded_records_a_window_whose_ids_do_not_all_fit_is_the_same_for_the_next_owner() -> None:
    window = DuplicateWindow(100_000)
    for i in range(100):
        window.add(f"before {i}")
    snapshot = window.to_bytes()
    window.snapshot_committed(100)
    for i in range(LISTED + 50):
        window.add(str(i))
    assert [window.contains(name) for name in ("before 0", "49", "50")] == [True, False, True]
    assert DuplicateWindow(100_000, snapshot, window.since_text()).to_bytes() == window.to_bytes()
    stored, held = window.to_bytes(), window.since
    for i in range(30):
        window.add(f"while it was stored {i}")
    since = window.since_text(held)
    window.snapshot_committed(held)
    assert (window.since, window.since_text()) == (30, since)
    assert set(DuplicateWindow(100_000, stored, since).to_bytes()) >= set(window.to_bytes())


@pytest.mark.asyncio(loop_scope="session")
async def test_bounded_records_the_broker_takes_a_full_state_and_the_record_of_a_step_of_thousands_of_scattered_groups(
    stage: Stage,
) -> None:
    lane = stage.free_lane()
    options, topics = client_options(stage.settings.kafka, "test-rules"), stage.settings.topic_names
    run = run_of()
    for i in range(MAX_PENDING):
        admit(run, 10**9 + 2 * i, "00000000-7d2f-4c3a-9b1e-0c5d2a6b8f11" if i % 2 else None)
    run.open_job(TrainingJob(job_id="long", group_ids=tuple(f"{i:08d}-7d2f-4c3a-9b1e-0c5d2a6b8f" for i in range(9000))), 1)
    assert "long" in run.jobs
    for i in range(LISTED):
        run.window.add(str(i))
    for i in range(500):
        run.reject_group(offset=i, group_id=f"r{i}", job_id=None, reason=RejectionReason.TOO_LONG, detail=LONG * 100)
    run.change(intent=Intent(step=1, offsets=tuple(run.waiting), reason="linger"))
    writer = LaneWriter(stage.settings, lane, options)
    await writer.start()
    said = LaneState(lane=lane, partitions=stage.settings.topics.partitions)
    models = LaneModels(state=said, position=2 * 10**9, models={"m": run})
    full = build(models, topics=topics, source="test")
    await writer.commit(full.records, full.lane.mark)
    full.apply(models)
    scattered = tuple(run.waiting)
    step = replace(step_of(run, scattered), offsets=scattered)
    run.use_groups(scattered)
    with_step = build(models, topics=topics, source="test", step=step)
    await writer.commit(with_step.records, with_step.lane.mark)
    await writer.stop()
    (written,) = [StepRecord.model_validate_json(raw.value or b"") for raw in await read_to_end(options, topics.steps, [lane])]
    assert len(written.offsets) == MAX_PENDING
    states = [raw for raw in await read_to_end(options, topics.models, [lane]) if raw.key == b"m"]
    assert len(states[0].value or b"") > ROOM / 2, "the state was full"
    assert len(ModelState.model_validate_json(states[0].value or b"").pending) == MAX_PENDING
    events = await read_to_end(options, topics.training_events, [lane])
    assert sum(dict(raw.headers)["ce_type"] == b"headrace.group-rejected.v1" for raw in events) == 500


def step_of(run: LaneModel, offsets: tuple[int, ...]) -> StepToCommit:
    ledger = record(1, offsets=offsets)
    return StepToCommit(
        model_id=ledger.model_id,
        record=ledger,
        completed=StepCompleted(
            model_id=ledger.model_id,
            incarnation=ledger.incarnation,
            step=1,
            policy_version=1,
            groups=len(offsets),
            trajectories=len(offsets),
            tokens=1,
            metrics={},
            lag_histogram={},
            seconds=1.0,
        ),
        published=WeightsPublished(
            model_id=ledger.model_id,
            incarnation=ledger.incarnation,
            policy_version=1,
            base_model=run.state.settings.base_model,
            format="full",
            uri=ledger.weights.uri,
            digest=ledger.weights.digest,
            files=(),
        ),
        snapshot=None,
        offsets=offsets,
        num_sequences=1,
        accelerator="cpu",
    )
