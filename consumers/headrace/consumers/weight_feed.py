"""What an engine should serve, from the compacted `weights` topic: the latest version of its model, or of its deployment.

Guarantees: committed records only, from the beginning of the topic; within an incarnation the target never goes back; a new incarnation
starts anew; a tombstone clears the target. A record that can't be read is logged with its place and skipped. It lives through broker
outages. For a deployment all partitions are followed, and among several models that name it the one published last wins.
Gives up: order between models, which no log gives; their `published_at` decides.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing

from aiokafka import ConsumerRecord

from headrace.core.errors import HeadraceError
from headrace.core.kafka import ClientOptions
from headrace.core.lanes import lane_of
from headrace.core.reading import follow
from headrace.core.topic_metadata import partition_count
from headrace.schemas.envelope import header_text, open_record
from headrace.schemas.errors import CodecError
from headrace.schemas.weights import WeightsPublished

logger = logging.getLogger(__name__)

_LONGEST_PAUSE = 30.0


class WeightFeed:
    """Follows the topic; `target` is what should be served.

    Args:
        options: Client options.
        topic: Full name of the `weights` topic.
        model_id: Follow this model.
        deployment: Follow whatever names this deployment. Exactly one of the two.
        shadows: The topic is a shadow group's, where a model is not on the lane of its own id: all partitions are followed.
    """

    def __init__(self, options: ClientOptions, topic: str, *, model_id: str | None, deployment: str | None, shadows: bool = False) -> None:
        if (model_id is None) == (deployment is None):
            raise ValueError("give either model_id or deployment")
        self._options = options
        self._topic = topic
        self._model_id = model_id
        self._deployment = deployment
        self._shadows = shadows
        self._latest: WeightsPublished | None = None
        self.target: WeightsPublished | None = None
        self.deleted = False
        """The model's last record is a tombstone."""
        self.changed = asyncio.Event()
        """Set at every change of `target` or `deleted`; whoever acts on it clears it."""

    async def partitions(self) -> list[int]:
        """Partitions to follow.

        Raises:
            KafkaUnavailableError: Kafka can't be reached, or has no such topic.
        """
        count = await partition_count(self._options, self._topic)
        return list(range(count)) if self._model_id is None or self._shadows else [lane_of(self._model_id, count)]

    async def run(self, partition: int) -> None:
        """Follow one partition until cancelled."""
        pause = 1.0
        while True:
            try:
                async with aclosing(follow(self._options, self._topic, partition)) as batches:
                    async for batch in batches:
                        pause = 1.0
                        self.observe(batch)
            except HeadraceError as error:
                logger.warning("following %s partition %d: %s; again in %g s", self._topic, partition, error, pause)
                await asyncio.sleep(pause)  # a pause between attempts, no synchronisation
                pause = min(2 * pause, _LONGEST_PAUSE)

    def observe(self, batch: Sequence[ConsumerRecord]) -> None:
        """Take a batch in; the target changes once, to the last version in it."""
        before = (self.target, self.deleted)
        for record in batch:
            if record.value is None:
                self._forget(record)
                continue
            try:
                published = open_record(record.value, header_text(record.headers), (WeightsPublished,))
            except CodecError as error:
                where = f"{record.topic} partition {record.partition} offset {record.offset}"
                logger.warning("skipped %s: %s: %s", where, error.reason, error)
                continue
            if isinstance(published, WeightsPublished) and self._concerns(published) and self._is_newer(published):
                self._latest = self.target = published
                self.deleted = False
        if (self.target, self.deleted) != before:
            self.changed.set()

    def _concerns(self, published: WeightsPublished) -> bool:
        if self._model_id is not None:
            return published.model_id == self._model_id
        return self._deployment in published.rollout_deployments

    def _is_newer(self, published: WeightsPublished) -> bool:
        latest = self._latest
        if latest is None:
            return True
        if published.model_id != latest.model_id:
            return published.published_at > latest.published_at
        if published.incarnation != latest.incarnation:
            return True  # one model's records stand in one partition: what comes later is the later incarnation
        if published.policy_version == latest.policy_version and published.digest != latest.digest:
            logger.error("version %d of %s was published twice with different content", published.policy_version, published.model_id)
        return published.policy_version > latest.policy_version

    def _forget(self, record: ConsumerRecord) -> None:
        followed = self._model_id
        if followed is None and self._latest is not None:
            followed = self._latest.model_id
        if followed is not None and record.key == followed.encode():
            self.target = None
            self.deleted = True
