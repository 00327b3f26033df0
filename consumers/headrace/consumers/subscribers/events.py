"""Typed subscribers to the records that Headrace writes, on FastStream: `@events.subscriber(StepCompleted)`.

Guarantees: only committed records are delivered, as validated models. A topic that does not exist is an error at the start and is never
created by accident (it would have the wrong partition count). When `start` has returned, a subscriber without a group misses no record
written afterwards. `ce_type` decides; records of another type and tombstones are skipped; a record that cannot be read is logged with its
place and skipped. With a group, a record's offset is committed after its handler returned, that record's alone; a handler that raises gets
the same record again, after a pause that grows to `_LONGEST_PAUSE`, and nothing after it in its partition is committed before (at least
once). Without a group a failure is logged and the next record comes (at most once). (FastStream's own `ack` commits the position of every
partition, past what failed, and its parser fails on a header that is not UTF-8.)
Limitations: `TrajectoryGroup` needs the group codec and the object store and is not delivered. With a group, the subscriber's other
partitions wait while one of its records fails. For FastStream's own broker settings build a `KafkaBroker` and include `Events.router`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.errors import IllegalStateError, KafkaError
from faststream import AckPolicy, BaseMiddleware, FastStream
from faststream.exceptions import IgnoredException
from faststream.kafka import KafkaBroker, KafkaRouter
from faststream.kafka.schemas import Topic
from faststream.kafka.subscriber.usecase import LogicSubscriber
from faststream.message import StreamMessage
from faststream.security import BaseSecurity, SASLPlaintext, SASLScram256, SASLScram512
from pydantic import BaseModel

from headrace.core.errors import HeadraceError
from headrace.core.kafka import METADATA_AGE_MS, client_options, require_bootstrap
from headrace.core.kafka_outage import folding
from headrace.core.polling import next_record
from headrace.core.settings import Settings
from headrace.core.topic_admin import partition_counts
from headrace.schemas.carried import CARRIED, topic_of
from headrace.schemas.dead_letters import is_dead_letter
from headrace.schemas.envelope import header_text, model_of, open_record
from headrace.schemas.reasons import CodecError, DeadLetterReason
from headrace.schemas.trajectory import TrajectoryGroup

logger = logging.getLogger(__name__)

_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0  # seconds; well below the time a group waits for its member's next poll

Parser = Callable[[ConsumerRecord], Awaitable[StreamMessage[Any]]]


async def parse(record: ConsumerRecord, original: Parser) -> StreamMessage[Any]:
    """FastStream's message of a record, whatever bytes its headers hold."""
    readable = tuple((name, value.encode()) for name, value in header_text(record.headers).items())
    return await original(replace(record, headers=readable))


class RecordScope:
    """The scope of one subscriber, called for every record.

    Args:
        model: The record type that the function takes.
        durable: It has a group, so positions are committed.
    """

    def __init__(self, model: type[BaseModel], *, durable: bool) -> None:
        self.model = model
        self.durable = durable
        self._carried = CARRIED[topic_of(model)]
        self._pause = _FIRST_PAUSE

    def __call__(self, raw: ConsumerRecord, /, *, context: Any) -> "_Middleware":  # noqa: ANN401 - FastStream's own repository
        """The middleware that FastStream enters around a record."""
        return _Middleware(raw, context=context, scope=self)

    async def decode(self, message: StreamMessage[Any]) -> BaseModel | None:
        """The record; None for a tombstone.

        Raises:
            CodecError: it can't be read, or its topic does not carry it.
        """
        value = message.raw_message.value
        return None if value is None else open_record(value, message.headers, self._carried)

    async def consume(self, call: Callable[[Any], Awaitable[Any]], message: StreamMessage[Any]) -> Any:  # noqa: ANN401 - a handler's result
        """Run the handler on a record of its type, and commit the position."""
        record: ConsumerRecord = message.raw_message
        result = None
        if await self._is_mine(message, record):
            try:
                result = await call(message)
            except IgnoredException:
                raise
            except Exception:
                if not self.durable:
                    raise
                await self._again(message, record)
                return None
        self._pause = _FIRST_PAUSE
        if self.durable:
            await self._commit(message, record)
        return result

    async def _is_mine(self, message: StreamMessage[Any], record: ConsumerRecord) -> bool:
        # A dead letter keeps its sender's `ce_type`, and may lack one: it is never a record of Headrace.
        if record.value is None or is_dead_letter(record.headers):
            return False
        try:
            return model_of(message.headers, self._carried) is self.model and await message.decode() is not None
        except CodecError as error:
            # Another type is normal: of a newer Headrace, or foreign. A broken record of a known type is not.
            level = logging.DEBUG if error.reason is DeadLetterReason.UNKNOWN_TYPE else logging.WARNING
            logger.log(level, "skipped %s: %s: %s", _where(record), error.reason, error)
            return False

    async def _again(self, message: StreamMessage[Any], record: ConsumerRecord) -> None:
        """Seek to the failed record, so that nothing after it is delivered before it."""
        logger.exception("the handler of %s failed at %s; the record comes again in %g s", self.model.__name__, _where(record), self._pause)
        try:
            _consumer(message).seek(TopicPartition(record.topic, record.partition), record.offset)
        except IllegalStateError:
            logger.info("%s belongs to another member now, which gets it", _where(record))
            return
        await asyncio.sleep(self._pause)  # a pause between attempts, no synchronisation
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    async def _commit(self, message: StreamMessage[Any], record: ConsumerRecord) -> None:
        try:
            await _consumer(message).commit({TopicPartition(record.topic, record.partition): record.offset + 1})
        except KafkaError as error:
            # The partition moved to another member, or Kafka is unreachable: the record may come again, which at least once allows.
            logger.warning("the position after %s was not kept: %s: %s", _where(record), type(error).__name__, error)


class _Middleware(BaseMiddleware[Any, Any]):
    def __init__(self, raw: ConsumerRecord, /, *, context: Any, scope: RecordScope) -> None:  # noqa: ANN401 - FastStream's own repository
        super().__init__(raw, context=context)
        self._scope = scope

    async def consume_scope(self, call_next: Callable[[Any], Awaitable[Any]], msg: StreamMessage[Any]) -> Any:  # noqa: ANN401 - a handler's result
        return await self._scope.consume(call_next, msg)


def _consumer(message: StreamMessage[Any]) -> AIOKafkaConsumer:
    return message.consumer  # type: ignore[attr-defined]  # KafkaMessage has it; the raw consumer


def _where(record: ConsumerRecord) -> str:
    return f"{record.topic} partition {record.partition} offset {record.offset}"


CLIENT_ID = "headrace-events"


def event_broker(settings: Settings, client_id: str = CLIENT_ID) -> KafkaBroker:
    """A broker as the settings say, not started. Its subscribers must choose read_committed themselves.

    Raises:
        KafkaUnavailableError: no bootstrap servers, or a certificate that can't be used.
    """
    options = client_options(settings.kafka, client_id)
    return KafkaBroker(
        require_bootstrap(settings),
        client_id=client_id,
        request_timeout_ms=settings.kafka.request_timeout_ms,
        metadata_max_age_ms=METADATA_AGE_MS,
        security=_security(settings, options.get("ssl_context")),
        enable_idempotence=True,
        log_level=logging.DEBUG,  # of "Received" and "Processed", two lines a record; failures are logged as errors all the same
    )


def _security(settings: Settings, ssl_context: object) -> BaseSecurity:
    kafka = settings.kafka
    use_ssl = kafka.security_protocol.endswith("SSL")
    context = {"ssl_context": ssl_context, "use_ssl": use_ssl}
    if not kafka.security_protocol.startswith("SASL"):
        return BaseSecurity(**context)  # type: ignore[arg-type]  # the context comes out of untyped client options
    kinds = {"PLAIN": SASLPlaintext, "SCRAM-SHA-256": SASLScram256, "SCRAM-SHA-512": SASLScram512}
    # The settings refuse SASL without mechanism, user and password.
    kind = kinds[str(kafka.sasl_mechanism)]
    password = kafka.sasl_password.get_secret_value() if kafka.sasl_password else ""
    return kind(username=str(kafka.sasl_username), password=password, **context)  # type: ignore[arg-type]  # as above


Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Any]])


class MissingTopicError(HeadraceError):
    """A topic that a subscriber follows does not exist; says which and how to create it."""


class Events:
    """Subscribers by record model. Run it alone (`events.run()`), as a context (`async with events:`), or put `events.router` into a
    FastStream broker of your own (`broker.include_router(events.router)`; then `await events.ready()` after its start).

    Args:
        settings: Of this process; None reads them from the environment.

    Example:
        events = Events()

        @events.subscriber(StepCompleted)
        async def on_step(step: StepCompleted) -> None:
            print(step.policy_version, step.metrics)

        events.run()
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self.router = KafkaRouter()
        self._broker: KafkaBroker | None = None
        self._subscribers: list[LogicSubscriber[Any]] = []

    def subscriber(
        self, model: type[BaseModel], *, group_id: str | None = None, from_beginning: bool | None = None
    ) -> Callable[[Handler], Handler]:
        """Call an async function with every record of this type.

        Args:
            model: `StepCompleted`, `GroupRejected`, `JobStateChanged`, `Starved`, `WeightsPublished`, `WeightsApplied`, `WeightsFailed`,
                `JobDocument`, or any other JSON record.
            group_id: A name under which the position is kept (at least once); subscribers that share it share the records. None: every
                process gets every record (at most once).
            from_beginning: Where to start without a kept position: at the oldest record, or at those written from now on. None: oldest
                with a group, so that nothing is lost before its first start; from now on without one.

        Raises:
            LookupError: no topic carries this model.
            TypeError: the model is `TrajectoryGroup`.
        """
        if model is TrajectoryGroup:
            raise TypeError("Events carries JSON records; read groups with headrace.core.reading and headrace.schemas.codec.decode_group")
        earliest = group_id is not None if from_beginning is None else from_beginning
        # One router a subscriber: middlewares are a router's, and this one's belongs to this model.
        scope = RecordScope(model, durable=group_id is not None)
        router = KafkaRouter(parser=parse, decoder=scope.decode, middlewares=[scope])
        self.router.include_router(router)
        subscribe = router.subscriber(
            Topic(self.settings.topic_names.full(topic_of(model)), declare=False),
            group_id=group_id,
            auto_offset_reset="earliest" if earliest else "latest",
            isolation_level="read_committed",
            ack_policy=AckPolicy.MANUAL,  # the scope commits: FastStream's policies commit past what failed
            no_reply=True,  # a foreign `reply_to` header must not make us publish
        )
        # FastStream's own way ends the subscriber's task on a record that aiokafka can't hand over, and starts it again, for ever.
        subscribe.get_msg = next_record  # type: ignore[method-assign]
        self._subscribers.append(subscribe)

        def register(function: Handler) -> Handler:
            subscribe(function)
            return function

        return register

    @property
    def broker(self) -> KafkaBroker:
        """A broker from the settings with these subscribers, made when first asked for.

        Raises:
            KafkaUnavailableError: no bootstrap servers, or a certificate that can't be used.
        """
        if self._broker is None:
            self._broker = event_broker(self.settings)
            self._broker.include_router(self.router)
        return self._broker

    async def start(self) -> None:
        """Start all subscribers and return when they are at their positions.

        Raises:
            MissingTopicError: a topic does not exist.
            KafkaUnavailableError: Kafka can't be reached.
        """
        broker = self.broker
        with self._folding():
            await self._require_topics()
            await broker.start()
            await self.ready()

    async def stop(self) -> None:
        """Let running functions end, then stop."""
        if self._broker is not None:
            await self._broker.stop()

    async def ready(self) -> None:
        """Wait until every started subscriber without a group is at its position; it gets every record that is written from then on."""
        for subscriber in self._subscribers:
            consumer = subscriber.consumer
            if consumer is not None and subscriber.group_id is None:
                for partition in consumer.assignment():
                    await consumer.position(partition)

    def run(self) -> None:
        """Run until SIGINT or SIGTERM."""
        app = FastStream(self.broker, on_startup=[self._require_topics], after_startup=[self.ready])

        async def run() -> None:
            with self._folding():
                await app.run()

        asyncio.run(run())

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.stop()

    def _folding(self) -> AbstractContextManager[None]:
        options = client_options(self.settings.kafka, CLIENT_ID)
        return folding(lambda: options)

    async def _require_topics(self) -> None:
        there = await partition_counts(client_options(self.settings.kafka, CLIENT_ID))
        wanted = {topic for subscriber in self._subscribers for topic in subscriber.topic_names}
        if missing := sorted(wanted - there.keys()):
            raise MissingTopicError(f"Kafka has no topic {', '.join(missing)}: run `headrace topics apply`, or correct topics.prefix")
