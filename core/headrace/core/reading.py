"""Reading a topic from a known start to the end that was written (exactly-once rule 1).

The end is taken with `read_uncommitted`: another producer's open transaction holds the last stable offset back, and a reader that
stopped there would miss what was committed beyond it. Then records are read `read_committed` until the position of every partition
has passed its end, so an open transaction is waited for and aborted records are left out.

Guarantees: every committed record from the start to the end, each partition in offset order, none from after the end; key and value are
bytes or None. One that the client can't hand over is left out, with a line in the log. A missing topic, a start that retention has deleted,
and a read that stands still each raise. Limitations: memory bounds; `read_to_end` holds all it read (`stream_to_end` does not).
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from datetime import datetime

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.errors import OffsetOutOfRangeError

from headrace.core.errors import HeadraceError, OutageError
from headrace.core.kafka import ClientOptions, plain_errors
from headrace.core.polling import poll, readable
from headrace.core.topic_admin import partition_count

POLL_MS = 25
"""A poll returns early with records, and at the latest after this: markers alone move the position without waking the poll."""
FOLLOW_POLL_MS = 1000
STALL_SECONDS = 120.0
"""Longer than a transaction of Headrace may stay open (60 s) and the broker takes to notice (10 s)."""


class OffsetLostError(HeadraceError):
    """Records that are needed were deleted (retention); names the topic, the partition and the offsets."""

    def __init__(self, message: str, missing: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing
        """Offsets that are gone, where single ones were asked for."""


class ReadStalledError(OutageError):
    """A read made no progress: the broker is away, or a transaction stays open for longer than it may."""


async def read_to_end(
    options: ClientOptions,
    topic: str,
    partitions: Iterable[int] | None = None,
    *,
    start: Mapping[int, int] | None = None,
    stall_seconds: float = STALL_SECONDS,
) -> list[ConsumerRecord]:
    """All committed records, grouped as they arrived; each partition is in offset order.

    Args:
        options: From `client_options`.
        topic: Full topic name.
        partitions: None: all of the topic.
        start: First offset by partition; a partition that is not in it starts at its beginning.
        stall_seconds: Raise when no partition moved for so long.

    Raises:
        OffsetLostError: a given start is no longer there.
        ReadStalledError: no progress.
        KafkaUnavailableError: no broker, or the topic does not exist.
    """
    return [
        record async for batch in stream_to_end(options, topic, partitions, start=start, stall_seconds=stall_seconds) for record in batch
    ]


async def stream_to_end(
    options: ClientOptions,
    topic: str,
    partitions: Iterable[int] | None = None,
    *,
    start: Mapping[int, int] | None = None,
    stall_seconds: float = STALL_SECONDS,
) -> AsyncGenerator[list[ConsumerRecord]]:
    """As `read_to_end`, in non-empty batches of one partition each. Close it (`aclosing`) when leaving early."""
    with plain_errors(options):
        ends = await end_offsets(options, topic, partitions)
        async with _consumer(options, isolation_level="read_committed") as consumer:
            unread = await _seek(consumer, topic, ends, start or {})
            moved_at = time.monotonic()
            positions: dict[TopicPartition, int] = {}
            while unread:
                for partition, records in (await _poll(consumer, unread, start or {})).items():
                    if batch := readable(record for record in records if record.offset < unread[partition]):
                        yield batch
                now_at = {partition: await consumer.position(partition) for partition in unread}
                if now_at != positions:
                    positions, moved_at = now_at, time.monotonic()
                for partition, position in now_at.items():
                    if position >= unread[partition]:
                        consumer.pause(partition)
                        del unread[partition]
                if unread and time.monotonic() - moved_at > stall_seconds:
                    raise ReadStalledError(_stalled(unread, positions, stall_seconds))


async def follow(options: ClientOptions, topic: str, partition: int) -> AsyncGenerator[list[ConsumerRecord]]:
    """Committed records of a partition from its beginning, then each batch as it comes, without an end. Close it (`aclosing`).

    Raises:
        KafkaUnavailableError: no broker, or the topic does not exist.
    """
    with plain_errors(options):
        await partition_count(options, topic)
        async with _consumer(options, isolation_level="read_committed") as consumer:
            where = TopicPartition(topic, partition)
            first = (await consumer.beginning_offsets([where]))[where]
            consumer.assign([where])
            consumer.seek(where, first)
            while True:
                for records in (await poll(consumer, timeout_ms=FOLLOW_POLL_MS)).values():
                    if batch := readable(records):
                        yield batch


async def follow_all(options: ClientOptions, topics: Iterable[str], caught_up: asyncio.Event) -> AsyncGenerator[list[ConsumerRecord]]:
    """As `follow`, of all partitions of several topics through one consumer; a batch is of one partition. Close it (`aclosing`).

    Args:
        options: From `client_options`.
        topics: Full names. Between two partitions there is no order.
        caught_up: Set once all that was written when this began has been handed out.

    Raises:
        KafkaUnavailableError: no broker, or a topic does not exist.
    """
    with plain_errors(options):
        behind = {TopicPartition(topic, p): end for topic in topics for p, end in (await end_offsets(options, topic)).items()}
        async with _consumer(options, isolation_level="read_committed") as consumer:
            beginnings = await consumer.beginning_offsets(list(behind))
            consumer.assign(list(beginnings))
            for where, first in beginnings.items():
                consumer.seek(where, first)
            while True:
                behind = {where: end for where, end in behind.items() if await consumer.position(where) < end}
                if not behind:
                    caught_up.set()
                for records in (await poll(consumer, timeout_ms=POLL_MS if behind else FOLLOW_POLL_MS)).values():
                    if batch := readable(records):
                        yield batch


async def end_offsets(options: ClientOptions, topic: str, partitions: Iterable[int] | None = None) -> dict[int, int]:
    """The offset after the last record written to each partition, committed or not.

    Raises:
        KafkaUnavailableError: no broker, or the topic does not exist.
    """
    with plain_errors(options):
        count = await partition_count(options, topic)
        wanted = [TopicPartition(topic, p) for p in (range(count) if partitions is None else partitions)]
        if missing := [p.partition for p in wanted if not 0 <= p.partition < count]:
            raise ValueError(f"{topic} has partitions 0 to {count - 1}; asked for {missing}")
        async with _consumer(options, isolation_level="read_uncommitted") as consumer:
            return {partition.partition: offset for partition, offset in (await consumer.end_offsets(wanted)).items()}


async def offsets_since(options: ClientOptions, topic: str, since: datetime) -> dict[int, int]:
    """By partition the offset of the first record that is stamped with this time or a later one; the end, where there is none.

    Raises:
        KafkaUnavailableError: no broker, or the topic does not exist.
    """
    ends = await end_offsets(options, topic)
    stamp = max(0, int(since.timestamp() * 1000))
    # Not read_committed: what stands behind an open transaction is to be found too.
    async with _consumer(options, isolation_level="read_uncommitted") as consumer:
        with plain_errors(options):
            found = await consumer.offsets_for_times({TopicPartition(topic, partition): stamp for partition in ends})
    firsts = {where.partition: first.offset for where, first in found.items() if first is not None}
    return {partition: firsts.get(partition, end) for partition, end in ends.items()}


def latest_by_key(records: Iterable[ConsumerRecord]) -> dict[bytes, ConsumerRecord]:
    """The table that a compacted topic stands for: the last record of each key; a tombstone (null value) removes its key."""
    table: dict[bytes, ConsumerRecord] = {}
    for record in records:
        if record.key is None:
            continue
        if record.value is None:
            table.pop(record.key, None)
        else:
            table[record.key] = record
    return table


@asynccontextmanager
async def _consumer(options: ClientOptions, *, isolation_level: str) -> AsyncIterator[AIOKafkaConsumer]:
    consumer = AIOKafkaConsumer(
        **options,
        group_id=None,
        enable_auto_commit=False,
        auto_offset_reset="none",  # aiokafka's default jumps to the end
        isolation_level=isolation_level,
        fetch_max_wait_ms=100,
        retry_backoff_ms=20,  # one wait of this is spent on learning where the partitions are
    )
    try:
        await consumer.start()
        yield consumer
    finally:
        await asyncio.shield(consumer.stop())


async def _seek(consumer: AIOKafkaConsumer, topic: str, ends: Mapping[int, int], start: Mapping[int, int]) -> dict[TopicPartition, int]:
    """Stand every partition at its start; returns the end of each that has something to read."""
    partitions = [TopicPartition(topic, p) for p in ends]
    beginnings = await consumer.beginning_offsets(partitions)
    unread: dict[TopicPartition, int] = {}
    for partition in partitions:
        first = start.get(partition.partition, beginnings[partition])
        if first < beginnings[partition]:
            raise OffsetLostError(_lost(partition, first, beginnings[partition]))
        if first < ends[partition.partition]:
            unread[partition] = ends[partition.partition]
            beginnings[partition] = first
    consumer.assign(list(unread))
    for partition in unread:
        consumer.seek(partition, beginnings[partition])
    return unread


async def _poll(
    consumer: AIOKafkaConsumer, unread: Mapping[TopicPartition, int], start: Mapping[int, int]
) -> dict[TopicPartition, list[ConsumerRecord]]:
    try:
        return await poll(consumer, *unread, timeout_ms=POLL_MS)
    except OffsetOutOfRangeError as error:
        # Retention ran between our look at the beginning and the fetch. Harmless where we asked for all there is.
        partitions = list(error.args[0])
        beginnings = await consumer.beginning_offsets(partitions)
        for partition in partitions:
            if partition.partition in start:
                raise OffsetLostError(_lost(partition, error.args[0][partition], beginnings[partition])) from error
            consumer.seek(partition, beginnings[partition])
        return {}


def _lost(partition: TopicPartition, wanted: int, first: int) -> str:
    return (
        f"{partition.topic} partition {partition.partition}: offset {wanted} is needed but the log begins at {first}; "
        "the records between were deleted by retention (raise retention.ms of the topic to keep them longer)"
    )


def _stalled(unread: Mapping[TopicPartition, int], positions: Mapping[TopicPartition, int], seconds: float) -> str:
    where = ", ".join(f"{p.topic} partition {p.partition} at {positions[p]} of {end}" for p, end in unread.items())
    return f"no progress for {seconds:g} s: {where}. The broker is away, or a transaction there stays open"
