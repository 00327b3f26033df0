"""Follows the compacted `weights` topic for one engine: for its model, or for its deployment.

Guarantees: committed records only, from the beginning of the topic; it lives through broker outages. For a deployment all partitions are
followed, and `gateway`, which says whose the deployment is: nothing counts before that has been read, and a new owner counts at once.
What should be served is `WeightTarget`'s to say.

Which version should be served, from records of `weights`: the latest of one model, or of what names one deployment.

Guarantees: within an incarnation the target never goes back; a new incarnation starts again; a tombstone clears the target. A record that
can't be read is logged with its place and skipped. Limitations: order between models, which no log gives; their `published_at` decides.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any

from aiokafka import ConsumerRecord

from headrace.consumers.subscribers.deployment_owner import DeploymentOwner
from headrace.core.errors import HeadraceError
from headrace.core.kafka import ClientOptions
from headrace.core.kafka_outage import kafka_back, log_trouble
from headrace.core.kept import kept_or_none
from headrace.core.lanes import lane_of
from headrace.core.reading import follow, follow_all
from headrace.core.topic_admin import partition_count
from headrace.schemas.topics import Topics
from headrace.schemas.weights import WeightsPublished


class WeightTarget:
    """What the records so far come to.

    Args:
        model_id: Only this model; None: any.
        deployment: Only what names this deployment; None: all.
        owner: Whose the deployment is; None: it is not asked.
    """

    def __init__(self, *, model_id: str | None = None, deployment: str | None = None, owner: DeploymentOwner | None = None) -> None:
        self._model_id = model_id
        self._deployment = deployment
        self._owner = owner
        self._named: dict[str, WeightsPublished] = {}
        """The latest of each model that concerns it, the process that the owner is."""
        self._latest: WeightsPublished | None = None
        self.target: WeightsPublished | None = None
        """What should be served; None: nothing was published, or the model was deleted."""
        self.deleted = False
        """The model's last record is a tombstone."""
        self.changed = asyncio.Event()
        """Set at every change of `target` or `deleted`; the process that acts on it clears it."""

    def follow_model(self, model_id: str) -> None:
        """Count only this model, where its id is known later than this object."""
        self._model_id = model_id

    def aim(self, published: WeightsPublished | None) -> None:
        """Set the target, where someone else has followed the topic."""
        if published is not self.target:
            self.target = published
            self.changed.set()

    def observe(self, batch: Sequence[ConsumerRecord]) -> None:
        """Take a batch in; the target changes once, to the last version in it."""
        before = (self.target, self.deleted)
        for record in batch:
            if record.value is None:
                self._forget(record)
                continue
            published = kept_or_none(record, (WeightsPublished,))
            if isinstance(published, WeightsPublished) and self._concerns(published):
                self._named[published.model_id] = published
                self._consider(published)
        self._tell_since(before)

    def reconsider(self) -> None:
        """The deployment's owner is another one now."""
        before = (self.target, self.deleted)
        self._latest = self.target = None
        for published in sorted(self._named.values(), key=lambda published: published.published_at):
            self._consider(published)
        self._tell_since(before)

    def _consider(self, published: WeightsPublished) -> None:
        if (self._owner is None or self._owner.allows(published.account)) and self._is_newer(published):
            self._latest = self.target = published
            self.deleted = False

    def _tell_since(self, before: tuple[WeightsPublished | None, bool]) -> None:
        if (self.target, self.deleted) != before:
            self.changed.set()

    def _concerns(self, published: WeightsPublished) -> bool:
        if self._model_id is not None and published.model_id != self._model_id:
            return False
        return self._deployment is None or self._deployment in published.rollout_deployments

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
        if record.key is not None:
            self._named.pop(record.key.decode(errors="replace"), None)
        followed = self._model_id
        if followed is None and self._latest is not None:
            followed = self._latest.model_id
        if followed is not None and record.key == followed.encode():
            self.target = None
            self.deleted = True


logger = logging.getLogger(__name__)

_LONGEST_PAUSE = 30.0

Batch = list[ConsumerRecord]


class WeightFeed(WeightTarget):
    """Follows the topic; `target` is what should be served.

    Args:
        options: Client options.
        topics: Full names.
        model_id: Follow this model.
        deployment: Follow whatever names this deployment, and is of its account. Exactly one of the two.
        shadows: The topic is a shadow group's, where a model is not on the lane of its own id: all partitions are followed.
    """

    def __init__(
        self, options: ClientOptions, topics: Topics, *, model_id: str | None, deployment: str | None, shadows: bool = False
    ) -> None:
        if (model_id is None) == (deployment is None):
            raise ValueError("give either model_id or deployment")
        owner = None if deployment is None else DeploymentOwner(deployment)
        super().__init__(model_id=model_id, deployment=deployment, owner=owner)
        self._options = options
        self._topics = topics
        self._shadows = shadows

    async def partitions(self) -> list[int]:
        """Partitions of `weights` to follow.

        Raises:
            KafkaUnavailableError: Kafka can't be reached, or has no such topic.
        """
        count = await partition_count(self._options, self._topics.weights)
        return list(range(count)) if self._model_id is None or self._shadows else [lane_of(self._model_id, count)]

    async def runs(self) -> list[Coroutine[Any, Any, None]]:
        """What follows, each until it is cancelled.

        Raises:
            KafkaUnavailableError: Kafka can't be reached, or lacks a topic.
        """
        partitions = await self.partitions()
        if self._owner is None:
            return [self._run(lambda p=p: follow(self._options, self._topics.weights, p), self.observe) for p in partitions]  # type: ignore[misc]
        await partition_count(self._options, self._topics.gateway)
        caught_up = asyncio.Event()
        topics = (self._topics.weights, self._topics.gateway)
        return [self._run(lambda: follow_all(self._options, topics, caught_up), self._take), self._begin(caught_up)]

    def _take(self, batch: Batch) -> None:
        assert self._owner is not None  # noqa: S101 - narrows the type
        if batch[0].topic == self._topics.weights:
            self.observe(batch)
        elif self._owner.observe(batch):
            self.reconsider()
            if self.target is None:
                logger.warning(
                    "deployment %s is account %s's now, which has published nothing for it", self._deployment, self._owner.account
                )

    async def _begin(self, caught_up: asyncio.Event) -> None:
        assert self._owner is not None  # noqa: S101 - narrows the type
        await caught_up.wait()
        self._owner.is_known = True
        self.reconsider()

    async def _run(self, begin: Callable[[], AsyncGenerator[Batch]], take: Callable[[Batch], None]) -> None:
        pause = 1.0
        while True:
            try:
                async with aclosing(begin()) as batches:
                    async for batch in batches:
                        pause = 1.0
                        take(batch)
            except HeadraceError as error:
                log_trouble(logger, logging.WARNING, error, "following %s: %s; again in %g s", self._topics.weights, error, pause)
                await asyncio.sleep(pause)  # a pause between attempts, no synchronisation
                await kafka_back()
                pause = min(2 * pause, _LONGEST_PAUSE)
