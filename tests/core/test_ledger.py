"""Reading the ledger from the real broker: one model's records among others, each step once, in order."""

import uuid
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, aclosing

import pytest
from aiokafka import AIOKafkaProducer
from tests.core.ledgers import record, write

from headrace.core.lanes import lane_of
from headrace.core.ledger import LedgerError, StepRange, read_ledger, stream_ledger
from headrace.core.settings import KafkaSettings, Settings, TopicSettings
from headrace.core.topic_admin import apply
from headrace.schemas.envelope import seal

LANES = 2
Producing = Callable[..., AbstractAsyncContextManager[AIOKafkaProducer]]


@pytest.fixture(scope="module")
def prefix() -> str:
    return f"t{uuid.uuid4().hex[:10]}."


@pytest.fixture
async def settings(kafka: str, prefix: str) -> Settings:
    """One set of topics for this module: each test has a model of its own."""
    made = Settings(kafka=KafkaSettings(bootstrap_servers=kafka), topics=TopicSettings(prefix=prefix, partitions=LANES))
    await apply(made)
    return made


@pytest.fixture
def model() -> str:
    return str(uuid.uuid4())


def sibling(model: str) -> str:
    """Another model on the same lane."""
    return next(other for _ in range(1000) if lane_of(other := str(uuid.uuid4()), LANES) == lane_of(model, LANES))


async def test_the_steps_of_one_model_come_in_order_without_those_of_its_lane_mates(settings: Settings, model: str):
    other = sibling(model)
    for step in (1, 2, 3):
        await write(settings, [record(step, model_id=model)], key=model)
        await write(settings, [record(step, model_id=other)], key=other)
    found = await read_ledger(settings, model)
    assert [(r.model_id, r.step) for r in found] == [(model, 1), (model, 2), (model, 3)]
    assert found[1] == record(2, model_id=model)
    assert await read_ledger(settings, str(uuid.uuid4())) == []


async def test_a_range_leaves_out_the_others(settings: Settings, model: str):
    await write(settings, [record(step, model_id=model) for step in range(1, 8)], key=model)
    assert [r.step for r in await read_ledger(settings, model, steps=StepRange.parse("3..5"))] == [3, 4, 5]
    assert [r.step for r in await read_ledger(settings, model, incarnation="i", steps=StepRange.parse("6.."))] == [6, 7]
    assert await read_ledger(settings, model, steps=StepRange.parse("9")) == []


async def test_the_latest_incarnation_is_read_unless_another_is_asked_for(settings: Settings, model: str):
    await write(settings, [record(step, model_id=model, incarnation="old") for step in (1, 2, 3)], key=model)
    await write(settings, [record(1, model_id=model, incarnation="new")], key=model)
    assert [(r.incarnation, r.step) for r in await read_ledger(settings, model)] == [("new", 1)]
    # Not the older one's, only because the latest has no such step.
    assert await read_ledger(settings, model, steps=StepRange.parse("2..")) == []
    assert [r.step for r in await read_ledger(settings, model, incarnation="old", steps=StepRange.parse("2.."))] == [2, 3]
    stream = stream_ledger(settings, model)
    async with aclosing(stream):
        assert [(r.incarnation, r.step) async for r in stream] == [("old", 1), ("old", 2), ("old", 3), ("new", 1)]


async def test_what_was_aborted_never_happened(settings: Settings, model: str, producing: Producing, topic_prefix: str):
    await write(settings, [record(1, model_id=model)], key=model)
    async with producing(transactional_id=topic_prefix + "zombie") as zombie:
        await zombie.begin_transaction()
        value, headers = seal(record(2, model_id=model), source="test")
        await zombie.send_and_wait(settings.topic_names.steps, value, key=model.encode(), partition=lane_of(model, LANES), headers=headers)
        await zombie.abort_transaction()
    assert [r.step for r in await read_ledger(settings, model)] == [1]


async def test_a_record_that_a_mirror_has_twice_is_one_step(settings: Settings, model: str):
    await write(settings, [record(step, model_id=model) for step in (1, 1, 2)], key=model)
    assert [r.step for r in await read_ledger(settings, model)] == [1, 2]


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ([record(1), record(1, attempt="second")], r"offset \d+ is of step 1 \(incarnation i, attempt second\), but step 1 "),
        ([record(2), record(1)], r"is of step 1 .* but step 2 .* came before it: a step is committed once, in order"),
        ([record(1), record(1, incarnation="j"), record(2)], r"is of step 2 \(incarnation i, .* but step 1 \(incarnation j"),
    ],
    ids=["two attempts", "backwards", "an incarnation that has ended"],
)
async def test_records_that_can_not_be_raise_with_their_place(settings: Settings, model: str, written: list[object], said: str):
    await write(settings, [each.model_copy(update={"model_id": model}) for each in written], key=model)  # type: ignore[attr-defined]
    with pytest.raises(LedgerError, match=said):
        await read_ledger(settings, model)


async def test_a_step_that_can_not_be_read_raises_with_its_place_and_what_is_no_step_is_left_out(
    settings: Settings, model: str, producing: Producing
):
    await write(settings, [record(1, model_id=model)], key=model)
    where = {"topic": settings.topic_names.steps, "key": model.encode(), "partition": lane_of(model, LANES)}
    async with producing() as producer:
        await producer.send_and_wait(**where, value=b"{}")
        assert [found.step for found in await read_ledger(settings, model)] == [1]
        sent = await producer.send_and_wait(**where, value=b"{}", headers=[("ce_type", b"headrace.step-record.v2")])
    place = f"{settings.topic_names.steps} partition {lane_of(model, LANES)} offset {sent.offset} can't be read: "
    with pytest.raises(LedgerError, match=place):
        await read_ledger(settings, model)


async def test_a_shadows_records_stand_on_the_lane_of_its_original(settings: Settings, model: str):
    shadow = next(other for _ in range(1000) if lane_of(other := str(uuid.uuid4()), LANES) != lane_of(model, LANES))
    value, headers = seal(record(1, model_id=shadow), source="test")
    producer = AIOKafkaProducer(bootstrap_servers=settings.kafka.bootstrap_servers)
    await producer.start()
    try:
        where = lane_of(model, LANES)
        await producer.send_and_wait(settings.topic_names.steps, value, key=shadow.encode(), partition=where, headers=headers)
    finally:
        await producer.stop()
    assert [r.step for r in await read_ledger(settings, shadow, shadow_of=model)] == [1]
    assert await read_ledger(settings, shadow) == []
