"""What the gateway writes: groups, job, document and its own facts in one short transaction (exactly-once rule 17).

Transactional ids are `headrace-gateway-<instance>-<slot>`, one lock a slot, time-out 5 s, nothing slow inside: payloads are in the object
store before, records are sealed before. Guarantees: `commit` returns when all of it is committed and the gateway's own tables hold it; a
commit whose outcome is unclear is cleared by fencing (the producer starts again, which ends its last transaction) and asking whether it is
there. A change that is only right while something is as it was seen (no one has made that resource yet) is written in a `Turn`: all
gateways share its transactional ids, and the process that takes one up fences the others, then reads, then looks again, then writes; so of
two that saw the same, one writes. Limitations: an order among slots; two gateways with one instance name fence each other, and the one that
loses says so; speed of changes in one turn that come to several gateways side by side, since they fence each other.
"""

import asyncio
import logging
import random
import socket
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.errors import IllegalOperation, InvalidProducerEpoch, KafkaError, ProducerFenced
from aiokafka.structs import RecordMetadata
from pydantic import BaseModel

from headrace.core.deadline import deadline
from headrace.core.errors import HeadraceError
from headrace.core.kafka import KafkaUnavailableError, client_options
from headrace.core.outages import said
from headrace.core.reading import end_offsets
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
_FAILURES = (KafkaError, IllegalOperation, TimeoutError, AssertionError, OSError)
"""Of a transaction. The second, no KafkaError, is what aiokafka raises for a send into a transaction that has failed meanwhile."""
_TURN_IDS = 16
"""The same in every gateway, or two would not fence each other."""
_TURN_ATTEMPTS = 14
_FENCED_SECONDS = 0.02
"""At most, after the first time; doubled with each, up to the next."""
_FENCED_SECONDS_MOST = 2.0


def _is_reported(record: logging.LogRecord) -> bool:
    """False for what asyncio logs of aiokafka's own futures: their failure was raised to the writer of the transaction as well."""
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, KafkaError) and record.getMessage().startswith("Future exception was never retrieved"))


class OvertakenError(HeadraceError):
    """Something that a change rests on was changed by another request meanwhile; nothing was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a change rests on."""

    of: str
    """Of these, one change at a time is written, in all gateways together: an account, …"""
    still: Callable[[], bool]
    """Whether the view's tables are as they were when the change was decided. What it reads is written in this turn only."""
    others_write: str | None = None
    """A topic next to `gateway` that `still` reads, and that is also written outside of turns: it is read to its end each time."""

    @classmethod
    def while_unchanged(cls, of: str, facts: Mapping[str, BaseModel], were: Mapping[str, BaseModel | None]) -> "Turn":
        """For a change that rests on some facts, by their keys: as they were when it was decided; None: there was none."""
        return cls(of=of, still=lambda: all(facts.get(key) == fact for key, fact in were.items()))


_ALL_WAIT = "all transactions of this gateway wait for Kafka: nothing was written; try again"


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
        logging.getLogger("asyncio").addFilter(_is_reported)
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
        self._turns = [f"{stem}-gateway:turn-{n}" for n in range(_TURN_IDS)]
        self._turn_locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._turn_topic = settings.topic_names.gateway
        self._turn_read: dict[str, dict[TopicPartition, int]] = {}
        """Turns whose producer no one has fenced since all that was written in them before was read; and where we wrote last."""

    async def __aenter__(self) -> "LogWriter":
        return self

    async def __aexit__(self, *_: object) -> None:
        for name in list(self._producers):
            await self._drop(name)

    async def commit(self, records: Sequence[Sealed], *, is_in: Callable[[], bool], turn: Turn | None = None) -> None:
        """Write all records in one transaction; returns when it is committed and the view holds it.

        Args:
            records: Some of them of followed topics.
            is_in: Whether the view's tables hold what this transaction writes: asked where its outcome is unclear.
            turn: What the change rests on, where several gateways may change that.

        Raises:
            OvertakenError: that is no longer so; nothing was written.
            KafkaUnavailableError: it is not committed, or no one can say; repeating the request is safe.
        """
        name, let_go = await (self._slot() if turn is None else self._take(turn))
        # Shielded: a client that hangs up ends no transaction in the middle, and the slot is free when the transaction has ended.
        task = asyncio.create_task(self._commit_in(name, records, is_in, turn), name=f"transaction in {name}")
        task.add_done_callback(lambda _task: let_go())
        places = await asyncio.shield(task)
        try:
            await self._view.seen(places)
        except KafkaUnavailableError as error:
            logger.warning("a committed transaction does not show yet: %s", error)  # it is in, and that is the answer

    async def _slot(self) -> tuple[str, Callable[[], None]]:
        try:
            async with deadline(self._patience):
                name = await self._free.get()
        except TimeoutError as error:
            raise KafkaUnavailableError(_ALL_WAIT) from error
        return name, lambda: self._free.put_nowait(name)

    async def _take(self, turn: Turn) -> tuple[str, Callable[[], None]]:
        name = self._turns[int.from_bytes(sha256(turn.of.encode()).digest()[:4]) % _TURN_IDS]
        lock = self._turn_locks[name]
        try:
            async with deadline(self._patience):
                await lock.acquire()
        except TimeoutError as error:
            raise KafkaUnavailableError(_ALL_WAIT) from error
        return name, lock.release

    async def _commit_in(
        self, name: str, records: Sequence[Sealed], is_in: Callable[[], bool], turn: Turn | None
    ) -> dict[TopicPartition, int]:
        attempts = _ATTEMPTS if turn is None else _TURN_ATTEMPTS
        for attempt in range(attempts):
            try:
                async with deadline(TRANSACTION_MS / 1000):
                    producer = await self._producer(name)
                    if turn is None:
                        return await _transaction(producer, records)
                    await self._look_again(name, turn)
                    places = self._turn_read[name] = await _transaction(producer, records)
                    return places
            except _FAILURES as error:
                await self._drop(name)
                if turn is not None:  # fenced, as a rule: by a gateway that may go first
                    await asyncio.sleep(random.uniform(0, min(_FENCED_SECONDS_MOST, _FENCED_SECONDS * 2**attempt)))
                elif isinstance(error, ProducerFenced | InvalidProducerEpoch):
                    logger.warning("another gateway has the name %s: give each its own gateway.instance", name)
                if await self._cleared_up(name, error, records, is_in):
                    return {}
                if attempt + 1 == attempts:
                    message = f"Kafka did not take the request ({said(error)}): nothing was written; try again"
                    raise KafkaUnavailableError(message) from error
        raise AssertionError("the last attempt returns or raises")

    async def _look_again(self, name: str, turn: Turn) -> None:
        """With the producer of a turn: raise unless all is as it was seen."""
        if name not in self._turn_read:
            await self._settle([self._turn_topic])
            self._turn_read[name] = {}
        await self._view.seen(self._turn_read[name])
        if turn.others_write is not None:
            await self._settle([turn.others_write])
        if not turn.still():
            raise OvertakenError("another request changed it at the same moment: nothing was written; send it again")

    async def _settle(self, topics: Iterable[str]) -> None:
        """Have all of these topics in the tables that is written by now, also beyond a transaction of others that is open."""
        for topic in topics:
            ends = await end_offsets(self._options, topic)
            await self._view.seen({TopicPartition(topic, partition): end - 1 for partition, end in ends.items()})

    async def _cleared_up(self, name: str, error: BaseException, records: Sequence[Sealed], is_in: Callable[[], bool]) -> bool:
        """Find out what became of a transaction: whether it was committed."""
        try:
            async with deadline(self._patience):
                await self._producer(name)  # fences: the last transaction of this id has ended when it has started
                await self._settle({record.topic for record in records})
        except (*_FAILURES, KafkaUnavailableError) as second:
            await self._drop(name)
            raise KafkaUnavailableError(
                f"Kafka did not confirm the request ({said(error)}), and whether it is in is not known "
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
                with suppress(*_FAILURES):
                    await producer.stop()
                raise
            self._producers[name] = producer
            self._turn_read.pop(name, None)
        return self._producers[name]

    async def _drop(self, name: str) -> None:
        producer = self._producers.pop(name, None)
        if producer is None:
            return
        try:
            async with deadline(_STOP_SECONDS):
                await producer.stop()
        except _FAILURES as error:
            logger.warning("producer %s did not stop cleanly: %r", name, error)


async def _transaction(producer: AIOKafkaProducer, records: Sequence[Sealed]) -> dict[TopicPartition, int]:
    await producer.begin_transaction()
    deliveries: list[asyncio.Future[RecordMetadata]] = []
    for record in records:
        delivery = await producer.send(
            record.topic, value=record.value, key=record.key.encode(), partition=record.partition, headers=list(record.headers)
        )
        delivery.add_done_callback(_heard)  # if the next send raises, no one asks
        deliveries.append(delivery)
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


def _heard(done: "asyncio.Future[Any]") -> None:
    """What a future failed with is known from elsewhere."""
    if not done.cancelled():
        done.exception()
