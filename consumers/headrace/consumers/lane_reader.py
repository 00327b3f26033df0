"""What a lane reads: its partition of `trajectory-groups` and of `commands`, through a consumer of its own.

Guarantees: `read_committed`, records as bytes, in offset order, from the positions it was given; where retention has deleted what was to
be read, it says so instead of jumping. Gives up: group membership; it uses `assign`.
"""

import logging
from collections.abc import Mapping, Sequence

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError, OffsetOutOfRangeError

from headrace.core.deadline import deadline
from headrace.core.kafka import ClientOptions
from headrace.core.reading import OffsetLostError, end_offsets
from headrace.schemas.errors import CodecError
from headrace.schemas.reasons import DeadLetterReason
from headrace.schemas.topics import Topics

logger = logging.getLogger(__name__)

_POLL_MS = 1000
_STOP_SECONDS = 5.0
_MAX_RECORDS = 256


class UnreadableRecord(ConsumerRecord):  # type: ignore[misc]  # aiokafka is untyped
    """Stands for a record that the Kafka client can't hand over."""

    @classmethod
    def at(cls, partition: TopicPartition, offset: int) -> "UnreadableRecord":
        """The record at an offset; of the rest nothing is known."""
        return cls(
            topic=partition.topic,
            partition=partition.partition,
            offset=offset,
            timestamp=-1,
            timestamp_type=0,
            key=None,
            value=None,
            checksum=None,
            serialized_key_size=-1,
            serialized_value_size=-1,
            headers=(),
        )

    @property
    def error(self) -> CodecError:
        """Why."""
        detail = "a header's name is no UTF-8 text; the record stays at its offset in the source topic until retention takes it"
        return CodecError(DeadLetterReason.UNREADABLE_HEADERS, "headers", detail)


class LaneReader:
    """Reads one lane.

    Args:
        options: Client options.
        topics: Topic names.
        lane: Partition number.
        groups_topic: Where the groups are, if not in `topics`: a shadow reads another worker group's.
    """

    def __init__(self, options: ClientOptions, topics: Topics, lane: int, groups_topic: str | None = None) -> None:
        self._options = options
        self.groups = TopicPartition(groups_topic or topics.trajectory_groups, lane)
        self.commands = TopicPartition(topics.commands, lane)
        self._consumer = AIOKafkaConsumer(
            **options,
            group_id=None,
            enable_auto_commit=False,
            auto_offset_reset="none",
            isolation_level="read_committed",
            max_partition_fetch_bytes=8 * 1024 * 1024,
        )

    async def start(self, groups_from: int, commands_from: int) -> int:
        """Stand at the given offsets; returns the offset of the first group that will be read.

        It is above `groups_from` where retention deleted records that nobody has read: the caller says whose loss that is.
        """
        await self._consumer.start()
        self._consumer.assign([self.groups, self.commands])
        beginnings = await self._consumer.beginning_offsets([self.groups, self.commands])
        first = max(groups_from, beginnings[self.groups])
        self._consumer.seek(self.groups, first)
        # Commands that retention deleted before anyone owned the lane are gone for every reader alike.
        self._consumer.seek(self.commands, max(commands_from, beginnings[self.commands]))
        return int(first)

    async def read(self) -> tuple[Sequence[ConsumerRecord], Sequence[ConsumerRecord]]:
        """The next records as (commands, groups); both may be empty.

        Raises:
            OffsetLostError: retention overtook the reader.
        """
        batches = await self._poll(self.commands, self.groups, timeout_ms=_POLL_MS)
        return batches.get(self.commands, ()), batches.get(self.groups, ())

    async def position(self) -> int:
        """Offset of the next record of the groups' topic, markers behind the last one passed."""
        return int(await self._consumer.position(self.groups))

    async def read_commands_to_end(self) -> list[ConsumerRecord]:
        """All commands up to the end that was written when called."""
        ends = await end_offsets(self._options, self.commands.topic, [self.commands.partition])
        end = ends[self.commands.partition]
        records: list[ConsumerRecord] = []
        while await self._consumer.position(self.commands) < end:
            batches = await self._poll(self.commands, timeout_ms=25)
            records.extend(batches.get(self.commands, ()))
        return records

    async def _poll(self, *partitions: TopicPartition, timeout_ms: int) -> dict[TopicPartition, list[ConsumerRecord]]:
        before = {partition: int(await self._consumer.position(partition)) for partition in partitions}
        try:
            batches: dict[TopicPartition, list[ConsumerRecord]] = await self._consumer.getmany(
                *partitions, timeout_ms=timeout_ms, max_records=_MAX_RECORDS
            )
        except OffsetOutOfRangeError as error:
            raise OffsetLostError(f"{error.args[0]}: deleted by retention while the lane was behind") from error
        except UnicodeDecodeError:
            return await self._past_unreadable(before)
        return batches

    async def _past_unreadable(self, before: Mapping[TopicPartition, int]) -> dict[TopicPartition, list[ConsumerRecord]]:
        """One record, where aiokafka fails on a batch: it decodes header names as UTF-8, and a broker takes any bytes.

        What can't be handed over is answered by an `UnreadableRecord` and passed by; the records around it are read as they are.
        """
        for partition, at in before.items():
            # What the failed call had unpacked of any partition is gone with it.
            self._consumer.seek(partition, at)
        for partition, at in before.items():
            try:
                batches = await self._consumer.getmany(partition, timeout_ms=_POLL_MS, max_records=1)
            except UnicodeDecodeError:
                self._consumer.seek(partition, at + 1)
                return {partition: [UnreadableRecord.at(partition, at)]}
            if batches:
                return {partition: batches[partition]}
        return {}

    def hold_groups(self, *, hold: bool) -> None:
        """Stop or go on fetching groups; commands are always read."""
        if hold:
            self._consumer.pause(self.groups)
        else:
            self._consumer.resume(self.groups)

    async def stop(self) -> None:
        """Close the connection."""
        try:
            # aiokafka#773: stop can hang.
            async with deadline(_STOP_SECONDS):
                await self._consumer.stop()
        except (TimeoutError, KafkaError) as error:
            logger.warning("lane reader did not stop cleanly: %r", error)
