"""Typed subscribers to everything Headrace writes, on FastStream: `@events.subscriber(StepCompleted)`.

Guarantees: only committed records (`read_committed`); the function gets a validated model, never a dict; a topic that does not exist is
an error at the start and is never created by accident (it would have the wrong partition count); when `start` has returned, a
subscriber without a group misses no record written afterwards. What happens to foreign records and failing functions: `record_scope`.
Limitations: `TrajectoryGroup`, whose arrays need the group codec and the object store; training offsets, which are a worker's business.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self, TypeVar

from faststream import AckPolicy, FastStream
from faststream.kafka import KafkaBroker, KafkaRouter
from faststream.kafka.schemas import Topic
from faststream.kafka.subscriber.usecase import LogicSubscriber
from pydantic import BaseModel

from headrace.consumers.subscribers.event_broker import event_broker
from headrace.consumers.subscribers.record_scope import RecordScope, parse
from headrace.core.errors import HeadraceError
from headrace.core.kafka import client_options
from headrace.core.kafka_outage import folding
from headrace.core.polling import next_record
from headrace.core.settings import Settings
from headrace.core.topic_metadata import partition_counts
from headrace.schemas.carried import topic_of
from headrace.schemas.trajectory import TrajectoryGroup

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
            ack_policy=AckPolicy.MANUAL,  # the scope keeps positions: FastStream's policies commit past what failed
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
        """Start all subscribers and return when they stand at their positions.

        Raises:
            MissingTopicError: a topic is not there.
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
        """Wait until every started subscriber without a group stands at its position; what is written from then on is delivered."""
        for subscriber in self._subscribers:
            consumer = subscriber.consumer
            if consumer is not None and subscriber.group_id is None:
                for partition in consumer.assignment():
                    await consumer.position(partition)

    def run(self) -> None:
        """Run until SIGINT or SIGTERM."""
        app = FastStream(self.broker)
        app.on_startup(self._require_topics)
        app.after_startup(self.ready)

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
        options = client_options(self.settings.kafka, "headrace-events")
        return folding(lambda: options)

    async def _require_topics(self) -> None:
        there = await partition_counts(client_options(self.settings.kafka, "headrace-events"))
        wanted = {topic for subscriber in self._subscribers for topic in subscriber.topic_names}
        if missing := sorted(wanted - there.keys()):
            raise MissingTopicError(f"Kafka has no topic {', '.join(missing)}: run `headrace topics apply`, or correct topics.prefix")
