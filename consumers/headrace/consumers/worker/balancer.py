"""Which lanes this worker should own: an ordinary consumer group, used for balancing only (the assignment-only invariant).

The consumer is always paused and delivers nothing; each lane reads through a consumer of its own. The topic's metadata are read before
the consumer joins, and again every few seconds: a group leader without them assigns no lane to any member. Every worker also compares the
group's assignment with the topic's lanes. If a lane stays without an owner, the worker leaves the group and joins again.

Guarantees: `lanes` is the latest assignment that the group gave; a revocation alone releases nothing, since an eager rebalance revokes and
gives back what stays. A lane without an owner is noticed within seconds, whichever member leads; a consumer that fails is replaced.
Limitations: correctness does not depend on `lanes`, which may be stale; the lane producers' fencing guarantees it.
"""

import asyncio
import logging
from collections.abc import Collection
from contextlib import suppress

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, TopicPartition
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor
from aiokafka.coordinator.protocol import ConsumerProtocol
from aiokafka.errors import InvalidSessionTimeoutError

from headrace.core.deadline import deadline
from headrace.core.errors import HeadraceError
from headrace.core.kafka import client_options, plain_errors
from headrace.core.kafka_outage import kafka_back, log_trouble
from headrace.core.settings import Settings
from headrace.core.topic_admin import counts_of, open_admin

logger = logging.getLogger(__name__)

# Paused partitions deliver nothing, but polling keeps aiokafka from thinking that its user hangs.
_POLL_MS = 1000
_METADATA_AGE_MS = 3000
_LOOK_SECONDS = 5.0
_LOOK_DEADLINE_SECONDS = 5.0
_STOP_SECONDS = 5.0
_PATIENT_LOOKS = 3
"""A lane that has no owner in so many looks in a row is not one that a rebalance is about to assign."""
_STABLE = "Stable"


class SessionTimeoutError(HeadraceError):
    """The broker refuses `worker.session_timeout_ms`."""


class Balancer(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka is untyped
    """Membership in the worker group."""

    def __init__(self, settings: Settings) -> None:
        self.group_id = settings.worker_group_id
        self.lanes: frozenset[int] = frozenset()
        self.changed = asyncio.Event()
        self._settings = settings
        self._topic = settings.topic_names.trajectory_groups
        self._options = client_options(settings.kafka, f"headrace-worker-{settings.worker.group}")
        self._consumer: AIOKafkaConsumer | None = None
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Join the group.

        Raises:
            SessionTimeoutError: the broker allows no session timeout like that of the settings.
            KafkaUnavailableError: no broker, or it refuses the login.
        """
        await self._join()
        self._keeper = asyncio.create_task(self._keep(), name="balancer")

    async def stop(self) -> None:
        """Leave the group, so that other workers get the lanes at once."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        await self._leave()

    def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> None:
        """Nothing: what stays comes back in the assignment that follows."""

    def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
        """Take the new assignment; pause it before anything is fetched."""
        assert self._consumer is not None  # noqa: S101 - narrows the type: it is what calls
        for partition in assigned:
            # A position of its own, so that nothing is looked up or reset; pauses and seeks are lost in each rebalance.
            self._consumer.seek(partition, 0)
        self._consumer.pause(*assigned)
        self.lanes = frozenset(partition.partition for partition in assigned)
        logger.info("the group gave lanes %s", sorted(self.lanes))
        self.changed.set()

    async def _join(self) -> None:
        worker = self._settings.worker
        consumer = self._consumer = AIOKafkaConsumer(
            **self._options | {"metadata_max_age_ms": _METADATA_AGE_MS},
            group_id=self.group_id,
            group_instance_id=worker.instance,
            session_timeout_ms=worker.session_timeout_ms,
            heartbeat_interval_ms=worker.heartbeat_interval_ms,
            rebalance_timeout_ms=worker.session_timeout_ms,
            enable_auto_commit=False,
            auto_offset_reset="none",
            isolation_level="read_committed",
            partition_assignment_strategy=(StickyPartitionAssignor,),
        )
        # Before `start`, which then waits for the topic's metadata before it joins.
        consumer.subscribe([self._topic], listener=self)
        try:
            with plain_errors(self._options):
                await consumer.start()
        except BaseException as error:
            await self._leave()
            if isinstance(error.__cause__, InvalidSessionTimeoutError):
                raise SessionTimeoutError(
                    f"worker.session_timeout_ms={worker.session_timeout_ms} is outside what the broker allows: set it between the broker's "
                    "group.min.session.timeout.ms (6000 unless configured) and group.max.session.timeout.ms (1800000 unless configured)"
                ) from error
            raise

    async def _leave(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is None:
            return
        try:
            # aiokafka#773: stop can hang in the heartbeat routine.
            async with deadline(_STOP_SECONDS):
                await consumer.stop()
        except TimeoutError:
            logger.warning("the group consumer did not stop in %g s; the group will notice by its session timeout", _STOP_SECONDS)

    async def _keep(self) -> None:
        """Stay in the group; leave and join again when the consumer fails or lanes stay without an owner."""
        while True:
            try:
                if self._consumer is None:
                    await self._join()
                await self._stay(self._consumer)
            except Exception as error:  # noqa: BLE001 - a new consumer follows after any failure
                log_trouble(logger, logging.WARNING, error, "group consumer: %r; joining again", error)
                await asyncio.sleep(1)
                await kafka_back()
            await self._leave()

    async def _stay(self, consumer: AIOKafkaConsumer) -> None:
        """Poll until lanes stay without an owner."""
        loop = asyncio.get_running_loop()
        looks: list[frozenset[int]] = []
        next_look = loop.time() + _LOOK_SECONDS
        while True:
            await consumer.getmany(timeout_ms=_POLL_MS)
            if loop.time() < next_look:
                continue
            unowned: frozenset[int] = frozenset()
            with suppress(HeadraceError, TimeoutError):
                async with deadline(_LOOK_DEADLINE_SECONDS):
                    unowned = await self._unowned()
            looks = [*looks, unowned][-_PATIENT_LOOKS:]
            if len(looks) == _PATIENT_LOOKS and (left := frozenset.intersection(*looks)):
                logger.warning("no worker of group %s owns lanes %s: joining the group again", self.group_id, sorted(left))
                return
            next_look = loop.time() + _LOOK_SECONDS

    async def _unowned(self) -> frozenset[int]:
        """Lanes that the group gives to no member; none while it rebalances."""
        async with open_admin(self._options) as admin:
            lanes = (await counts_of(admin)).get(self._topic, 0)
            (answer,) = await admin.describe_consumer_groups([self.group_id])
            ((_, _, state, _, _, members, *_),) = answer.groups
        if state != _STABLE:
            return frozenset()
        assignments = [ConsumerProtocol.ASSIGNMENT.decode(assignment) for *_, assignment in members]
        owned = {place.partition for assigned in assignments for place in assigned.partitions() if place.topic == self._topic}
        return frozenset(range(lanes)) - owned
