"""What the gateway writes: groups, job, document and its own facts in one short transaction (exactly-once rule 17).

Transactional ids are `headrace-gateway-<instance>-<slot>`, one lock a slot, time-out 5 s, nothing slow inside: payloads are in the object
store before, records are sealed before. Guarantees: `commit` returns when all of it is committed and the gateway's own tables hold it; a
commit whose outcome is unclear is cleared by fencing (the producer starts anew, which ends its last transaction) and asking whether it is
there. Gives up: an order among slots; two gateways with one instance name fence each other, and the one that loses says so.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.errors import InvalidProducerEpoch, KafkaError, ProducerFenced
from aiokafka.structs import RecordMetadata
from pydantic import BaseModel

from headrace.core.deadline import deadline
from headrace.core.kafka import KafkaUnavailableError, client_options
from headrace.core.settings import Settings
from headrace.gateway.log_view import LogView
from headrace.schemas.envelope import KafkaHeaders, seal

logger = logging.getLogger(__name__)

SOURCE = "headrace/gateway"
TRANSACTION_MS = 5_000
_MAX_REQUEST_BYTES = 16 * 1024 * 1024
_STOP_SECONDS = 5.0
_ATTEMPTS = 2
"""A broker that was restarted since the last request fails the first."""


class Sealed(BaseModel):
    """A record on its way: bytes for a topic; `partition` None: by the key's murmur2."""

    model_config = {"frozen": True, "arbitrary_types_allowed": True}

    topic: str
    key: str
    value: bytes | None
    headers: KafkaHeaders = ()
    partition: int | None = None


def sealed(record: BaseModel, *, topic: str, key: str, partition: int | None = None, event_id: str | None = None) -> Sealed:
    """A record model with its CloudEvents headers."""
    value, headers = seal(record, source=SOURCE, event_id=event_id)
    return Sealed(topic=topic, key=key, value=value, headers=headers, partition=partition)


class LogWriter:
    """The transactional producers of one gateway: `async with LogWriter(settings, view) as writer: await writer.commit(records, …)`.

    Args:
        settings: Of this process.
        view: Shows what was committed.
    """

    def __init__(self, settings: Settings, view: LogView) -> None:
        self._options = client_options(settings.kafka, "headrace-gateway")
        self._view = view
        self._patience = settings.gateway.kafka_timeout_seconds
        instance = settings.gateway.instance or f"{socket.gethostname()}-{settings.gateway.port}"
        stem = settings.topics.prefix.rstrip(".-_") or "headrace"
        self._ids = [f"{stem}-gateway-{instance}-{slot}" for slot in range(settings.gateway.slots)]
        self._producers: dict[str, AIOKafkaProducer] = {}
        self._free: asyncio.Queue[str] = asyncio.Queue()
        for name in self._ids:
            self._free.put_nowait(name)

    async def __aenter__(self) -> "LogWriter":
        return self

    async def __aexit__(self, *_: object) -> None:
        for name in list(self._producers):
            await self._drop(name)

    async def commit(self, records: Sequence[Sealed], *, is_in: Callable[[], bool]) -> None:
        """Write all records in one transaction; returns when it is committed and the view holds it.

        Args:
            records: Some of them of followed topics.
            is_in: Whether the view's tables hold what this transaction writes: asked where its outcome is unclear.

        Raises:
            KafkaUnavailableError: it is not committed, or nobody can say; repeating the request is safe.
        """
        name = await self._slot()
        # Shielded: a client that hangs up ends no transaction in the middle, and the slot is free when the transaction has ended.
        task = asyncio.create_task(self._commit_in(name, records, is_in), name=f"transaction in {name}")
        task.add_done_callback(lambda _task: self._free.put_nowait(name))
        places = await asyncio.shield(task)
        try:
            await self._view.seen(places)
        except KafkaUnavailableError as error:
            logger.warning("a committed transaction does not show yet: %s", error)  # it is in, and that is the answer

    async def _slot(self) -> str:
        try:
            async with deadline(self._patience):
                return await self._free.get()
        except TimeoutError as error:
            raise KafkaUnavailableError("all transactions of this gateway wait for Kafka: nothing was written; try again") from error

    async def _commit_in(self, name: str, records: Sequence[Sealed], is_in: Callable[[], bool]) -> dict[TopicPartition, int]:
        for attempt in range(_ATTEMPTS):
            try:
                async with deadline(TRANSACTION_MS / 1000):
                    producer = await self._producer(name)
                    return await _transaction(producer, records)
            except (KafkaError, TimeoutError, AssertionError, OSError) as error:
                await self._drop(name)
                if isinstance(error, ProducerFenced | InvalidProducerEpoch):
                    logger.warning("another gateway has the name %s: give each its own gateway.instance", name)
                if await self._cleared_up(name, error, is_in):
                    return {}
                if attempt + 1 == _ATTEMPTS:
                    said = f"Kafka did not take the request ({type(error).__name__}: {error}): nothing was written; try again"
                    raise KafkaUnavailableError(said) from error
        raise AssertionError("the last attempt returns or raises")

    async def _cleared_up(self, name: str, error: BaseException, is_in: Callable[[], bool]) -> bool:
        """Find out what became of a transaction: whether it was committed."""
        try:
            async with deadline(self._patience):
                await self._producer(name)  # fences: the last transaction of this id has ended when it has started
                await self._view.fresh()
        except (KafkaError, KafkaUnavailableError, TimeoutError, AssertionError, OSError) as second:
            await self._drop(name)
            raise KafkaUnavailableError(
                f"Kafka did not confirm the request ({type(error).__name__}: {error}), and whether it is in is not known "
                f"({type(second).__name__}): send it again with the same Idempotency-Key"
            ) from error
        return is_in()

    async def _producer(self, name: str) -> AIOKafkaProducer:
        if name not in self._producers:
            producer = AIOKafkaProducer(
                **self._options,
                transactional_id=name,
                transaction_timeout_ms=TRANSACTION_MS,
                acks="all",
                linger_ms=0,
                retry_backoff_ms=20,
                max_request_size=_MAX_REQUEST_BYTES,
            )
            try:
                await producer.start()
            except BaseException:
                with suppress(KafkaError, AssertionError):
                    await producer.stop()
                raise
            self._producers[name] = producer
        return self._producers[name]

    async def _drop(self, name: str) -> None:
        producer = self._producers.pop(name, None)
        if producer is None:
            return
        try:
            async with deadline(_STOP_SECONDS):
                await producer.stop()
        except (TimeoutError, KafkaError, AssertionError) as error:
            logger.warning("producer %s did not stop cleanly: %r", name, error)


async def _transaction(producer: AIOKafkaProducer, records: Sequence[Sealed]) -> dict[TopicPartition, int]:
    await producer.begin_transaction()
    deliveries = [
        await producer.send(
            record.topic, value=record.value, key=record.key.encode(), partition=record.partition, headers=list(record.headers)
        )
        for record in records
    ]
    # Every send is awaited: a commit after a failed one returns cleanly and loses that record (rule 2).
    written: list[RecordMetadata | BaseException] = await asyncio.gather(*deliveries, return_exceptions=True)
    places: dict[TopicPartition, int] = {}
    for delivery in written:
        if isinstance(delivery, BaseException):
            raise delivery
        where = TopicPartition(delivery.topic, delivery.partition)
        places[where] = max(places.get(where, -1), delivery.offset)
    await producer.commit_transaction()
    return places
