"""The gateway's tables, kept up with the log: one consumer over the topics that they are made of, without a group.

Guarantees: after `fresh()` the tables hold everything that was committed, and visible to any `read_committed` reader, before the call;
after `seen(places)` they hold these records. So two gateways agree, and what one answers after a commit the other knows. `fresh` raises
where Kafka does not answer: old news is not passed off as new. Limitations: starting quickly on a long log; all of the followed topics is
read at start, of events only the latest.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError, OffsetOutOfRangeError

from headrace.core.deadline import deadline
from headrace.core.kafka import ClientOptions, KafkaUnavailableError, client_options, plain_errors
from headrace.core.kafka_outage import log_trouble
from headrace.core.polling import poll, readable
from headrace.core.settings import Settings
from headrace.core.topic_admin import lane_count, partition_count
from headrace.gateway.tables import FOLLOWED, Tables
from headrace.schemas.topics import TRAINING_EVENTS

logger = logging.getLogger(__name__)

_IDLE_POLL_MS = 100
_AWAITED_POLL_MS = 5
"""Markers alone move a position without waking the poll."""
_RETRY_SECONDS = 0.5
_EVENTS_BACK = 200
"""Events of each partition that a start reads."""


class LogView:
    """Follows the log while its context is open: `async with LogView(settings) as view: await view.fresh(); view.tables…`.

    Args:
        settings: Of this process.
    """

    def __init__(self, settings: Settings) -> None:
        self.tables = Tables(silence_seconds=settings.gateway.engine_silence_seconds)
        self.lanes = 0
        """Partitions of the lane topics."""
        self._settings = settings
        self._options: ClientOptions = client_options(settings.kafka, "headrace-gateway")
        self._names = {settings.topic_names.full(name): name for name in FOLLOWED}
        self._consumer: AIOKafkaConsumer | None = None
        self._asking: AIOKafkaConsumer | None = None
        self._positions: dict[TopicPartition, int] = {}
        self._moved = asyncio.Condition()
        self._awaited = 0
        self._asked: asyncio.Task[Mapping[TopicPartition, int]] | None = None
        self._next: asyncio.Task[Mapping[TopicPartition, int]] | None = None
        self._loop: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "LogView":
        """Connect, and read up to now.

        Raises:
            KafkaUnavailableError: no broker.
            TopicsDifferError: the topics are missing: run `headrace topics apply`.
        """
        self.lanes = self.tables.lanes = await lane_count(self._options, self._settings.topic_names)
        with plain_errors(self._options):
            # Two connections: a fetch that waits for news would hold up a question behind it.
            self._asking = AIOKafkaConsumer(**self._consumer_options())
            self._consumer = AIOKafkaConsumer(**self._consumer_options())
            await self._asking.start()
            await self._consumer.start()
            await self._assign(self._consumer)
        self._loop = asyncio.create_task(self._follow(), name="log view")
        try:
            await self.fresh(seconds=600)
            self.tables.follows = True
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Let go of everything."""
        for task in (self._loop, self._asked, self._next):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task
        for consumer in (self._asking, self._consumer):
            if consumer is not None:
                with contextlib.suppress(KafkaError):
                    await consumer.stop()

    async def fresh(self, seconds: float | None = None) -> Tables:
        """The tables, once they hold all that was committed before this call.

        Raises:
            KafkaUnavailableError: Kafka does not answer within `seconds`; None: those of a request.
        """
        async with self._patience(seconds):
            asked = time.time()
            await self._reach(await self._ends())
            self.tables.as_of = max(self.tables.as_of, asked)
        return self.tables

    async def seen(self, places: Mapping[TopicPartition, int], seconds: float | None = None) -> None:
        """Wait until records at these offsets are in the tables; of topics that are not followed nothing is waited for.

        Raises:
            KafkaUnavailableError: as `fresh`.
        """
        async with self._patience(seconds):
            await self._reach({place: offset + 1 for place, offset in places.items() if place.topic in self._names})

    async def news(self) -> None:
        """Wait until records were applied."""
        async with self._moved:
            await self._moved.wait()

    async def until(self, there: Callable[[], bool], seconds: float) -> bool:
        """Wait until the tables satisfy a condition; no change of them is missed. Returns whether they do.

        Args:
            there: The condition. It only reads the tables.
            seconds: The longest wait.
        """
        try:
            async with deadline(seconds), self._moved:
                await self._moved.wait_for(there)
        except TimeoutError:
            return there()
        return True

    def _consumer_options(self) -> ClientOptions:
        return {
            **self._options,
            "group_id": None,
            "enable_auto_commit": False,
            "auto_offset_reset": "none",
            "isolation_level": "read_committed",
            "fetch_max_wait_ms": 100,
            "retry_backoff_ms": 20,
        }

    async def _assign(self, consumer: AIOKafkaConsumer) -> None:
        partitions = [TopicPartition(topic, p) for topic in self._names for p in range(await partition_count(self._options, topic))]
        beginnings, ends = await consumer.beginning_offsets(partitions), await consumer.end_offsets(partitions)
        consumer.assign(partitions)
        for partition in partitions:
            first = beginnings[partition]
            if self._names[partition.topic] == TRAINING_EVENTS:
                first = max(first, ends[partition] - _EVENTS_BACK)
            consumer.seek(partition, first)
            self._positions[partition] = first

    async def _follow(self) -> None:
        consumer = self._consumer
        assert consumer is not None  # noqa: S101 - narrows the type: started before
        while True:
            try:
                batches = await poll(consumer, timeout_ms=_AWAITED_POLL_MS if self._awaited else _IDLE_POLL_MS)
                applied = 0
                for partition, records in batches.items():
                    name = self._names[partition.topic]
                    kept = readable(records)
                    self.tables.unreadable += len(records) - len(kept)
                    for record in kept:
                        self.tables.apply(name, record)
                        applied += 1
                        if applied % 500 == 0:
                            await asyncio.sleep(0)
                positions = {partition: await consumer.position(partition) for partition in self._positions}
            except OffsetOutOfRangeError as error:
                # Retention ran past us: what is left is all there is.
                for partition, first in (await consumer.beginning_offsets(list(error.args[0]))).items():
                    consumer.seek(partition, first)
                continue
            except KafkaError as error:
                log_trouble(logger, logging.WARNING, error, "the log can't be followed: %s", error)
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            if positions != self._positions:
                self._positions = positions
                async with self._moved:
                    self._moved.notify_all()

    async def _reach(self, ends: Mapping[TopicPartition, int]) -> None:
        def there() -> bool:
            return all(self._positions.get(partition, 0) >= end for partition, end in ends.items())

        if there():
            return
        self._awaited += 1
        try:
            async with self._moved:
                while not there():
                    if self._loop is not None and self._loop.done():
                        self._loop.result()
                    await self._moved.wait()
        finally:
            self._awaited -= 1

    async def _ends(self) -> Mapping[TopicPartition, int]:
        """Where the followed partitions end, asked for after this call began; those who ask meanwhile share the next question."""
        if self._asked is not None and not self._asked.done():
            if self._next is None or self._next.done():
                self._next = asyncio.create_task(self._ask_after(self._asked))
            return await asyncio.shield(self._next)
        self._asked = asyncio.create_task(self._ask())
        return await asyncio.shield(self._asked)

    async def _ask_after(self, before: "asyncio.Task[Mapping[TopicPartition, int]]") -> Mapping[TopicPartition, int]:
        await asyncio.wait([before])
        self._asked = asyncio.current_task()
        self._next = None
        return await self._ask()

    async def _ask(self) -> Mapping[TopicPartition, int]:
        consumer = self._asking
        assert consumer is not None  # noqa: S101 - narrows the type: started before
        with plain_errors(self._options):
            ends: Mapping[TopicPartition, int] = await consumer.end_offsets(list(self._positions))
        return ends

    @asynccontextmanager
    async def _patience(self, seconds: float | None) -> AsyncIterator[None]:
        began = time.monotonic()
        try:
            async with deadline(self._settings.gateway.kafka_timeout_seconds if seconds is None else seconds):
                yield
        except TimeoutError as error:
            raise KafkaUnavailableError(
                f"Kafka at {self._options['bootstrap_servers']} has not answered for {time.monotonic() - began:.0f} s: "
                "try again when it runs"
            ) from error
