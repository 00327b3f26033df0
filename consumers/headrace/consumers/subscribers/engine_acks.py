"""What engines say of the versions they were given, and that they live, on the compacted topic `weight-acks`.

Guarantees: an engine says every few seconds that it lives, in one small record, and takes that back when it ends in order: one that was
killed falls silent. One key for each engine and model, so that the topic holds what is served now; event ids are derived, so that the
process that counts can drop the repeat after a kill (exactly-once rule 12). Limitations: an ack that Kafka does not take is logged, not
kept.
"""

import asyncio
import logging
from contextlib import suppress

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError

from headrace.core.deadline import deadline
from headrace.core.kafka import ClientOptions, plain_errors, stop_producer
from headrace.core.kafka_outage import log_trouble
from headrace.core.outages import said
from headrace.schemas.envelope import seal
from headrace.schemas.weights import EngineAlive, WeightsApplied, WeightsFailed, WeightsPublished, alive_key

logger = logging.getLogger(__name__)

STOP_SECONDS = 3.0
"""What is left to say at the end is dropped after this."""
ALIVE_SECONDS = 10.0
"""Between two words of an engine that it lives."""


class AckTopic:
    """The topic, open for writing between `start` and `stop`; several `EngineAcks` may share it.

    Args:
        options: Client options.
        topic: Full name of `weight-acks`.
        engine_id: Name of the engine that says meanwhile that it lives.
        every_seconds: How often.
    """

    def __init__(self, options: ClientOptions, topic: str, engine_id: str, every_seconds: float = ALIVE_SECONDS) -> None:
        self._options = options
        self._topic = topic
        self._engine_id = engine_id
        self._every_seconds = every_seconds
        self._producer: AIOKafkaProducer | None = None
        self._living: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Connect.

        Raises:
            KafkaUnavailableError: Kafka can't be reached.
        """
        with plain_errors(self._options):
            self._producer = AIOKafkaProducer(**self._options, enable_idempotence=True)
            try:
                await self._producer.start()
            except BaseException:
                await self._producer.stop()
                raise
        self._living = asyncio.create_task(self._live())

    async def stop(self) -> None:
        """Send what is under way, and disconnect. Where Kafka does not answer, what is under way is dropped after a few seconds."""
        if self._living is not None:
            self._living.cancel()
            with suppress(asyncio.CancelledError):
                await self._living
            self._living = None
        producer, self._producer = self._producer, None
        if producer is None:
            return
        seconds = STOP_SECONDS
        try:
            async with deadline(STOP_SECONDS):
                await producer.send_and_wait(self._topic, None, key=alive_key(self._engine_id).encode())
        except (TimeoutError, KafkaError) as error:
            logger.warning("engine %s did not say that it ends: %r; it falls silent instead", self._engine_id, error)
            seconds = 0.0
        finally:
            await stop_producer(producer, seconds)

    async def _live(self) -> None:
        while True:
            word = EngineAlive(engine_id=self._engine_id, every_seconds=self._every_seconds)
            await self.send(alive_key(self._engine_id), word, f"alive-{self._engine_id}-{word.at.timestamp()}")
            await asyncio.sleep(self._every_seconds)

    async def send(self, key: str, record: WeightsApplied | WeightsFailed | EngineAlive | None, event_id: str) -> None:
        """Write a record, or with None a tombstone; a failure is logged."""
        assert self._producer is not None  # noqa: S101 - those who ack live between start and stop
        value, headers = (None, []) if record is None else seal(record, source=key, event_id=event_id)
        try:
            await self._producer.send_and_wait(self._topic, value, key=key.encode(), headers=headers)
        except KafkaError as error:
            log_trouble(logger, logging.ERROR, error, "the ack %s was not taken: %s", event_id, error)


class EngineAcks:
    """The acks of one engine, for one model.

    Args:
        topic: Where they go.
        engine_id: Name of the engine, and key; one that serves several models has one for each: `<engine>:<model id>`.
        base_url: Where it answers.
        deployment: That it belongs to.
    """

    def __init__(self, topic: AckTopic, *, engine_id: str, base_url: str | None, deployment: str | None) -> None:
        self._topic = topic
        self.engine_id = engine_id
        self._base_url = base_url
        self._deployment = deployment

    async def applied(self, version: WeightsPublished, *, reported: str, seconds: float, served_as: str | None = None) -> None:
        """The engine serves it."""
        record = WeightsApplied(
            engine_id=self.engine_id,
            model_id=version.model_id,
            incarnation=version.incarnation,
            policy_version=version.policy_version,
            digest=version.digest,
            base_url=self._base_url,
            deployment=self._deployment,
            served_as=served_as,
            reported=reported,
            seconds=seconds,
        )
        await self._topic.send(self.engine_id, record, self._event_id(record, "applied"))

    async def failed(self, version: WeightsPublished, error: Exception, *, serving: int | None) -> None:
        """It could not take it, and continues with what it has: with version `serving`, if that is of this model and incarnation."""
        record = WeightsFailed(
            engine_id=self.engine_id,
            model_id=version.model_id,
            incarnation=version.incarnation,
            policy_version=version.policy_version,
            digest=version.digest,
            error=said(error)[:2000],
            serving=serving,
            base_url=self._base_url,
            deployment=self._deployment,
        )
        await self._topic.send(self.engine_id, record, self._event_id(record, "failed"))

    async def retract(self) -> None:
        """It serves the model no longer."""
        await self._topic.send(self.engine_id, None, f"{self.engine_id}-retracted")

    def _event_id(self, record: WeightsApplied | WeightsFailed, kind: str) -> str:
        return f"{record.incarnation}-{record.policy_version}-{kind}-{self.engine_id}"
