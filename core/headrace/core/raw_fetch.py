"""One fetch whose records are unpacked here, past what aiokafka's own unpacking raises on.

A broker checks a record's lengths, and takes any bytes as the name of a header, whatever stands behind the end of a gzip stream, and
batches that unpack to any size. aiokafka raises on the first two, `unpacking.py` on the third, at each attempt, with all that the call had
unpacked lost. This module reaches into its internals for that reason; `polling` uses it where a poll has failed, so it costs nothing
before.

Guarantees: isolation, limits and offsets are the consumer's own; a header's name that is no text, or too many headers, cost their record; a
batch that can't be decompressed, or only to more than the bound, costs its records; nothing else is lost. A batch with a wrong checksum
raises: that is no one's record, but a broken disk or network. Limitations: records are unpacked in Python, which is slow. Of a batch that
can't be decompressed the first `MOST_UNREAD` records are handed over, the last of these for all behind it.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.consumer.fetcher import FetchResult, PartitionRecords
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.record.default_records import DefaultRecordBatch, _DefaultRecordBatchPy
from aiokafka.record.memory_records import _MemoryRecordsPy
from aiokafka.record.util import decode_varint

from headrace.core.unpacking import TooLargeError, headers_at
from headrace.schemas.reasons import CodecError, DeadLetterReason

_LAYOUT_WITH_REPLICA = 11
"""From this version on, a partition's part of a response ends with a preferred replica before the records."""


MOST_UNREAD = 1000
"""Records of one batch that are handed over one by one although the batch can't be decompressed: a few bytes can claim to be millions."""
_MOST_HEADERS = 10_000
"""Of a record that is unpacked here: each costs a microsecond of the event loop."""
_NO_TEXT = "a header's name is no UTF-8 text"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    """A record that is not unpacked, and why."""

    offset: int
    why: str
    reason: DeadLetterReason = DeadLetterReason.UNREADABLE_HEADERS


class UnreadableRecord(ConsumerRecord):  # type: ignore[misc]  # aiokafka is untyped
    """Stands for a record that the Kafka client can't hand over: of it nothing is known but its place."""

    unread: Unread

    @classmethod
    def at(cls, where: TopicPartition, unread: Unread) -> "UnreadableRecord":
        """The record in its partition."""
        record = cls(
            topic=where.topic,
            partition=where.partition,
            offset=unread.offset,
            timestamp=-1,
            timestamp_type=0,
            key=None,
            value=None,
            checksum=None,
            serialized_key_size=-1,
            serialized_value_size=-1,
            headers=(),
        )
        object.__setattr__(record, "unread", unread)  # frozen
        return record

    @property
    def error(self) -> CodecError:
        """Why, for its dead letter."""
        detail = f"{self.unread.why}; it stays at its offset in the source topic until retention takes it"
        return CodecError(self.unread.reason, "headers" if self.unread.why == _NO_TEXT else "", detail)


def positions(consumer: AIOKafkaConsumer, partitions: tuple[TopicPartition, ...] = ()) -> dict[TopicPartition, int]:
    """Where the consumer stands in these partitions, or in all; without those that are paused, or have no position yet."""
    subscription = consumer._subscription.subscription
    assignment = None if subscription is None else subscription.assignment
    if assignment is None:
        return {}
    states = {where: assignment.state_value(where) for where in (partitions or assignment.tps) if where in assignment.tps}
    return {where: state.position for where, state in states.items() if state.has_valid_position and not state.paused}


async def refill(consumer: AIOKafkaConsumer, at: Mapping[TopicPartition, int]) -> None:
    """Fetch what comes next, for the consumer's next `getmany` or `getone` to hand over, what can't be read as `UnreadableRecord`.

    Where a partition has nothing, or its broker has another answer than records, nothing is changed: the next poll says why.

    Args:
        consumer: Started; it stands at these positions.
        at: From `positions`.

    Raises:
        KafkaError: the broker can't be reached.
    """
    by_node: dict[int, dict[str, list[tuple[int, int, int]]]] = defaultdict(lambda: defaultdict(list))
    client, fetcher = consumer._client, consumer._fetcher
    for where, offset in at.items():
        node = client.cluster.leader_for_partition(where)
        if node is not None and node >= 0:
            by_node[node][where.topic].append((where.partition, offset, fetcher._max_partition_fetch_bytes))
    for node, topics in by_node.items():
        request = FetchRequest(0, 0, fetcher._fetch_max_bytes, fetcher._isolation_level, list(topics.items()))
        response = await client.send(node, request)
        for topic, parts in response.topics:
            for partition, error, _, *rest in parts:
                where, batches = TopicPartition(topic, partition), _Batches(rest[-1])
                if error == 0 and batches.has_next() and positions(consumer, (where,)) == {where: at[where]}:
                    aborted = rest[2] if response.API_VERSION >= _LAYOUT_WITH_REPLICA else rest[-2]
                    records = _Records(where, batches, aborted, at[where], None, None, True, fetcher._isolation_level)
                    assignment = consumer._subscription.subscription.assignment
                    fetcher._records[where] = FetchResult(
                        where, assignment=assignment, partition_records=records, backoff=fetcher._prefetch_backoff
                    )


def stand(consumer: AIOKafkaConsumer, at: Mapping[TopicPartition, int]) -> None:
    """Move the consumer to these positions; partitions that a group has taken away meanwhile are passed by."""
    now = positions(consumer, tuple(at))
    for where, offset in at.items():
        if now.get(where, offset) != offset:
            consumer.seek(where, offset)


class _Records(PartitionRecords):  # type: ignore[misc]  # aiokafka is untyped
    """What a partition's part of a response has, without aborted records and markers."""

    def _consumer_record(self, tp: TopicPartition, record: object) -> ConsumerRecord:
        return UnreadableRecord.at(tp, record) if isinstance(record, Unread) else super()._consumer_record(tp, record)


class _Batches(_MemoryRecordsPy):  # type: ignore[misc]  # aiokafka is untyped
    def next_batch(self) -> object:
        """The next one; those of before Kafka 0.11 as aiokafka reads them, since they have no headers."""
        upcoming = self._next_slice
        batch = super().next_batch()
        return _Batch(upcoming) if isinstance(batch, DefaultRecordBatch) else batch


class _Batch(_DefaultRecordBatchPy):  # type: ignore[misc]  # aiokafka is untyped
    _pos: int

    def __iter__(self) -> Iterator[object]:
        try:
            self._maybe_uncompress()
        except TooLargeError as error:
            yield from self._unread(f"its batch is too large: {error}", DeadLetterReason.TOO_LARGE)
            return
        except Exception:  # noqa: BLE001 - each codec has errors of its own, and a batch that can't be decompressed has no records
            yield from self._unread("its batch can't be decompressed", DeadLetterReason.UNREADABLE_HEADERS)
            return
        for _ in range(self._num_records):
            _length, start = decode_varint(self._buffer, self._pos)
            count, _ = decode_varint(self._buffer, headers_at(self._buffer, start))
            if count > _MOST_HEADERS:
                yield self._pass_by(f"it has {count} headers", DeadLetterReason.TOO_LARGE)
                continue
            try:
                yield self._read_msg()
            except UnicodeDecodeError:
                yield self._pass_by(_NO_TEXT, DeadLetterReason.UNREADABLE_HEADERS)

    def _unread(self, why: str, reason: DeadLetterReason) -> Iterator[Unread]:
        last = min(self.next_offset, self.base_offset + MOST_UNREAD) - 1
        for offset in range(self.base_offset, last):
            yield Unread(offset=offset, why=why, reason=reason)
        more = "" if last == self.next_offset - 1 else f"; the same holds for the records behind it up to offset {self.next_offset - 1}"
        yield Unread(offset=last, why=why + more, reason=reason)

    def _pass_by(self, why: str, reason: DeadLetterReason) -> Unread:
        length, start = decode_varint(self._buffer, self._pos)
        _attributes, pos = decode_varint(self._buffer, start)
        _timestamp, pos = decode_varint(self._buffer, pos)
        offset, _ = decode_varint(self._buffer, pos)
        self._pos = start + length
        return Unread(offset=self.base_offset + offset, why=why, reason=reason)
