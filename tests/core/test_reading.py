"""Reading to the written end, against the real broker: open transactions, aborted records, lost offsets."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete
from aiokafka.structs import TopicPartition

from headrace.core.kafka import ClientOptions, KafkaUnavailableError
from headrace.core.reading import OffsetLostError, ReadStalledError, end_offsets, latest_by_key, read_to_end, stream_to_end

MakeTopic = Callable[..., Awaitable[str]]
Producing = Callable[..., AbstractAsyncContextManager[AIOKafkaProducer]]


async def test_reads_every_partition_from_its_beginning(options: ClientOptions, make_topic: MakeTopic, producing: Producing) -> None:
    topic = await make_topic("a", partitions=3)
    async with producing() as producer:
        for i in range(30):
            await producer.send_and_wait(topic, b"%d" % i, partition=i % 3)
    records = await read_to_end(options, topic)
    assert sorted(int(r.value) for r in records) == list(range(30))
    for partition in range(3):
        assert [r.offset for r in records if r.partition == partition] == list(range(10))
    assert await end_offsets(options, topic) == {0: 10, 1: 10, 2: 10}


async def test_starts_where_it_is_told_and_reads_only_what_it_is_asked(
    options: ClientOptions, make_topic: MakeTopic, producing: Producing
) -> None:
    topic = await make_topic("a", partitions=2)
    async with producing() as producer:
        for i in range(10):
            await producer.send_and_wait(topic, b"%d" % i, partition=1)
    assert [r.offset for r in await read_to_end(options, topic, [1], start={1: 7})] == [7, 8, 9]
    assert await read_to_end(options, topic, [1], start={1: 10}) == []
    assert await read_to_end(options, topic, [0]) == []


async def test_waits_for_a_foreign_open_transaction_and_sees_what_was_committed_beyond_it(
    options: ClientOptions, make_topic: MakeTopic, producing: Producing, topic_prefix: str
) -> None:
    """Rule 1: the last stable offset stands before the lane's own committed record; the reader must not stop there."""
    topic = await make_topic("models", config={"cleanup.policy": "compact"})
    foreign_id, lane_id = topic_prefix + "foreign", topic_prefix + "lane"
    async with producing(transactional_id=foreign_id) as foreign, producing(transactional_id=lane_id) as lane:
        async with lane.transaction():
            await lane.send_and_wait(topic, b"v2", key=b"m")
        await foreign.begin_transaction()
        await foreign.send_and_wait(topic, b"not yet", key=b"x")
        async with lane.transaction():
            await lane.send_and_wait(topic, b"v3", key=b"m")
        reading = asyncio.create_task(read_to_end(options, topic))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(reading), 0.7)
        await foreign.abort_transaction()
        records = await asyncio.wait_for(reading, 10)
    assert [r.value for r in records] == [b"v2", b"v3"]
    assert latest_by_key(records)[b"m"].value == b"v3"


async def test_ends_although_the_log_ends_with_aborted_records_and_markers(
    options: ClientOptions, make_topic: MakeTopic, producing: Producing, topic_prefix: str
) -> None:
    topic = await make_topic("a")
    async with producing(transactional_id=topic_prefix + "t") as producer:
        for i in range(6):
            await producer.begin_transaction()
            await producer.send_and_wait(topic, b"%d" % i)
            await (producer.abort_transaction() if i % 2 else producer.commit_transaction())
    records = await asyncio.wait_for(read_to_end(options, topic), 10)
    assert [r.value for r in records] == [b"0", b"2", b"4"]


async def test_leaves_out_what_is_written_while_it_reads(
    options: ClientOptions, make_topic: MakeTopic, producing: Producing, topic_prefix: str
) -> None:
    topic = await make_topic("a")
    async with producing(transactional_id=topic_prefix + "t") as open_one, producing() as other:
        await other.send_and_wait(topic, b"before")
        await open_one.begin_transaction()
        await open_one.send_and_wait(topic, b"open")
        batches = stream_to_end(options, topic)
        assert [r.value for r in await anext(batches)] == [b"before"]  # the end is taken by now
        await other.send_and_wait(topic, b"after")
        await open_one.commit_transaction()
        rest = [r.value async for batch in batches for r in batch]
    assert rest == [b"open"]


async def test_a_start_that_was_deleted_raises_and_never_jumps(options: ClientOptions, make_topic: MakeTopic, producing: Producing) -> None:
    topic = await make_topic("a")
    async with producing() as producer:
        for i in range(10):
            await producer.send_and_wait(topic, b"%d" % i)
    admin = AIOKafkaAdminClient(**options)
    await admin.start()
    await admin.delete_records({TopicPartition(topic, 0): RecordsToDelete(before_offset=6)})
    await admin.close()
    assert [r.offset for r in await read_to_end(options, topic)] == [6, 7, 8, 9]
    with pytest.raises(OffsetLostError, match=r"offset 3 is needed but the log begins at 6"):
        await read_to_end(options, topic, start={0: 3})


async def test_a_transaction_that_stays_open_ends_the_read_with_a_reason(
    options: ClientOptions, make_topic: MakeTopic, producing: Producing, topic_prefix: str
) -> None:
    topic = await make_topic("a")
    async with producing(transactional_id=topic_prefix + "t") as producer:
        await producer.begin_transaction()
        await producer.send_and_wait(topic, b"open")
        with pytest.raises(ReadStalledError, match=r"partition 0 at 0 of 1"):
            await read_to_end(options, topic, stall_seconds=0.3)
        await producer.abort_transaction()


async def test_a_missing_topic_and_a_missing_partition_are_named(options: ClientOptions, make_topic: MakeTopic, topic_prefix: str) -> None:
    with pytest.raises(KafkaUnavailableError, match=r"no topic .*nowhere: run `headrace topics apply`"):
        await read_to_end(options, topic_prefix + "nowhere")
    topic = await make_topic("a")
    with pytest.raises(ValueError, match=r"partitions 0 to 0; asked for \[4\]"):
        await read_to_end(options, topic, [4])


async def test_a_tombstone_removes_its_key_from_the_table(options: ClientOptions, make_topic: MakeTopic, producing: Producing) -> None:
    topic = await make_topic("a", config={"cleanup.policy": "compact"})
    async with producing() as producer:
        await producer.send_and_wait(topic, b"1", key=b"kept")
        await producer.send_and_wait(topic, b"1", key=b"gone")
        await producer.send_and_wait(topic, b"2", key=b"kept")
        await producer.send_and_wait(topic, None, key=b"gone")
    table = latest_by_key(await read_to_end(options, topic))
    assert {key: record.value for key, record in table.items()} == {b"kept": b"2"}
