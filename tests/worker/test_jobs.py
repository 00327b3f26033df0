"""Jobs that are paused, resumed, cancelled, or never complete: commands in, and what the lane's owner makes of them. One worker for all."""

import asyncio
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer
from tests.worker.conftest import WorkerProcess, following, learner, settings_of
from tests.worker.following import Following
from tests.worker.groups import group
from tests.worker.test_sft_job import examples

from headrace.core.jobs import ask, get_job, wait_for_job
from headrace.core.kafka import client_options
from headrace.core.lanes import lane_of
from headrace.core.reading import read_to_end
from headrace.core.settings import Settings
from headrace.core.topic_admin import apply
from headrace.producers import TrajectoryProducer
from headrace.schemas.envelope import seal
from headrace.schemas.events import GroupRejected, JobStateChanged
from headrace.schemas.jobs import JobState, TrainingJob
from headrace.schemas.reasons import RejectionReason
from headrace.schemas.state import StepRecord
from headrace.schemas.training import SftConfig

PENDING, RUNNING, PAUSED, COMPLETED, CANCELLED, FAILED = (
    JobState.PENDING,
    JobState.RUNNING,
    JobState.PAUSED,
    JobState.COMPLETED,
    JobState.CANCELLED,
    JobState.FAILED,
)
LONG = SftConfig(epochs=8, batch_size=1)
"""Of 32 examples: 256 updates in one step, a few seconds, in which a command can come."""


@pytest.fixture(scope="module")
def lane(kafka: str, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Settings]:
    """Topics with a worker that stops incomplete jobs after 25 s; what `before_the_worker` wrote is there when it starts."""
    folder = tmp_path_factory.mktemp("jobs-worker")
    found = settings_of(kafka, f"jobs{uuid.uuid4().hex[:8]}.", folder, tiny_model)
    found = found.model_copy(update={"worker": found.worker.model_copy(update={"job_timeout_seconds": 25.0})})
    asyncio.run(apply(found))
    asyncio.run(before_the_worker(found))
    worker = WorkerProcess(found, folder / "worker.log")
    yield found
    code = worker.stop()
    worker.close()
    assert code == 0, (folder / "worker.log").read_text()[-4000:]
    ledger = asyncio.run(read_to_end(client_options(found.kafka, "test"), found.topic_names.steps))
    trained = {StepRecord.model_validate_json(record.value or b"").job_id for record in ledger}
    assert trained <= {None, "waits", "runs"}, "a job that did not end well has a step"


async def before_the_worker(settings: Settings) -> None:
    """A job that is cancelled while no worker is alive, and one that lacks a group: its time runs while the other tests do."""
    model = await learner(settings, "incomplete")
    async with TrajectoryProducer(settings, model_id=model.model_id) as producer:
        await producer.send(group("came", job_id="lacks"))
    await send_record(settings, model.model_id, TrainingJob(job_id="lacks", group_ids=("came", "lost")))
    model = await learner(settings, "no worker")
    async with TrajectoryProducer(settings, model_id=model.model_id) as producer:
        await producer.submit_job([group("a"), group("b", seed=1)], job_id="unread")
    asked = await ask(settings, "cancel", "unread", model_id=model.model_id)
    assert (await get_job(settings, "unread")).state == asked.state == "JOB_STATE_CANCELLING"


async def send_record(settings: Settings, model_id: str, job: TrainingJob) -> None:
    """A job's record alone: a producer of ours sends it behind all its groups."""
    value, headers = seal(job, source="test")
    producer = AIOKafkaProducer(**client_options(settings.kafka, "test"))
    await producer.start()
    lane = lane_of(model_id, settings.topics.partitions)
    await producer.send_and_wait(settings.topic_names.trajectory_groups, value, key=model_id.encode(), partition=lane, headers=headers)
    await producer.stop()


async def states_of(seen: Following, count: int) -> list[JobState]:
    return [event.state for event in await seen.until(JobStateChanged, count)]


async def long_job(producer: TrajectoryProducer, job_id: str) -> None:
    await producer.submit_job([examples(f"examples of {job_id}", *["c d e"] * 32)], job_id=job_id, sft=LONG)


async def test_a_job_that_was_cancelled_while_no_worker_was_alive_trains_nothing(lane: Settings) -> None:
    model = await learner(lane, "no worker")
    async with following(lane, model.model_id) as seen:
        assert await states_of(seen, 2) == [PENDING, CANCELLED]
        refused = await seen.until(GroupRejected, 2)
    assert {event.reason for event in refused} == {RejectionReason.JOB_CANCELLED}
    assert seen.of(StepRecord) == []
    job = await get_job(lane, "unread")
    assert job.document is not None
    assert (job.state, job.document.error_message) == (CANCELLED, "cancelled on request, before its record came")


async def test_a_paused_job_is_not_begun_holds_nobody_back_and_goes_on_when_it_is_resumed(lane: Settings) -> None:
    model = await learner(lane, "paused in the queue")
    async with following(lane, model.model_id) as seen, TrajectoryProducer(lane, model_id=model.model_id) as producer:
        await producer.send(group("early", job_id="waits"))
        await send_record(lane, model.model_id, TrainingJob(job_id="waits", group_ids=("early", "late")))
        assert await states_of(seen, 1) == [PENDING]
        paused = await wait_for_job(lane, await ask(lane, "pause", "waits"), 120)
        assert (paused.state, paused.requested) == (PAUSED, None)
        await producer.send(group("late", seed=3, job_id="waits"))
        await producer.send(group("s1", seed=1))
        await producer.send(group("s2", seed=2))
        (step,) = await seen.until(StepRecord, 1)
        assert step.job_id is None, "the stream was complete later, and did not wait for the paused job"
        resumed = await wait_for_job(lane, await ask(lane, "resume", "waits"), 120)
        assert resumed.state in {PENDING, RUNNING, COMPLETED}
        steps = await seen.until(StepRecord, 2)
        assert (steps[1].job_id, steps[1].groups) == ("waits", 2)
        assert await states_of(seen, 5) == [PENDING, PAUSED, PENDING, RUNNING, COMPLETED]
    assert max(seen.event_ids.values()) == 1


async def test_a_running_job_that_is_paused_gives_its_step_up_and_begins_it_anew(lane: Settings) -> None:
    model = await learner(lane, "paused while running")
    async with following(lane, model.model_id) as seen, TrajectoryProducer(lane, model_id=model.model_id) as producer:
        await long_job(producer, "runs")
        assert await states_of(seen, 2) == [PENDING, RUNNING]
        paused = await wait_for_job(lane, await ask(lane, "pause", "runs"), 120)
        assert paused.state is PAUSED
        await producer.send(group("s1", seed=1))
        await producer.send(group("s2", seed=2))
        (stream,) = await seen.until(StepRecord, 1)
        assert (stream.job_id, stream.policy_version_after) == (None, 1), "nothing of the job's step was committed"
        await ask(lane, "resume", "runs")
        steps = await seen.until(StepRecord, 2)
        assert (steps[1].job_id, steps[1].updates) == ("runs", 256)
        assert await states_of(seen, 6) == [PENDING, RUNNING, PAUSED, PENDING, RUNNING, COMPLETED]
    document = (await get_job(lane, "runs")).document
    assert document is not None
    assert (document.state, document.step, document.error_message) == (COMPLETED, 2, None)


async def test_a_job_whose_groups_never_all_come_fails_with_the_names_of_those_that_are_missing(lane: Settings) -> None:
    model = await learner(lane, "incomplete")
    async with following(lane, model.model_id) as seen, TrajectoryProducer(lane, model_id=model.model_id) as producer:
        assert await states_of(seen, 2) == [PENDING, FAILED]
        (refused,) = await seen.until(GroupRejected, 1)
        event = seen.of(JobStateChanged)[-1]
        assert (event.message or "").startswith("1 of 2 groups came within 25 s (worker.job_timeout_seconds); missing: lost. Send")
        await producer.send(group("lost", seed=1, job_id="lacks"))
        late = (await seen.until(GroupRejected, 2))[1]
    assert (refused.group_id, refused.reason) == ("came", RejectionReason.JOB_TIMED_OUT)
    assert (late.group_id, late.reason) == ("lost", RejectionReason.JOB_CLOSED)
    assert seen.of(StepRecord) == []


async def test_a_running_job_that_is_cancelled_commits_nothing(lane: Settings) -> None:
    model = await learner(lane, "cancelled while running")
    async with following(lane, model.model_id) as seen, TrajectoryProducer(lane, model_id=model.model_id) as producer:
        await long_job(producer, "ends")
        assert await states_of(seen, 2) == [PENDING, RUNNING]
        cancelled = await wait_for_job(lane, await ask(lane, "cancel", "ends"), 120)
        assert cancelled.state is CANCELLED
        (refused,) = await seen.until(GroupRejected, 1)
        assert (refused.reason, refused.job_id) == (RejectionReason.JOB_CANCELLED, "ends")
    assert seen.of(StepRecord) == [], "and none comes: `lane` looks when its worker has ended"
    assert [event.state for event in seen.of(JobStateChanged)] == [PENDING, RUNNING, CANCELLED]
