"""The lane's commits: its transactional producer, and one transaction at a time.

Only the producer makes a worker the owner of a lane (the fence-then-read invariant). Guarantees: `LaneWriter.start` fences the former owner
and waits for the end of its last transaction. `LaneWriter.commit` awaits every send before the commit (the await-every-send invariant).
Without a clean return it raises: `FencedError` and `OutcomeUnknownError` both mean "claim the lane again and read what happened", never "it
did not happen" (the unknown-outcome invariant). Commits of one lane do not overlap.
Limitations: after any failure the producer and the lane's models in memory are void.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.errors import InvalidProducerEpoch, KafkaError, ProducerFenced

from headrace.consumers.worker.lane_models import LaneModels
from headrace.consumers.worker.outgoing import OutgoingRecord
from headrace.consumers.worker.transaction import StepToCommit, TakenSnapshot, build
from headrace.core.deadline import deadline
from headrace.core.kafka import ClientOptions
from headrace.core.outages import said
from headrace.core.settings import Settings
from headrace.schemas.topics import Topics

logger = logging.getLogger(__name__)

_STOP_SECONDS = 5.0
# aiokafka learns the broker's limit only by an error: the broker decides what is too large, per topic.
_MAX_REQUEST_BYTES = 16 * 1024 * 1024


class FencedError(Exception):
    """Another producer with this lane's id has started: the lane has a new owner, or had one."""


class OutcomeUnknownError(Exception):
    """The transaction may or may not have been committed; only reading after fencing shows which."""


class LaneWriter:
    """One transactional producer, from its fencing to its first failure."""

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
            # The broker answers "not yet" to a transaction that follows another while the markers of that one are written.
            retry_backoff_ms=20,
            max_request_size=_MAX_REQUEST_BYTES,
        )

    async def start(self) -> None:
        """Fence the former owner. Returns when this producer has the epoch."""
        await self._producer.start()

    async def commit(self, records: Sequence[OutgoingRecord], mark: int) -> dict[str, int]:
        """Write all records and the low-water offset in one transaction; returns the last offset written, by topic.

        Raises:
            FencedError: the lane has another owner.
            OutcomeUnknownError: anything else failed; read before you conclude.
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

    async def _commit(self, records: Sequence[OutgoingRecord], mark: int) -> dict[str, int]:
        await self._producer.begin_transaction()
        deliveries = [
            await self._producer.send(
                record.topic, value=record.value, key=record.key, partition=record.partition, headers=list(record.headers)
            )
            for record in records
        ]
        # A commit after a failed send returns cleanly and loses that record. So every send is awaited: a failure raises here, without a
        # commit, and the broker aborts the transaction when the next producer fences this one.
        written = await asyncio.gather(*deliveries)
        # For lag tools only: the state in `models` decides where an owner continues.
        await self._producer.send_offsets_to_transaction({self._groups: mark}, self._group_id)
        await self._producer.commit_transaction()
        return {delivery.topic: delivery.offset for delivery in written}

    async def stop(self) -> None:
        """Close the connection. The fencing of the next owner aborts an open transaction."""
        try:
            async with deadline(_STOP_SECONDS):
                await self._producer.stop()
        except (TimeoutError, KafkaError, AssertionError) as error:
            logger.warning("lane producer did not stop cleanly: %r", error)


class LaneCommitter:
    """Commits for one owner of a lane."""

    def __init__(self, models: LaneModels, writer: LaneWriter, topics: Topics, source: str) -> None:
        self._models = models
        self._writer = writer
        self._topics = topics
        self._source = source
        self._one_at_a_time = asyncio.Lock()
        self._void = False
        """A commit did not return cleanly: it may have succeeded, and memory does not know."""

    async def idle(self) -> None:
        """Wait until no commit runs: the outcome of a cancelled commit would be unknown."""
        async with self._one_at_a_time:
            pass

    async def commit(
        self,
        step: StepToCommit | None = None,
        *,
        ready: Callable[[], bool] | None = None,
        snapshots: Mapping[str, TakenSnapshot] | None = None,
        clean: bool = False,
    ) -> bool:
        """Commit every uncommitted change, and the step. Returns False if the step was not ready.

        Args:
            step: A step that has run.
            ready: Called directly before the transaction is built, with no await between: applies the step's consequences to the models,
                or returns False if the step is not wanted any more. Applied earlier, another commit could contain them without the step.
            snapshots: Of committed states, by model id.
            clean: The lane is released in order with this.

        Raises:
            FencedError, OutcomeUnknownError: memory is void.
        """
        async with self._one_at_a_time:
            if self._void:
                raise OutcomeUnknownError("an earlier commit did not return")
            self._void = True
            if ready is not None and not ready():
                self._void = False
                return False
            transaction = build(self._models, topics=self._topics, source=self._source, step=step, snapshots=snapshots, clean=clean)
            written = await self._writer.commit(transaction.records, transaction.lane.mark)
            transaction.apply(self._models)
            if step is not None:
                self._models.ledger_end = written[self._topics.steps] + 1
            self._void = False
            return True
