"""Rules 16 to 20: what others write, and when. Each made to happen on a lane, or on an engine.

Of rule 17 the gateway's own transactions come with the gateway; what two of them that race leave in the log is staged here.
"""

import asyncio
import time
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer
from tests.worker.groups import group
from tests.worker.stage import SOON, Stage, offsets_of

from headrace.consumers.subscribers.weight_applier import CallableAdapter
from headrace.consumers.subscribers.weight_subscriber import WeightSubscriber
from headrace.core.durability import durability
from headrace.core.fetching import fetch_offsets
from headrace.core.jobs import get_job
from headrace.core.kafka import client_options
from headrace.core.reading import read_to_end
from headrace.producers import TrajectoryProducer
from headrace.schemas.commands import CancelJob
from headrace.schemas.envelope import header_text
from headrace.schemas.events import GroupRejected, JobStateChanged
from headrace.schemas.jobs import JobDocument, JobState
from headrace.schemas.reasons import RejectionReason
from headrace.schemas.state import StepRecord
from headrace.schemas.weights import WeightsApplied, WeightsPublished

pytestmark = pytest.mark.asyncio(loop_scope="session")
TEN_DAYS_MS = 10 * 24 * 3600 * 1000


async def test_lane_owns_documents_a_cancel_that_is_read_before_its_jobs_record_outlives_the_owner_that_read_it(stage: Stage) -> None:
    lane = stage.free_lane()
    model = await stage.model(lane)
    async with stage.seen(model) as seen:
        async with stage.owner(lane):
            await seen.until_state(lambda state: state.status == "active")
            await stage.command(CancelJob(model_id=model.model_id, job_id="j"))
            # What a cancel without a job changes is committed with the next news.
            await stage.put(model, b'{"trajectories": []}')
            await seen.until_state(lambda state: state.cancelled_early == ("j",))
        await stage.send(model, *(group(f"g{i}", seed=i, version=None, job_id="j") for i in range(2)))
        await stage.send_job(model, "j", "g0", "g1")
        async with stage.owner(lane):
            await seen.until(GroupRejected, 3)
            await seen.until(JobStateChanged, 2)
            sent = await stage.send(model, *(group(f"s{i}", seed=i, version=None) for i in range(2)))
            (step,) = await seen.until(StepRecord, 1)
        assert [event.state for event in seen.of(JobStateChanged)] == [JobState.PENDING, JobState.CANCELLED]
        assert {event.reason for event in seen.of(GroupRejected)[1:]} == {RejectionReason.JOB_CANCELLED}
        assert offsets_of(step) == sent
        document = seen.of(JobDocument)[-1]
        assert (document.state, document.error_message) == (JobState.CANCELLED, "cancelled on request, before its record came")
    assert (await get_job(stage.settings, "j")).state is JobState.CANCELLED


async def test_lane_owns_documents_a_cancel_shows_while_no_owner_is_alive_and_the_next_one_keeps_to_it(stage: Stage) -> None:
    lane = stage.free_lane()
    model = await stage.model(lane)
    job_id = f"waits for {model.model_id}"
    async with stage.seen(model) as seen:
        async with stage.owner(lane):
            await stage.send(model, group("g0", version=None, job_id=job_id))
            await stage.send_job(model, job_id, "g0", "g1")
            await seen.until(JobStateChanged, 1)
        await stage.command(CancelJob(model_id=model.model_id, job_id=job_id))
        shown = await get_job(stage.settings, job_id)
        assert shown.state in {JobState.CANCELLED, "JOB_STATE_CANCELLING"}
        async with stage.owner(lane):
            await seen.until(JobStateChanged, 2)
            await stage.send(model, group("g1", seed=1, version=None, job_id=job_id))
            refused = await seen.until(GroupRejected, 2)
    assert [event.state for event in seen.of(JobStateChanged)] == [JobState.PENDING, JobState.CANCELLED]
    assert [event.reason for event in refused] == [RejectionReason.JOB_CANCELLED, RejectionReason.JOB_CLOSED]
    assert seen.of(StepRecord) == []


async def test_idempotent_submit_a_job_that_is_sent_again_since_its_answer_was_lost_trains_once(stage: Stage) -> None:
    lane = stage.free_lane()
    model = await stage.model(lane)
    job_id = f"once for {model.model_id}"

    def groups() -> list:
        return [group(f"g{i}", seed=i, version=None) for i in range(2)]

    async with stage.seen(model) as seen, TrajectoryProducer(stage.settings, model_id=model.model_id) as producer:
        # Two gateways race: their records stand between each other.
        await asyncio.gather(*(producer.submit_job(groups(), job_id=job_id) for _ in range(2)))
        async with stage.owner(lane):
            await seen.until(JobStateChanged, 3)
        async with stage.owner(lane):
            await producer.submit_job(groups(), job_id=job_id)
            await seen.until(GroupRejected, 4)
            sent = await stage.send(model, *(group(f"s{i}", seed=i, version=None) for i in range(2)))
            steps = await seen.until(StepRecord, 2)
    assert [(step.job_id, step.groups) for step in steps] == [(job_id, 2), (None, 2)]
    assert offsets_of(steps[1]) == sent
    assert [event.state for event in seen.of(JobStateChanged)] == [JobState.PENDING, JobState.RUNNING, JobState.COMPLETED]
    assert {event.reason for event in seen.of(GroupRejected)} <= {RejectionReason.DUPLICATE, RejectionReason.JOB_CLOSED}
    assert seen.of(JobDocument)[-1].groups_rejected == 0


async def test_append_time_a_spool_that_comes_ten_days_late_is_stamped_as_it_comes_and_trains(stage: Stage) -> None:
    lane = stage.free_lane()
    model = await stage.model(lane)
    now = int(time.time() * 1000)
    sent = [
        await stage.put(model, group(f"g{i}", seed=i, version=None).model_dump_json().encode(), timestamp_ms=now - TEN_DAYS_MS)
        for i in range(2)
    ]
    options, topics = client_options(stage.settings.kafka, "test-rules"), stage.settings.topic_names
    records = await fetch_offsets(options, topics.trajectory_groups, lane, sent)
    assert all(abs(record.timestamp - now) < SOON * 1000 for record in records.values())
    async with AIOKafkaProducer(**options) as producer:
        elsewhere = await producer.send_and_wait(topics.weight_acks, b"{}", key=b"k", partition=0, timestamp_ms=now - TEN_DAYS_MS)
    kept = (await fetch_offsets(options, topics.weight_acks, 0, [elsewhere.offset]))[elsewhere.offset]
    assert kept.timestamp == now - TEN_DAYS_MS, "what another topic takes for its time, and retention with it"
    async with stage.seen(model) as seen, stage.owner(lane):
        (step,) = await seen.until(StepRecord, 1)
    assert offsets_of(step) == sent


async def test_repeatable_acks_an_engine_that_is_killed_before_its_ack_applies_the_same_weights_again_and_acks_them_once(
    stage: Stage, tmp_path: Path
) -> None:
    lane = stage.free_lane()
    model = await stage.model(lane)
    async with stage.seen(model) as seen, stage.owner(lane):
        await stage.send(model, *(group(f"g{i}", seed=i, version=None) for i in range(2)))
        (published,) = await seen.until(WeightsPublished, 1)
    applied: list[tuple[str, int, str]] = []

    async def never_sent(_key: str, record: object, _event_id: str) -> None:
        if isinstance(record, WeightsApplied):  # and not a word that the engine lives
            reached.set()
            await asyncio.Event().wait()

    def apply(folder: Path, weights: WeightsPublished) -> str:
        assert folder.is_dir()
        applied.append((weights.incarnation, weights.policy_version, weights.digest))
        return "applied"

    reached = asyncio.Event()
    engine_id = f"engine of {model.model_id}"
    options = {"engine_id": engine_id, "model_id": model.model_id, "cache_dir": tmp_path}
    killed = WeightSubscriber(stage.settings, CallableAdapter(apply), **options)
    killed._acks.send = never_sent  # killed before its ack is
    async with killed:
        await asyncio.wait_for(reached.wait(), SOON)
    for _ in range(2):  # the second of them as an engine that was restarted after its ack
        async with WeightSubscriber(stage.settings, CallableAdapter(apply), **options) as again, asyncio.timeout(SOON):
            await again.wait_for(1)
    assert applied == [(published.incarnation, 1, published.digest)] * 3
    records = await read_to_end(client_options(stage.settings.kafka, "test-rules"), stage.settings.topic_names.weight_acks)
    acks = [header_text(record.headers)["ce_id"] for record in records if record.key == engine_id.encode()]
    assert len(acks) == 2
    assert len(set(acks)) == 1, "whoever counts drops the repeat"


async def test_repeatable_acks_a_cluster_that_a_power_loss_can_rewind_is_said_to_be_one(stage: Stage) -> None:
    """No power is cut here; what is safe is a matter of two settings, which are read from the broker."""
    found = await durability(client_options(stage.settings.kafka, "test-rules"), stage.settings.topic_names)
    assert (found.replicas, found.min_in_sync, found.safe) == (1, 1, False)
    assert "a power loss can take back committed steps" in found.text
    assert "replication 3 and min.insync.replicas 2" in found.text
