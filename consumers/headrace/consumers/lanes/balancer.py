"""Which lanes this worker should own: an ordinary consumer group, used for balancing only (exactly-once rule 4).

The consumer is always paused and delivers nothing; each lane reads through a consumer of its own. Guarantees: `lanes` is the latest
assignment that the group gave; a revocation alone releases nothing, since an eager rebalance revokes and gives back what stays.
Gives up: correctness, which is the lane producers' (fencing): what stands here may be stale.
"""

import asyncio
import logging
from collections.abc import Collection

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, TopicPartition
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor
from aiokafka.errors import KafkaError

from headrace.core.deadline import deadline
from headrace.core.kafka import client_options, plain_errors
from headrace.core.settings import Settings

logger = logging.getLogger(__name__)

# Paused partitions deliver nothing, but polling keeps aiokafka from thinking that its user hangs.
_POLL_MS = 1000


class Balancer(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka is untyped
    """Membership in the worker group.

    Args:
        settings: Kafka, topic prefix, worker group, instance and timeouts.
    """

    def __init__(self, settings: Settings) -> None:
        worker = settings.worker
        self.group_id = settings.worker_group_id
        self.lanes: frozenset[int] = frozenset()
        self.changed = asyncio.Event()
        self._topic = settings.topic_names.trajectory_groups
        self._options = client_options(settings.kafka, f"headrace-worker-{worker.group}")
        self._consumer = AIOKafkaConsumer(
            **self._options,
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
        self._poller: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Join the group.

        Raises:
            KafkaUnavailableError: no broker, or it refuses the login.
        """
        with plain_errors(self._options):
            await self._consumer.start()
            self._consumer.subscribe([self._topic], listener=self)
            self._poller = asyncio.create_task(self._poll(), name="balancer")

    async def stop(self) -> None:
        """Leave the group, so that others get the lanes at once."""
        if self._poller is not None:
            self._poller.cancel()
            await asyncio.gather(self._poller, return_exceptions=True)
        try:
            # aiokafka#773: stop can hang in the heartbeat routine.
            async with deadline(10):
                await self._consumer.stop()
        except TimeoutError:
            logger.warning("the group consumer did not stop in 10 s; the group will notice by its session timeout")

    def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> None:
        """Nothing: what stays comes back in the assignment that follows."""

    def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
        """Take the new assignment; pause it before anything is fetched."""
        for partition in assigned:
            # A position of its own, so that nothing is looked up or reset; pauses and seeks are lost in each rebalance.
            self._consumer.seek(partition, 0)
        self._consumer.pause(*assigned)
        self.lanes = frozenset(partition.partition for partition in assigned)
        logger.info("the group gave lanes %s", sorted(self.lanes))
        self.changed.set()

    async def _poll(self) -> None:
        while True:
            try:
                await self._consumer.getmany(timeout_ms=_POLL_MS)
            except KafkaError as error:
                logger.warning("group consumer: %r", error)
                await asyncio.sleep(1)
