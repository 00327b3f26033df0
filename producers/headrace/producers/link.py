"""The connection to Kafka under the producer: one idempotent aiokafka producer, replaced when it can't continue.

Guarantees: acks=all and idempotent, so a retry inside the client never doubles a record; every write ends within the request timeout,
in a position or in a `DeliveryError` that says whether the record may be in the log (aiokafka alone would retry for ever). After an
error that leaves a hole in the client's sequence numbers (aio-libs/aiokafka#1017) the next write goes through a new client.
Limitations: aiokafka compresses on the event loop: 0.4 ms for 100 KB with zstd, 7 ms with lz4.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError, KafkaTimeoutError, UnknownTopicOrPartitionError
from aiokafka.structs import RecordMetadata

from headrace.core.deadline import deadline
from headrace.core.kafka import KafkaUnavailableError, client_options, plain_errors, stop_producer
from headrace.core.kafka_outage import folding
from headrace.core.outages import said
from headrace.core.settings import Settings
from headrace.core.topic_admin import partition_count
from headrace.producers.errors import DeliveryError

BATCH_BYTES = 256 * 1024
"""Of one request to a partition; a larger record goes alone."""
_STOP_SECONDS = 5.0


class KafkaLink:
    """Writes records to one topic.

    Args:
        settings: Kafka and producer settings.
        topic: Full name.
        client_id: For the broker's logs.
    """

    def __init__(self, settings: Settings, topic: str, client_id: str) -> None:
        self._options = client_options(settings.kafka, client_id)
        self._topic = topic
        self._compression = None if settings.producer.compression == "none" else settings.producer.compression
        self._linger_ms = settings.producer.linger_ms
        self._timeout = settings.kafka.request_timeout_ms / 1000
        self._client: AIOKafkaProducer | None = None
        self._broken = False
        self._renewal = asyncio.Lock()

    async def start(self) -> None:
        """Connect, and see that the topic is there.

        Raises:
            KafkaUnavailableError: no Kafka, no login, or no such topic (run `headrace topics apply`).
        """
        with self.folding():
            await partition_count(self._options, self._topic)
        self._client = await self._connect()

    def folding(self) -> AbstractContextManager[None]:
        """Inside, what the Kafka client logs while Kafka is away is folded into a warning a minute."""
        return folding(lambda: self._options)

    async def write(
        self, name: str, key: bytes, value: bytes, headers: Sequence[tuple[str, bytes]], handed_over: Callable[[], None]
    ) -> RecordMetadata:
        """Write a record and wait for its position.

        Args:
            name: Of the group or job, for errors.
            key: Model id.
            value: Body.
            headers: Kafka headers.
            handed_over: Called when the record has its place in the order of its partition.

        Raises:
            DeliveryError: not acknowledged within the request timeout, or refused.
        """
        unknown = False
        client: AIOKafkaProducer | None = None
        try:
            async with deadline(self._timeout):
                client = await self._working()
                position = await client.send(self._topic, value, key, headers=list(headers))
                unknown = True
                handed_over()
                position.add_done_callback(_look_at)
                return await asyncio.shield(position)
        except TimeoutError:
            detail = f"Kafka at {self._options['bootstrap_servers']} did not answer within {self._timeout:g} s"
            raise DeliveryError(name, detail, unknown=unknown) from KafkaTimeoutError(detail)
        except UnknownTopicOrPartitionError:
            raise DeliveryError(name, f"there is no topic {self._topic}: run `headrace topics apply`", unknown=unknown) from None
        except KafkaUnavailableError as error:
            raise DeliveryError(name, str(error), unknown=False) from error
        except KafkaError as error:
            if client is self._client and unknown:
                self._broken = True
            timed_out = isinstance(error, KafkaTimeoutError) and not unknown
            detail = "Kafka takes no more for now" if timed_out else said(error)
            raise DeliveryError(name, detail, unknown=unknown) from error

    async def close(self) -> None:
        """Disconnect. What is written was awaited by its writer; what Kafka never answered to is dropped."""
        if self._client is not None:
            await stop_producer(self._client, _STOP_SECONDS)
            self._client = None

    async def _working(self) -> AIOKafkaProducer:
        if self._client is not None and not self._broken:
            return self._client
        async with self._renewal:
            if self._broken and self._client is not None:
                old, self._client = self._client, await self._connect()
                self._broken = False
                await stop_producer(old, _STOP_SECONDS)
            if self._client is None:
                raise KafkaUnavailableError("the producer is not connected")
            return self._client

    async def _connect(self) -> AIOKafkaProducer:
        options: dict[str, Any] = {
            **self._options,
            "enable_idempotence": True,
            "acks": "all",
            "compression_type": self._compression,
            "linger_ms": self._linger_ms,
            "max_batch_size": BATCH_BYTES,
        }
        client = AIOKafkaProducer(**options)
        with self.folding(), plain_errors(self._options):
            try:
                async with deadline(self._timeout):
                    await client.start()
            except BaseException as error:
                await stop_producer(client, _STOP_SECONDS)
                if isinstance(error, TimeoutError):
                    raise KafkaTimeoutError(f"no producer id within {self._timeout:g} s") from None
                raise
        return client


def _look_at(position: "asyncio.Future[RecordMetadata]") -> None:
    """Take the outcome of a record whose writer stopped waiting, so that asyncio does not complain about it."""
    if not position.cancelled():
        position.exception()
