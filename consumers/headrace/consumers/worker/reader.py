"""What a lane reads: its partition of `trajectory-groups` and of `commands`, through a consumer of its own.

Guarantees: `read_committed`, records as bytes, in offset order, from the positions it was given, with an `UnreadableRecord` in the place of
one that the client can't hand over; where retention has deleted what was to be read, it says so instead of jumping. Limitations: group
membership; it uses `assign`.
"""

import logging
from collections.abc import Sequence

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError, OffsetOutOfRangeError

from headrace.core.deadline import deadline
from headrace.core.kafka import ClientOptions
from headrace.core.polling import poll
from headrace.core.reading import OffsetLostError, end_offsets
from headrace.schemas.topics import Topics

logger = logging.getLogger(__name__)

_POLL_MS = 1000
_STOP_SECONDS = 5.0
# More of either is slower: what was received and unpacked does not stay in the processor's cache until it is read.
_MAX_RECORDS = 16
_FETCH_BYTES = 4 << 20


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
            max_partition_fetch_bytes=_FETCH_BYTES,
        )

    async def start(self, groups_from: int, commands_from: int) -> int:
        """Stand at the given offsets; returns the offset of the first group that will be read.

        It is above `groups_from` where retention deleted records that no one has read: the caller says whose loss that is.
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
        try:
            return await poll(self._consumer, *partitions, timeout_ms=timeout_ms, max_records=_MAX_RECORDS)
        except OffsetOutOfRangeError as error:
            raise OffsetLostError(f"{error.args[0]}: deleted by retention while the lane was behind") from error

    def hold_groups(self, *, hold: bool) -> None:
        """Stop or continue fetching groups; commands are always read."""
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
