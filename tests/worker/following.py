"""A `read_committed` subscriber of all that workers write: what a test waits for, and counts."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from pydantic import BaseModel

from headrace.core.kafka import ClientOptions
from headrace.core.topic_admin import partition_count
from headrace.schemas.dead_letters import is_dead_letter
from headrace.schemas.envelope import header_text, open_record, record_models
from headrace.schemas.jobs import JobDocument
from headrace.schemas.state import ModelState
from headrace.schemas.topics import Topics

M = TypeVar("M", bound=BaseModel)


class Following:
    """Records by type, as they come."""

    def __init__(self, options: ClientOptions, topics: Topics, model_id: str | None = None) -> None:
        self._model_id = model_id
        self._options = options
        self._topics = topics
        self._consumer = AIOKafkaConsumer(
            **options, group_id=None, enable_auto_commit=False, auto_offset_reset="none", isolation_level="read_committed"
        )
        self.records: list[BaseModel] = []
        self.dead_letters: list[ConsumerRecord] = []
        self.event_ids: Counter[str] = Counter()

    async def start(self) -> None:
        """From the beginning of every topic."""
        await self._consumer.start()
        names = (
            self._topics.steps,
            self._topics.models,
            self._topics.training_events,
            self._topics.weights,
            self._topics.jobs,
            self._topics.dead_letters,
        )
        partitions = [TopicPartition(name, p) for name in names for p in range(await partition_count(self._options, name))]
        self._consumer.assign(partitions)
        for partition in partitions:
            self._consumer.seek(partition, 0)

    async def stop(self) -> None:
        """Close."""
        await self._consumer.stop()

    def of(self, kind: type[M]) -> list[M]:
        """All records of a type so far."""
        return [record for record in self.records if isinstance(record, kind)]

    async def until(self, kind: type[M], count: int, seconds: float = 120) -> list[M]:
        """Wait until there are `count` records of a type."""
        await self._wait(lambda: len(self.of(kind)) >= count, f"{count} of {kind.__name__}", seconds)
        return self.of(kind)

    async def until_state(self, fits: Callable[[ModelState], bool], seconds: float = 120) -> ModelState:
        """Wait for a model's state."""
        await self._wait(lambda: any(fits(state) for state in self.of(ModelState)), "such state", seconds)
        return [state for state in self.of(ModelState) if fits(state)][-1]

    async def until_job(self, job_id: str, fits: Callable[[JobDocument], bool], seconds: float = 120) -> JobDocument:
        """Wait for a job's document."""

        def found() -> list[JobDocument]:
            return [document for document in self.of(JobDocument) if document.job_id == job_id and fits(document)]

        await self._wait(lambda: bool(found()), f"such document of job {job_id}", seconds)
        return found()[-1]

    async def until_dead_letters(self, count: int, seconds: float = 120) -> list[ConsumerRecord]:
        """Wait until there are `count` dead letters."""
        await self._wait(lambda: len(self.dead_letters) >= count, f"{count} dead letters", seconds)
        return self.dead_letters

    async def dead_letter_of(self, topic: str, partition: int, offset: int, seconds: float = 120) -> ConsumerRecord:
        """Wait for the dead letter of the record at this place."""
        place = (topic, str(partition), str(offset))
        await self._wait(lambda: any(_place(letter) == place for letter in self.dead_letters), f"dead letter of {place}", seconds)
        return next(letter for letter in self.dead_letters if _place(letter) == place)

    async def _wait(self, done: Callable[[], bool], what: str, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not done():
                    await self._poll()
        except TimeoutError:
            seen = Counter(type(record).__name__ for record in self.records)
            raise AssertionError(f"no {what} in {seconds} s; seen: {dict(seen)}, {len(self.dead_letters)} dead letters") from None

    async def _poll(self) -> None:
        for records in (await self._consumer.getmany(timeout_ms=200)).values():
            for record in records:
                if is_dead_letter(record.headers):
                    if self._model_id is None or record.key == self._model_id.encode():
                        self.dead_letters.append(record)
                    continue
                headers = header_text(record.headers)
                opened = open_record(record.value, headers, record_models())
                about = getattr(opened, "model_id", (record.key or b"").decode())  # what became of a dead letter has its key alone
                if self._model_id is None or about == self._model_id:
                    self.event_ids[headers["ce_id"]] += 1
                    self.records.append(opened)


def _place(letter: ConsumerRecord) -> tuple[str, ...]:
    headers = header_text(letter.headers)
    return tuple(headers[f"headrace-error-{name}"] for name in ("topic", "partition", "offset"))
