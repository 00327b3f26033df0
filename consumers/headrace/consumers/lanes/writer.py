"""The lane's transactional producer: the only thing that makes a worker a lane's owner (exactly-once rules 1 to 3).

Guarantees: `start` fences the former owner and waits for its last transaction to end; `commit` awaits every send before the
commit, and after anything but a clean return it raises, with the producer void: `FencedError` or `OutcomeUnknownError` alike mean
"claim the lane again and read what happened", never "it did not happen". Gives up: reuse of a producer after any failure.
"""

import asyncio
import logging
from collections.abc import Sequence

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.errors import InvalidProducerEpoch, KafkaError, ProducerFenced

from headrace.consumers.memory.outgoing import Outgoing
from headrace.core.deadline import deadline
from headrace.core.kafka import ClientOptions
from headrace.core.outages import said
from headrace.core.settings import Settings

logger = logging.getLogger(__name__)

_STOP_SECONDS = 5.0
# aiokafka aligns to the broker's limit only by error: the broker decides what is too large, per topic.
_MAX_REQUEST_BYTES = 16 * 1024 * 1024


class FencedError(Exception):
    """Another producer with this lane's id has started: the lane has a new owner, or had one."""


class OutcomeUnknownError(Exception):
    """The transaction may or may not have been committed; only reading after fencing tells."""


class LaneWriter:
    """One transactional producer, from its fencing to its first failure.

    Args:
        settings: Worker group, transaction time-out.
        lane: Partition number.
        options: Client options.
    """

    def __init__(self, settings: Settings, lane: int, options: ClientOptions) -> None:
        self._timeout = settings.worker.transaction_timeout_ms / 1000
        self._group_id = settings.worker_group_id
        self._groups = TopicPartition(settings.groups_topic, lane)
        self._producer = AIOKafkaProducer(
            **options,
            transactional_id=f"{self._group_id}-lane-{lane}",
            transaction_timeout_ms=settings.worker.transaction_timeout_ms,
            acks="all",
            linger_ms=0,
            # Back-to-back transactions are answered "not yet" while the markers of the former are written; 100 ms is long for that.
            retry_backoff_ms=20,
            max_request_size=_MAX_REQUEST_BYTES,
        )

    async def start(self) -> None:
        """Fence the former owner. Returns when the epoch is ours."""
        await self._producer.start()

    async def commit(self, records: Sequence[Outgoing], mark: int) -> dict[str, int]:
        """Write all records and the low-water offset in one transaction; returns the last offset written, by topic.

        Raises:
            FencedError: the lane has another owner.
            OutcomeUnknownError: anything else went wrong; read before you conclude.
        """
        try:
            # Not wait_for: until Python 3.12 it loses a cancellation that comes as the commit returns, and the lane would never end.
            async with deadline(self._timeout):
                return await self._commit(records, mark)
        except (ProducerFenced, InvalidProducerEpoch) as error:
            raise FencedError(str(error)) from error
        except (KafkaError, TimeoutError, AssertionError) as error:
            # aiokafka answers some states after a fence with AssertionError; a commit has no time limit of its own.
            raise OutcomeUnknownError(said(error)) from error

    async def _commit(self, records: Sequence[Outgoing], mark: int) -> dict[str, int]:
        await self._producer.begin_transaction()
        deliveries = [
            await self._producer.send(
                record.topic, value=record.value, key=record.key, partition=record.partition, headers=list(record.headers)
            )
            for record in records
        ]
        # Not gather alone: a commit after a failed send returns cleanly and loses that record (rule 2). A failure leaves here
        # without a commit; the broker aborts when the next producer fences this one.
        written = await asyncio.gather(*deliveries)
        # For lag tools only; correctness is the state in `models`.
        await self._producer.send_offsets_to_transaction({self._groups: mark}, self._group_id)
        await self._producer.commit_transaction()
        return {delivery.topic: delivery.offset for delivery in written}

    async def stop(self) -> None:
        """Close the connection; an open transaction is left to the fencing of the next owner."""
        try:
            async with deadline(_STOP_SECONDS):
                await self._producer.stop()
        except (TimeoutError, KafkaError, AssertionError) as error:
            logger.warning("lane producer did not stop cleanly: %r", error)
