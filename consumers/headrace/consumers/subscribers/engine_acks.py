"""Writes on the compacted topic `weight-acks` which versions an engine serves or could not load, and that the engine is alive.

Guarantees: an engine sends a small heartbeat every few seconds and removes it when it ends in order; a killed engine falls silent. One key
for each engine and model, so that the topic holds the current state. Event ids are derived, so that a reader drops the repeat after a kill.
Limitations: an ack that Kafka does not accept is logged and dropped.
"""

import asyncio
import logging
from contextlib import suppress
from typing import Any

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
"""Records that are not written so long after the stop are dropped."""
ALIVE_SECONDS = 10.0
"""Between two heartbeats."""


class AckTopic:
    """The topic, open for writing between `start` and `stop`; several `EngineAcks` may share it.

    Args:
        options: Client options.
        topic: Full name of `weight-acks`.
        engine_id: Name of the engine that sends heartbeats.
        every_seconds: Between two heartbeats.
    """

    def __init__(self, options: ClientOptions, topic: str, engine_id: str, every_seconds: float = ALIVE_SECONDS) -> None:
        self._options = options
        self._topic = topic
        self._engine_id = engine_id
        self._every_seconds = every_seconds
        self._producer: AIOKafkaProducer | None = None
        self._heartbeats: asyncio.Task[None] | None = None

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
        self._heartbeats = asyncio.create_task(self._send_heartbeats())

    async def stop(self) -> None:
        """Send the remaining records and disconnect; where Kafka does not answer, they are dropped after a few seconds."""
        if self._heartbeats is not None:
            self._heartbeats.cancel()
            with suppress(asyncio.CancelledError):
                await self._heartbeats
            self._heartbeats = None
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

    async def _send_heartbeats(self) -> None:
        while True:
            alive = EngineAlive(engine_id=self._engine_id, every_seconds=self._every_seconds)
            await self.send(alive_key(self._engine_id), alive, f"alive-{self._engine_id}-{alive.at.timestamp()}")
            await asyncio.sleep(self._every_seconds)

    async def send(self, key: str, record: WeightsApplied | WeightsFailed | EngineAlive | None, event_id: str) -> None:
        """Write a record, or with None a tombstone; a failure is logged."""
        assert self._producer is not None  # noqa: S101 - records are sent between start and stop
        value, headers = (None, []) if record is None else seal(record, source=key, event_id=event_id)
        try:
            await self._producer.send_and_wait(self._topic, value, key=key.encode(), headers=headers)
        except KafkaError as error:
            log_trouble(logger, logging.ERROR, error, "the ack %s was not taken: %s", event_id, error)


class EngineAcks:
    """The acks of one engine, for one model.

    Args:
        topic: Where they are written.
        engine_id: Name of the engine, and key; an engine of several models has one for each: `<engine>:<model id>`.
        base_url: Where it answers.
        deployment: That it belongs to.
    """

    def __init__(self, topic: AckTopic, *, engine_id: str, base_url: str | None, deployment: str | None) -> None:
        self._topic = topic
        self.engine_id = engine_id
        self._base_url = base_url
        self._deployment = deployment

    async def applied(self, version: WeightsPublished, *, reported: str, seconds: float, served_as: str | None = None) -> None:
        """The engine serves the version."""
        record = WeightsApplied(**self._common(version), served_as=served_as, reported=reported, seconds=seconds)
        await self._topic.send(self.engine_id, record, self._event_id(record, "applied"))

    async def failed(self, version: WeightsPublished, error: Exception, *, serving: int | None) -> None:
        """The engine could not load the version; it serves version `serving` still, if that is of this model and incarnation."""
        record = WeightsFailed(**self._common(version), error=said(error)[:2000], serving=serving)
        await self._topic.send(self.engine_id, record, self._event_id(record, "failed"))

    async def retract(self) -> None:
        """The engine serves the model no longer."""
        await self._topic.send(self.engine_id, None, f"{self.engine_id}-retracted")

    def _common(self, version: WeightsPublished) -> dict[str, Any]:
        copied = ("model_id", "incarnation", "policy_version", "digest")
        of_engine = {"engine_id": self.engine_id, "base_url": self._base_url, "deployment": self._deployment}
        return {name: getattr(version, name) for name in copied} | of_engine

    def _event_id(self, record: WeightsApplied | WeightsFailed, kind: str) -> str:
        return f"{record.incarnation}-{record.policy_version}-{kind}-{self.engine_id}"
