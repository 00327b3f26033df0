"""Polls of a real log in which somebody has written what the client can't hand over."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord, TopicPartition
from tests.unreadable import UNREADABLE, send_batch, send_torn, send_unreadable

from headrace.core import polling, unpacking
from headrace.core.kafka import ClientOptions
from headrace.core.polling import UnreadableRecord, next_record, poll, readable
from headrace.core.raw_fetch import MOST_UNREAD
from headrace.core.reading import read_to_end
from headrace.schemas.reasons import DeadLetterReason

MakeTopic = Callable[..., Awaitable[str]]
Producing = Callable[..., AbstractAsyncContextManager[AIOKafkaProducer]]
READS = {"group_id": None, "enable_auto_commit": False, "auto_offset_reset": "earliest", "isolation_level": "read_committed"}


async def all_of(
    options: ClientOptions, topic: str, partitions: int, ends: dict[int, int], **more: int
) -> tuple[dict[int, list[int]], int]:
    """By partition what was handed over (negative: unreadable, counted from -1), and the number of polls."""
    places = [TopicPartition(topic, partition) for partition in range(partitions)]
    found: dict[int, list[int]] = {place.partition: [] for place in places}
    polls = 0
    async with AIOKafkaConsumer(**options, **READS) as consumer:
        consumer.assign(places)
        for place in places:
            consumer.seek(place, 0)
        while any([await consumer.position(place) < ends[place.partition] for place in places]):
            polls += 1
            for place, records in (await poll(consumer, timeout_ms=200, **more)).items():
                found[place.partition] += [
                    -1 - record.offset if isinstance(record, UnreadableRecord) else record.offset for record in records
                ]
    return found, polls


@pytest.mark.parametrize("max_records", [None, 1, 3])
async def test_each_record_is_handed_over_once_and_each_unreadable_one_by_its_own_offset(
    options: ClientOptions, make_topic: MakeTopic, producing: Producing, topic_prefix: str, max_records: int | None
) -> None:
    topic = await make_topic("log", partitions=2)
    async with producing() as plain, producing(transactional_id=f"{topic_prefix}t") as lane:
        expected: list[int] = []
        await send_unreadable(plain, topic, 0, b"k")  # at the beginning
        expected += [-1]
        async with lane.transaction():
            expected.append((await lane.send_and_wait(topic, b"fine", partition=0)).offset)
        expected.append(-1 - await send_unreadable(plain, topic, 0, None))  # behind a marker
        await lane.begin_transaction()
        await lane.send_and_wait(topic, b"aborted", partition=0)
        await lane.abort_transaction()
        first = await send_batch(plain, topic, 0, [(b"k", b"v", headers) for headers in ([], UNREADABLE, UNREADABLE, [])], compression=4)
        expected += [first, -2 - first, -3 - first, first + 3]
        torn = await send_torn(plain, topic, 0, b"k", count=3)
        expected += [-1 - torn, -2 - torn, -3 - torn]
        expected.append((await plain.send_and_wait(topic, b"fine", partition=0)).offset)
        expected.append(-1 - (last := await send_unreadable(plain, topic, 0, b"k")))  # at the end
        others = [(await plain.send_and_wait(topic, b"%d" % i, partition=1)).offset for i in range(5)]
    more = {} if max_records is None else {"max_records": max_records}
    found, _ = await all_of(options, topic, 2, {0: last + 1, 1: 5}, **more)
    assert found == {0: expected, 1: others}


async def test_of_many_partitions_none_is_waited_for_in_turn(options: ClientOptions, make_topic: MakeTopic, producing: Producing) -> None:
    topic = await make_topic("wide", partitions=75)
    async with producing() as producer:
        for partition in range(0, 75, 5):
            await send_unreadable(producer, topic, partition, b"k")
    ends = {partition: int(partition % 5 == 0) for partition in range(75)}
    found, polls = await all_of(options, topic, 75, ends)
    assert found == {partition: [-1] * end for partition, end in ends.items()}
    assert polls < 10


async def test_a_flood_of_unreadable_records_costs_a_poll_for_hundreds_of_them(
    options: ClientOptions, make_topic: MakeTopic, producing: Producing
) -> None:
    topic = await make_topic("flood")
    async with producing() as producer:
        await send_batch(producer, topic, 0, [(b"k", b"v", UNREADABLE)] * 20_000, compression=1)
        await producer.send_and_wait(topic, b"after", partition=0)
    found, polls = await all_of(options, topic, 1, {0: 20_001})
    assert found == {0: [*range(-1, -20_001, -1), 20_000]}
    assert polls < 60


async def test_one_record_after_the_other_leaves_out_what_can_not_be_read(
    options: ClientOptions, make_topic: MakeTopic, producing: Producing
) -> None:
    topic = await make_topic("log", partitions=2)
    async with producing() as producer:
        await send_torn(producer, topic, 0, b"k", count=2)
        await send_unreadable(producer, topic, 1, b"k")
        for partition in (0, 1):
            await producer.send_and_wait(topic, b"a", partition=partition)
            await send_unreadable(producer, topic, partition, b"k")
            await producer.send_and_wait(topic, b"b", partition=partition)
    async with AIOKafkaConsumer(topic, **options, **READS) as consumer:
        found = [await next_record(consumer) for _ in range(4)]
    assert sorted((record.partition, record.offset, record.value) for record in found) == [
        (0, 2, b"a"),
        (0, 4, b"b"),
        (1, 1, b"a"),
        (1, 3, b"b"),
    ]


async def test_what_is_left_out_is_said_once_with_its_place(
    options: ClientOptions, make_topic: MakeTopic, producing: Producing, caplog: pytest.LogCaptureFixture
) -> None:
    topic = await make_topic("log")
    async with producing() as producer:
        await producer.send_and_wait(topic, b"fine", partition=0)
        await send_unreadable(producer, topic, 0, b"k")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert [record.value for record in await read_to_end(options, topic)] == [b"fine"]
    assert [record.getMessage() for record in caplog.records if topic in record.getMessage()] == [
        f"left out: {topic} partition 0 offset 1 can't be read: a header's name is no UTF-8 text"
    ]
    assert readable([]) == []


@pytest.mark.parametrize("compression", [1, 2, 3, 4], ids=["gzip", "snappy", "lz4", "zstd"])
async def test_a_batch_that_unpacks_to_more_than_the_bound_is_passed_by(
    options: ClientOptions, make_topic: MakeTopic, producing: Producing, monkeypatch: pytest.MonkeyPatch, compression: int
) -> None:
    monkeypatch.setattr(unpacking, "MAX_BATCH_BYTES", 1_000_000)
    topic = await make_topic("bombs")
    async with producing() as producer:
        await producer.send_and_wait(topic, b"before", partition=0)
        first = await send_batch(producer, topic, 0, [(b"k", bytes(600_000), [])] * 2, compression=compression)
        await send_batch(producer, topic, 0, [(b"k", bytes(600_000), [])], compression=compression)
        last = await send_batch(producer, topic, 0, [(b"k", b"", [])] * (MOST_UNREAD + 500) + [(b"k", bytes(10**6), [])], compression=4)
        end = (await producer.send_and_wait(topic, b"after", partition=0)).offset
    where = TopicPartition(topic, 0)
    found: list[ConsumerRecord] = []
    async with AIOKafkaConsumer(topic, **options, **READS) as consumer:
        while await consumer.position(where) <= end:
            found += (await poll(consumer, timeout_ms=200)).get(where, [])
    unread = {record.offset: record.error for record in found if isinstance(record, UnreadableRecord)}
    assert list(unread) == [first, first + 1, *range(last, last + MOST_UNREAD)]
    assert {error.reason for error in unread.values()} == {DeadLetterReason.TOO_LARGE}
    assert f"the records behind it up to offset {end - 1}" in unread[last + MOST_UNREAD - 1].detail
    assert [len(record.value) for record in found if not isinstance(record, UnreadableRecord)] == [6, 600_000, 5]


async def test_one_call_ends_once_it_has_enough_bytes_and_a_cancelled_one_moves_nothing(
    options: ClientOptions, make_topic: MakeTopic, producing: Producing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polling, "_ENOUGH_BYTES", 1_000)
    topic = await make_topic("many")
    async with producing() as producer:
        await send_batch(producer, topic, 0, [(b"k", bytes(100), [])] * 40)
    where = TopicPartition(topic, 0)
    async with AIOKafkaConsumer(**options, **READS) as consumer:
        consumer.assign([where])
        consumer.seek(where, 0)
        first = (await poll(consumer, timeout_ms=10_000))[where]
        assert len(first) == 16
        plain, calls = consumer.getmany, 0

        async def cancelled(*args: object, **more: object) -> object:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise asyncio.CancelledError
            return await plain(*args, **more)

        with monkeypatch.context() as patch:
            patch.setattr(consumer, "getmany", cancelled)
            with pytest.raises(asyncio.CancelledError):
                await poll(consumer, timeout_ms=10_000)
        assert [record.offset for record in (await poll(consumer, timeout_ms=10_000))[where]] == [*range(16, 32)]
