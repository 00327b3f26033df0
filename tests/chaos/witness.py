"""A subscriber that sees all that workers write, live, across broker restarts: once as `read_committed` subscribers do, once all of it.

Guarantees: each record is noted once, with its place; what the committed view held at any time can be compared with a reading at the end.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError
from pydantic import BaseModel

from headrace.core.kafka import client_options
from headrace.core.settings import Settings
from headrace.core.topic_admin import partition_count
from headrace.schemas.envelope import header_text, open_record, record_models

M = TypeVar("M", bound=BaseModel)
Place = tuple[str, int, int]
"""Topic, partition, offset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A record."""

    key: bytes | None
    event_id: str
    record: BaseModel | None
    """None: a dead letter."""
    headers: dict[str, str]


class Witness:
    """Follows the topics that workers write.

    Args:
        settings: Of the run.
        isolation_level: `read_committed`, or `read_uncommitted` for what was aborted, too.
    """

    def __init__(self, settings: Settings, isolation_level: str = "read_committed") -> None:
        self._options = client_options(settings.kafka, f"chaos-{isolation_level}")
        self._consumer = AIOKafkaConsumer(
            **self._options,
            group_id=None,
            enable_auto_commit=False,
            auto_offset_reset="none",
            isolation_level=isolation_level,
            fetch_max_wait_ms=50,
            retry_backoff_ms=50,
        )
        topics = settings.topic_names
        self._topics = (topics.steps, topics.weights, topics.training_events, topics.models, topics.jobs, topics.dead_letters)
        self._dead_letters = topics.dead_letters
        self._polling: asyncio.Task[None] | None = None
        self.seen: dict[Place, Seen] = {}
        self.grown = asyncio.Event()

    async def __aenter__(self) -> "Witness":
        await self._consumer.start()
        partitions = [TopicPartition(t, p) for t in self._topics for p in range(await partition_count(self._options, t))]
        self._consumer.assign(partitions)
        for partition in partitions:
            self._consumer.seek(partition, 0)
        self._polling = asyncio.create_task(self._poll(), name="witness")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.gather(self._polling, return_exceptions=True)
        await self._consumer.stop()

    def of(self, kind: type[M]) -> list[M]:
        """All records of a type, in the order of their places."""
        return [seen.record for _, seen in sorted(self.seen.items(), key=lambda item: item[0]) if isinstance(seen.record, kind)]

    async def until(self, fits: Callable[[], bool], seconds: float) -> bool:
        """Wait until `fits`, looked at whenever something was seen and once a second; False when nothing at all was seen for so long."""
        quiet = 0
        while not fits():
            self.grown.clear()
            try:
                async with asyncio.timeout(1):
                    await self.grown.wait()
                quiet = 0
            except TimeoutError:
                quiet += 1
            if quiet >= seconds:
                return False
        return True

    async def catch_up(self) -> None:
        """Wait until all that is readable now was seen."""
        ends = await self._consumer.end_offsets(list(self._consumer.assignment()))
        for partition, end in ends.items():
            while await self._consumer.position(partition) < end:  # noqa: ASYNC110 - aiokafka has no event for a position that moved
                await asyncio.sleep(0.01)

    async def _poll(self) -> None:
        while True:
            if self._polling is not None and self._polling.cancelled():
                return
            with contextlib.suppress(KafkaError):  # the broker is away: that is what a run is for
                for partition, records in (await self._consumer.getmany(timeout_ms=100)).items():
                    for record in records:
                        self._note((partition.topic, partition.partition, record.offset), record)

    def _note(self, place: Place, record: object) -> None:
        headers = dict(header_text(record.headers))
        dead = place[0] == self._dead_letters
        opened = None if dead else open_record(record.value, headers, record_models())
        self.seen[place] = Seen(key=record.key, event_id=headers.get("ce_id", ""), record=opened, headers=headers)
        self.grown.set()
