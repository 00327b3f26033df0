import asyncio
import logging
import os
import runpy
import sys
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from faststream import Context, FastStream
from faststream.kafka import KafkaBroker
from pydantic import BaseModel

from headrace.consumers.subscribers.events import Events, MissingTopicError, event_broker
from headrace.core.settings import KafkaSettings, Settings, TopicSettings
from headrace.schemas.carried import CARRIED, topic_of
from headrace.schemas.dead_letters import DeadLetterResolved
from headrace.schemas.envelope import record_models, seal
from headrace.schemas.events import GroupRejected, JobStateChanged, StepCompleted
from headrace.schemas.jobs import JobDocument, JobState
from headrace.schemas.reasons import RejectionReason
from headrace.schemas.topics import TOPICS
from headrace.schemas.trajectory import TrajectoryGroup
from headrace.schemas.weights import WeightsApplied, WeightsPublished

SOON = 20.0
SNIPPET = Path(__file__).parents[2] / "docs" / "snippets" / "subscriber.py"


def step(number: int) -> StepCompleted:
    return StepCompleted(
        model_id="m",
        incarnation="i",
        step=number,
        policy_version=number,
        groups=1,
        trajectories=2,
        tokens=3,
        metrics={"loss": 0.5},
        seconds=0.1,
    )


def rejected(offset: int) -> GroupRejected:
    return GroupRejected(
        model_id="m", group_id="g", reason=RejectionReason.ZERO_VARIANCE, detail="rewards are equal", partition=0, offset=offset
    )


async def send(producer: AIOKafkaProducer, settings: Settings, record: BaseModel, **changes: object) -> int:
    """Write a sealed record to partition 0 of its topic; returns its offset."""
    value, headers = seal(record, source="test")
    sent = {"value": value, "headers": headers, "key": b"m", "partition": 0} | changes
    return (await producer.send_and_wait(settings.topic_names.full(topic_of(type(record))), **sent)).offset


async def take(queue: "asyncio.Queue[BaseModel]", count: int) -> list[BaseModel]:
    async with asyncio.timeout(SOON):
        return [await queue.get() for _ in range(count)]


async def test_each_function_gets_the_records_of_its_type_only(settings, producer):
    events, steps, rejections = Events(settings), asyncio.Queue(), asyncio.Queue()

    @events.subscriber(StepCompleted)
    async def on_step(step: StepCompleted) -> None:
        await steps.put(step)

    @events.subscriber(GroupRejected)
    async def on_rejection(rejection: GroupRejected) -> None:
        await rejections.put(rejection)

    async with events:
        sent = [step(1), rejected(4), step(2), rejected(5)]
        for record in sent:
            await send(producer, settings, record)
        assert await take(steps, 2) == [sent[0], sent[2]]
        assert await take(rejections, 2) == [sent[1], sent[3]]
    assert steps.empty()
    assert rejections.empty()


async def test_a_dead_letter_is_no_record_of_ours_whatever_its_sender_called_it(settings, producer, caplog):
    events, resolved = Events(settings), asyncio.Queue()

    @events.subscriber(DeadLetterResolved)
    async def on_resolution(said: DeadLetterResolved) -> None:
        await resolved.put(said)

    said = DeadLetterResolved(partition=0, offset=1, action="dropped", by="ada", attempt="a")
    _, headers = seal(said, source="test")
    why = ("headrace-error-reason", b"unknown_type")
    async with events:
        await send(producer, settings, said.model_copy(update={"by": "mallory"}), headers=[*headers, why])
        await send(producer, settings, said, value=b"{not json", headers=[why])
        await send(producer, settings, said)
        assert await take(resolved, 1) == [said]
    assert resolved.empty()
    assert "skipped" not in caplog.text, "letters are everyday there"


@pytest.mark.parametrize("from_beginning", [False, True])
async def test_without_a_group_a_subscriber_starts_now_or_at_the_beginning(settings, producer, from_beginning):
    events, steps = Events(settings), asyncio.Queue()

    @events.subscriber(StepCompleted, from_beginning=from_beginning)
    async def on_step(step: StepCompleted) -> None:
        await steps.put(step)

    await send(producer, settings, step(1))
    async with events:
        await send(producer, settings, step(2))
        expected = [step(1), step(2)] if from_beginning else [step(2)]
        assert [s.step for s in await take(steps, len(expected))] == [s.step for s in expected]
    assert steps.empty()


async def test_foreign_and_broken_records_are_skipped_and_named(settings, producer, caplog):
    events, steps = Events(settings), asyncio.Queue()

    @events.subscriber(StepCompleted, from_beginning=True)
    async def on_step(step: StepCompleted) -> None:
        await steps.put(step)

    _, headers = seal(step(0), source="test")
    broken = [
        await send(producer, settings, step(0), value=b"{not json"),
        await send(producer, settings, step(0), value=b'{"model_id": 7}'),
        await send(producer, settings, step(0), headers=[("ce_type", b"headrace.step-completed.v9")]),
    ]
    await send(producer, settings, step(0), headers=[("ce_type", b"com.example.other.v1")])
    await send(producer, settings, step(0), headers=[("ce_type", b"\xff\xfe")])
    await send(producer, settings, step(0), value=None)
    await send(producer, settings, step(1), headers=[*headers, ("blob", b"\x80\xff\x00"), ("nothing", None), ("reply_to", b"elsewhere")])
    await send(producer, settings, step(2))
    with caplog.at_level(logging.WARNING):
        async with events:
            assert [s.step for s in await take(steps, 2)] == [1, 2]
    skipped = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
    assert len(skipped) == len(broken)
    for offset, message in zip(broken, skipped, strict=True):
        assert f"{settings.topic_names.training_events} partition 0 offset {offset}:" in message


async def test_aborted_records_are_never_seen(settings, kafka, producer):
    events, steps = Events(settings), asyncio.Queue()

    @events.subscriber(StepCompleted, from_beginning=True)
    async def on_step(step: StepCompleted) -> None:
        await steps.put(step)

    async with AIOKafkaProducer(bootstrap_servers=kafka, transactional_id=f"{settings.topics.prefix}tx") as transactional:
        await transactional.begin_transaction()
        await send(transactional, settings, step(1))
        await transactional.abort_transaction()
        async with transactional.transaction():
            await send(transactional, settings, step(2))
    async with events:
        assert [s.step for s in await take(steps, 1)] == [2]


async def test_with_a_group_a_failing_function_gets_its_record_again_and_nothing_passes_it(settings, producer, kafka):
    group = f"{settings.topics.prefix}durable"
    tried: list[int] = []
    done: asyncio.Queue[StepCompleted] = asyncio.Queue()
    events = Events(settings)

    @events.subscriber(StepCompleted, group_id=group)
    async def on_step(step: StepCompleted) -> None:
        tried.append(step.step)
        if step.step == 2 and tried.count(2) < 3:
            raise RuntimeError("not yet")
        await done.put(step)

    for number in (1, 2, 3):
        await send(producer, settings, step(number))
    async with events:
        assert [s.step for s in await take(done, 3)] == [1, 2, 3]
    assert tried == [1, 2, 2, 2, 3]


async def test_with_a_group_the_position_stays_before_a_record_that_never_succeeds(settings, producer, kafka):
    group = f"{settings.topics.prefix}durable"
    failed = asyncio.Event()
    events = Events(settings)

    @events.subscriber(StepCompleted, group_id=group)
    async def on_step(step: StepCompleted) -> None:
        if step.step == 2:
            failed.set()
            raise RuntimeError("never")

    for number in (1, 2, 3):
        await send(producer, settings, step(number))
    async with events:
        await asyncio.wait_for(failed.wait(), SOON)
    async with AIOKafkaConsumer(bootstrap_servers=kafka, group_id=group) as consumer:
        assert await consumer.committed(TopicPartition(settings.topic_names.training_events, 0)) == 1
    again, steps = Events(settings), asyncio.Queue()

    @again.subscriber(StepCompleted, group_id=group)
    async def on_step_again(step: StepCompleted) -> None:
        await steps.put(step)

    async with again:
        assert [s.step for s in await take(steps, 2)] == [2, 3]


async def test_without_a_group_a_failing_function_does_not_stop_the_next_record(settings, producer):
    events, steps = Events(settings), asyncio.Queue()

    @events.subscriber(StepCompleted)
    async def on_step(step: StepCompleted) -> None:
        if step.step == 1:
            raise RuntimeError("fails")
        await steps.put(step)

    async with events:
        for number in (1, 2):
            await send(producer, settings, step(number))
        assert [s.step for s in await take(steps, 1)] == [2]


async def test_every_compacted_topic_can_be_followed_too(settings, producer):
    events, seen = Events(settings), asyncio.Queue()
    document = JobDocument(job_id="j", model_id="m", state=JobState.PENDING, created_at="2026-01-01T00:00:00Z")
    published = WeightsPublished(
        model_id="m", incarnation="i", policy_version=1, base_model="b", format="full", uri="file://x", digest="d", files=()
    )
    applied = WeightsApplied(engine_id="e", model_id="m", incarnation="i", policy_version=1, digest="d", seconds=0.1)
    changed = JobStateChanged(job_id="j", model_id="m", state=JobState.RUNNING)
    for model in (JobDocument, WeightsPublished, WeightsApplied, JobStateChanged):

        @events.subscriber(model, from_beginning=True)
        async def on_record(record: model) -> None:  # type: ignore[valid-type]
            await seen.put(record)

    for record in (document, published, applied, changed):
        await send(producer, settings, record)
    async with events:
        found = await take(seen, 4)
    assert sorted(found, key=repr) == sorted([document, published, applied, changed], key=repr)


async def test_the_router_works_inside_another_faststream_app_with_its_own_injection(settings, producer, kafka):
    events, steps = Events(settings), asyncio.Queue()

    @events.subscriber(StepCompleted)
    async def on_step(step: StepCompleted, message=Context()) -> None:  # noqa: B008 - FastStream's way
        await steps.put((step, message.raw_message.offset))

    broker = KafkaBroker(kafka)
    broker.include_router(events.router)
    app = FastStream(broker)
    await app.start()
    try:
        await events.ready()
        offset = await send(producer, settings, step(1))
        ((found, found_offset),) = await take(steps, 1)
        assert (found.step, found_offset) == (1, offset)
    finally:
        await app.stop()


async def test_a_missing_topic_is_an_error_and_is_not_created(kafka, topic_prefix):
    settings = Settings(kafka=KafkaSettings(bootstrap_servers=kafka), topics=TopicSettings(prefix=topic_prefix))
    events = Events(settings)

    @events.subscriber(StepCompleted)
    async def on_step(step: StepCompleted) -> None: ...

    for _ in range(2):
        with pytest.raises(MissingTopicError, match="headrace topics apply"):
            await events.start()


def test_models_that_no_topic_carries_are_refused():
    class Other(BaseModel): ...

    events = Events(Settings(kafka=KafkaSettings(bootstrap_servers="localhost:1")))
    with pytest.raises(LookupError, match="no topic carries Other"):
        events.subscriber(Other)
    with pytest.raises(TypeError, match="decode_group"):
        events.subscriber(TrajectoryGroup)


def test_every_record_model_has_one_topic_and_every_topic_its_models():
    carried = [model for models in CARRIED.values() for model in models]
    assert sorted(carried, key=repr) == sorted(record_models(), key=repr)
    assert set(CARRIED) == {spec.name for spec in TOPICS}


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_the_broker_logs_in_as_the_settings_say(mechanism):
    kafka = KafkaSettings(
        bootstrap_servers="broker:9093",
        security_protocol="SASL_SSL",
        sasl_mechanism=mechanism,
        sasl_username="me",
        sasl_password="secret",  # noqa: S106 - a test's
    )
    arguments = event_broker(Settings(kafka=kafka))._connection_kwargs
    assert arguments["security_protocol"] == "SASL_SSL"
    assert arguments["sasl_mechanism"] == mechanism
    assert arguments["sasl_plain_username"] == "me"
    assert arguments["sasl_plain_password"] == "secret"  # noqa: S105 - a test's
    assert arguments["ssl_context"] is not None


async def test_the_snippet_of_the_readme_prints_a_step(settings, producer, monkeypatch, kafka):
    monkeypatch.setenv("HEADRACE_KAFKA__BOOTSTRAP_SERVERS", kafka)
    monkeypatch.setenv("HEADRACE_TOPICS__PREFIX", settings.topics.prefix)
    printed: asyncio.Queue[tuple[object, ...]] = asyncio.Queue()
    monkeypatch.setattr("builtins.print", lambda *values: printed.put_nowait(values))
    snippet = runpy.run_path(str(SNIPPET))
    assert len([line for line in SNIPPET.read_text().splitlines() if line.strip()]) <= 10
    async with snippet["events"]:
        await send(producer, settings, step(3))
        assert await asyncio.wait_for(printed.get(), SOON) == ("m", 3, {"loss": 0.5})


async def test_run_prints_steps_until_sigterm_and_says_what_is_missing(settings, producer, kafka):
    environment = os.environ | {
        "HEADRACE_KAFKA__BOOTSTRAP_SERVERS": kafka,
        "HEADRACE_TOPICS__PREFIX": settings.topics.prefix,
        "PYTHONUNBUFFERED": "1",
    }
    pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
    process = await asyncio.create_subprocess_exec(sys.executable, str(SNIPPET), env=environment, **pipes)
    try:
        line = asyncio.create_task(process.stdout.readline())
        async with asyncio.timeout(60):
            while not line.done():  # it starts at what is written from now on, whenever that is
                await send(producer, settings, step(3))
                await asyncio.wait([line], timeout=0.2)
        assert line.result() == b"m 3 {'loss': 0.5}\n"
        process.terminate()
        await asyncio.wait_for(process.communicate(), SOON)
        assert process.returncode == 0
    finally:
        if process.returncode is None:
            process.kill()
    environment["HEADRACE_TOPICS__PREFIX"] = "nothing-here."
    process = await asyncio.create_subprocess_exec(sys.executable, str(SNIPPET), env=environment, **pipes)
    _, said = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    assert said.decode().rstrip().splitlines()[-1] == (
        "headrace.consumers.subscribers.events.MissingTopicError: Kafka has no topic nothing-here.training-events: "
        "run `headrace topics apply`, or correct topics.prefix"
    )
