"""Single records by their offsets: what recovery and replay read of a log, however long it has grown.

Guarantees: `read_committed`; each offset that was asked for is in the answer, or the call raises and names all that are gone; offsets that
stand close together are read in one go. Limitations: memory bounds; the caller bounds what it asks for.
"""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing, asynccontextmanager

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.errors import OffsetOutOfRangeError

from headrace.core.kafka import ClientOptions, plain_errors
from headrace.core.polling import UnreadableRecord, poll
from headrace.core.reading import POLL_MS, STALL_SECONDS, OffsetLostError, ReadStalledError, end_offsets

_NAMED = 8
_NEAR = 64
"""Offsets no further apart are read over rather than jumped to."""


async def fetch_offsets(options: ClientOptions, topic: str, partition: int, offsets: Iterable[int]) -> dict[int, ConsumerRecord]:
    """The records at these offsets.

    Args:
        options: From `client_options`.
        topic: Full topic name.
        partition: Its partition.
        offsets: In any order.

    Raises:
        OffsetLostError: names all offsets that the log does not have (any more).
        ReadStalledError: no progress.
        KafkaUnavailableError: no broker, or the topic does not exist.
    """
    wanted = sorted(set(offsets))
    if not wanted:
        return {}
    where = TopicPartition(topic, partition)
    found: dict[int, ConsumerRecord] = {}
    with plain_errors(options):
        end = (await end_offsets(options, topic, [partition]))[partition]
        async with single_reader(options, where) as consumer:
            first = (await consumer.beginning_offsets([where]))[where]
            for run in _runs([offset for offset in wanted if first <= offset < end]):
                asked = set(run)
                async with aclosing(records_in(consumer, range(run[0], run[-1] + 1))) as records:
                    async for record in records:
                        if not isinstance(record, UnreadableRecord) and record.offset in asked:
                            found[record.offset] = record
    if missing := [offset for offset in wanted if offset not in found]:
        raise OffsetLostError(_gone(where, missing, first), tuple(missing))
    return found


@asynccontextmanager
async def single_reader(options: ClientOptions, where: TopicPartition) -> AsyncIterator[AIOKafkaConsumer]:
    """A `read_committed` consumer of one partition, without a group, standing nowhere yet: `seek` it."""
    consumer = AIOKafkaConsumer(
        **options,
        group_id=None,
        enable_auto_commit=False,
        auto_offset_reset="none",
        isolation_level="read_committed",
        fetch_max_wait_ms=50,
        retry_backoff_ms=20,
    )
    try:
        await consumer.start()
        consumer.assign([where])
        yield consumer
    finally:
        await consumer.stop()


async def records_in(consumer: AIOKafkaConsumer, span: range) -> AsyncGenerator[ConsumerRecord]:
    """What the log has of the offsets in `span`, in order, an `UnreadableRecord` too. Close it (`aclosing`) when leaving early.

    Args:
        consumer: Of a `single_reader`.
        span: Offsets; what retention takes meanwhile is left out.

    Raises:
        ReadStalledError: no progress.
    """
    (where,) = consumer.assignment()
    consumer.seek(where, span.start)
    at, moved_at = span.start, time.monotonic()
    while at < span.stop:
        try:
            batches = await poll(consumer, where, timeout_ms=POLL_MS)
        except OffsetOutOfRangeError:
            consumer.seek(where, (await consumer.beginning_offsets([where]))[where])
        else:
            for record in batches.get(where, ()):
                if record.offset < span.stop:
                    yield record
        if (now_at := await consumer.position(where)) != at:
            at, moved_at = now_at, time.monotonic()
        elif time.monotonic() - moved_at > STALL_SECONDS:
            raise ReadStalledError(f"no progress for {STALL_SECONDS:g} s: {where.topic} partition {where.partition} at {at} of {span.stop}")


def _runs(offsets: list[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for offset in offsets:
        if runs and offset - runs[-1][-1] <= _NEAR:
            runs[-1].append(offset)
        else:
            runs.append([offset])
    return runs


def _gone(where: TopicPartition, missing: list[int], first: int) -> str:
    named = ", ".join(map(str, missing[:_NAMED])) + (f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else "")
    return (
        f"{where.topic} partition {where.partition}: offsets {named} are needed and are not there; the log begins at {first} "
        "(retention deleted what was before: raise retention.ms of the topic to keep records longer)"
    )
