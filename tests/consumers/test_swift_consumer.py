"""The fast consumer reads what aiokafka's own reads, by the fast way."""

import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord, TopicPartition
from aiokafka.consumer.fetcher import PartitionRecords
from aiokafka.errors import CorruptRecordException
from tests.consumers.tls_broker import tls_broker

from headrace.consumers.lanes.swift_batches import _Batches, make_swift
from headrace.consumers.lanes.swift_consumer import FrameProtocol, SwiftConsumer
from headrace.core.kafka import client_options
from headrace.core.settings import Settings, TopicSettings
from headrace.core.topic_admin import apply

COMPRESSIONS = (None, "gzip", "lz4", "zstd")


async def filled(kafka: str, topic: str) -> int:
    """Twelve megabytes in batches of each compression, from nothing to most of a megabyte a record; returns how many records."""
    rng = random.Random(7)
    count = 0
    for compression in COMPRESSIONS:
        async with AIOKafkaProducer(bootstrap_servers=kafka, compression_type=compression, max_request_size=1_000_000) as producer:
            for size in (0, 1, 100, 900_000, 700_000, 5, 800_000, 600_000):
                await producer.send_and_wait(topic, rng.randbytes(size) or None, b"k", partition=0, headers=[("n", b"%d" % count)])
                count += 1
    return count


async def read(consumer: AIOKafkaConsumer, partition: TopicPartition, count: int) -> list[ConsumerRecord]:
    found: list[ConsumerRecord] = []
    while len(found) < count:
        for records in (await consumer.getmany(partition, timeout_ms=1000)).values():
            found += records
    return found


def options(kafka: str) -> dict[str, Any]:
    return {"bootstrap_servers": kafka, "enable_auto_commit": False, "max_partition_fetch_bytes": 8 << 20}


def at_beginning(consumer: AIOKafkaConsumer, partition: TopicPartition) -> None:
    consumer.assign([partition])
    consumer.seek(partition, 0)


async def test_it_reads_what_the_other_reads_in_one_buffer_and_unpacks_each_answer_by_the_swift_way(
    kafka: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []

    def noting(records: PartitionRecords | None, data: bytes | None, room: bytearray) -> None:
        make_swift(records, data, room)
        made.append(records and type(records._records))

    monkeypatch.setattr("headrace.consumers.lanes.swift_consumer.make_swift", noting)
    partition = TopicPartition(settings.topic_names.trajectory_groups, 0)
    count = await filled(kafka, partition.topic)
    found = []
    for kind in (AIOKafkaConsumer, SwiftConsumer):
        async with kind(**options(kafka)) as consumer:
            at_beginning(consumer, partition)
            found.append(await read(consumer, partition, count))
            nodes = [c for (node, _), c in consumer._client._conns.items() if isinstance(node, int)]
            swift = [isinstance(connection._writer.transport.get_protocol(), FrameProtocol) for connection in nodes]
            assert swift == [kind is SwiftConsumer] * len(nodes)
    assert _Batches in made
    assert set(made) <= {_Batches, None}  # None: an answer without records
    assert found[0] == found[1]
    assert [record.offset for record in found[1]] == list(range(count))


async def test_a_batch_that_was_changed_on_its_way_is_refused(kafka: str, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    partition = TopicPartition(settings.topic_names.trajectory_groups, 0)
    async with AIOKafkaProducer(bootstrap_servers=kafka) as producer:
        await producer.send_and_wait(partition.topic, b"a value", partition=0)
    async with SwiftConsumer(**options(kafka)) as consumer:
        send: Callable[..., Awaitable[Any]] = consumer._plain_send

        async def changing(*args: Any, **others: Any) -> Any:
            answer = await send(*args, **others)
            answer.topics = [
                (topic, [(*part[:-1], part[-1].replace(b"a value", b"a walue")) for part in parts])
                for topic, parts in getattr(answer, "topics", [])
                if parts and isinstance(parts[0][-1], bytes)
            ] or getattr(answer, "topics", [])
            return answer

        monkeypatch.setattr(consumer, "_plain_send", changing)
        at_beginning(consumer, partition)
        with pytest.raises(CorruptRecordException):
            await read(consumer, partition, 1)


async def test_it_reads_on_over_a_new_connection_where_one_breaks(kafka: str, settings: Settings) -> None:
    partition = TopicPartition(settings.topic_names.trajectory_groups, 0)
    async with AIOKafkaProducer(bootstrap_servers=kafka) as producer, SwiftConsumer(**options(kafka)) as consumer:
        await producer.send_and_wait(partition.topic, b"before", partition=0)
        at_beginning(consumer, partition)
        assert [r.value for r in await read(consumer, partition, 1)] == [b"before"]
        broken = list(consumer._client._conns.values())
        for connection in broken:
            connection._writer.transport.abort()
        await producer.send_and_wait(partition.topic, b"after", partition=0)
        assert [r.value for r in await read(consumer, partition, 1)] == [b"after"]
        assert not any(connection.connected() for connection in broken)


async def test_it_reads_by_the_swift_way_where_the_broker_speaks_tls(tmp_path: Path) -> None:
    """The transport under it is another one, and hands its bytes on in pieces of 16 KB."""
    with tls_broker(tmp_path) as kafka:
        found = Settings(kafka=kafka, topics=TopicSettings(prefix="tls.", partitions=1))
        await apply(found)
        partition = TopicPartition(found.topic_names.trajectory_groups, 0)
        values = [bytes([i]) * 600_000 for i in range(12)]
        async with AIOKafkaProducer(**client_options(kafka, "test"), max_request_size=1_000_000) as producer:
            for value in values:
                await producer.send_and_wait(partition.topic, value, partition=0)
        async with SwiftConsumer(**client_options(kafka, "test"), enable_auto_commit=False, max_partition_fetch_bytes=8 << 20) as consumer:
            at_beginning(consumer, partition)
            assert [record.value for record in await read(consumer, partition, len(values))] == values
            nodes = [c for (node, _), c in consumer._client._conns.items() if isinstance(node, int)]
            assert nodes
            assert all(isinstance(connection._writer.transport.get_protocol(), FrameProtocol) for connection in nodes)
            for connection in nodes:
                connection._writer.transport.abort()
            at_beginning(consumer, partition)
            assert [record.value for record in await read(consumer, partition, len(values))] == values
