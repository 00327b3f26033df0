"""The next records of a consumer, whatever someone has written there: how everything of Headrace reads Kafka.

A record that aiokafka can't hand over makes its `getmany` and `getone` raise, each time again, and takes along what the same call had
unpacked of other partitions. Here it is handed over as an `UnreadableRecord`: who has dead letters writes one, and all others leave it out
with `readable`, which says so once.

Guarantees: each record once, each partition in offset order, nothing lost next to one that can't be read, and no wait for partitions that
have nothing; after an error the consumer stands where it was. What a call unpacks is bounded: a batch by `unpacking.py`, and the call ends
once it has `_ENOUGH_BYTES`, which it asks after every few records. Limitations: what raises otherwise (retention, a broker that is away, a
wrong checksum) raises here too.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Iterable

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.errors import IllegalStateError

from headrace.core.raw_fetch import UnreadableRecord, positions, refill, stand
from headrace.core.unpacking import UnpackingError, bounded

__all__ = ["UnreadableRecord", "leave_out", "next_record", "poll", "readable"]

logger = logging.getLogger(__name__)

_UNPACKING = (UnicodeDecodeError, UnpackingError, MemoryError)
"""What comes of unpacking; all that has to do with Kafka itself is a `KafkaError`."""
_FEW_RECORDS = 8
_ENOUGH_BYTES = 16 * 1024 * 1024
"""Keys and values of one call."""

_NAMED = 16
_said: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
"""By topic and partition the offsets that were named."""


async def poll(
    consumer: AIOKafkaConsumer, *partitions: TopicPartition, timeout_ms: int, max_records: int | None = None
) -> dict[TopicPartition, list[ConsumerRecord]]:
    """As `getmany`, with an `UnreadableRecord` in the place of each record that can't be read.

    Args:
        consumer: Started.
        partitions: Of these; none: of all that are assigned.
        timeout_ms: Wait so long for the first record.
        max_records: No more than these at once.

    Raises:
        KafkaError: as `getmany`; also where a group gives other partitions in the very call that meets a record which can't be read.
    """
    while True:
        before = positions(consumer, partitions)
        # Before a group has given partitions and positions, it is not known what a failed call took along: one record takes nothing.
        known = bool(before) and before.keys() >= set(partitions or consumer.assignment()) - consumer.paused()
        try:
            with bounded():
                return await _some(consumer, partitions, timeout_ms, (max_records or math.inf) if known else 1)
        except _UNPACKING as error:
            if known and positions(consumer, partitions).keys() > before.keys():
                raise IllegalStateError("partitions changed while their records were fetched, one of which can't be read") from error
            stand(consumer, before)  # what the failed call had unpacked of any partition is gone with it
            await refill(consumer, before)
        except BaseException:
            stand(consumer, before)
            raise


async def _some(
    consumer: AIOKafkaConsumer, partitions: tuple[TopicPartition, ...], timeout_ms: int, most: float
) -> dict[TopicPartition, list[ConsumerRecord]]:
    """The records that are there, a few at a time, until they are enough."""
    found: dict[TopicPartition, list[ConsumerRecord]] = {}
    count = size = 0
    while count < most and size < _ENOUGH_BYTES:
        asked = int(min(_FEW_RECORDS, most - count))
        got = await consumer.getmany(*partitions, timeout_ms=0 if found else timeout_ms, max_records=asked)
        for where, records in got.items():
            found.setdefault(where, []).extend(records)
            size += sum(len(record.key or b"") + len(record.value or b"") for record in records)
        had = sum(map(len, got.values()))
        count += had
        if had < asked:
            break
    return found


async def next_record(consumer: AIOKafkaConsumer) -> ConsumerRecord:
    """As `getone`, of what can be read; the rest is left out as `readable` does.

    Raises:
        KafkaError: as `getone`.
    """
    while True:
        before = positions(consumer)
        try:
            with bounded():
                record = await consumer.getone()
        except _UNPACKING:
            await refill(consumer, before)
        else:
            if readable([record]):
                return record


def readable(records: Iterable[ConsumerRecord]) -> list[ConsumerRecord]:
    """The records without those that can't be read; of each of these the log has a line, once."""
    kept = []
    for record in records:
        if isinstance(record, UnreadableRecord):
            leave_out(record, record.unread.why)
        else:
            kept.append(record)
    return kept


def leave_out(record: ConsumerRecord, why: str) -> None:
    """Say that a record is left out, once in the life of the process; of one partition the first `_NAMED` are named."""
    named = _said[record.topic, record.partition]
    if len(named) >= _NAMED or record.offset in named:
        return
    named.add(record.offset)
    more = "" if len(named) < _NAMED else "; more of them in this partition are not named"
    logger.warning("left out: %s partition %d offset %d can't be read: %s%s", record.topic, record.partition, record.offset, why, more)
