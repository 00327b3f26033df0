"""Decides which version an engine should serve, from the compacted topic `weights`: for one model, or for one deployment.

Guarantees: only committed records count, from the beginning of the topic, through broker outages. Within an incarnation the target never
goes back; a new incarnation starts again; a tombstone clears the target. A record that cannot be read is logged with its place and skipped.
A deployment is one account's, as the topic `gateway` says: only versions of that account's models count, none before that topic has been
read, and a new owner counts at once.
Limitations: the log has no order between models, so their `published_at` decides. A deployment that no account has is open to every model
that names it, and so are versions of releases that did not say whose they are.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from datetime import datetime
from typing import Any

from aiokafka import ConsumerRecord

from headrace.core.errors import HeadraceError
from headrace.core.kafka import ClientOptions
from headrace.core.kafka_outage import kafka_back, log_trouble
from headrace.core.kept import kept_or_none
from headrace.core.lanes import lane_of
from headrace.core.reading import follow, follow_all
from headrace.core.topic_admin import partition_count
from headrace.schemas.deployments import DeploymentFact, deployment_key
from headrace.schemas.gateway import FACTS
from headrace.schemas.topics import Topics
from headrace.schemas.weights import WeightsPublished

logger = logging.getLogger(__name__)

_LONGEST_PAUSE = 30.0
_DEPLOYMENTS = deployment_key("", "")[:-1].encode()
"""The keys of all deployments begin with it."""

Batch = Sequence[ConsumerRecord]


class DeploymentOwner:
    """The account of a deployment, from records of the topic `gateway`: engines know a deployment by its id alone."""

    def __init__(self, deployment: str) -> None:
        self._deployment = deployment
        self._since: dict[str, datetime] = {}
        """When each account made it; more than one only where two made it in one moment."""
        self.is_known = False
        """The records that existed at the start have been read: before that no account is allowed."""

    @property
    def account(self) -> str | None:
        """None: no account has it."""
        return min(self._since, key=lambda account: (self._since[account], account), default=None)

    def observe(self, batch: Batch) -> bool:
        """Read records of `gateway`; whether the owner changed."""
        before = self.account
        for record in batch:
            if record.key is None or not record.key.startswith(_DEPLOYMENTS):
                continue
            for account in [account for account in self._since if deployment_key(account, self._deployment).encode() == record.key]:
                del self._since[account]
            deployment = None if record.value is None else kept_or_none(record, FACTS)
            if isinstance(deployment, DeploymentFact) and deployment.id == self._deployment:
                self._since[deployment.account] = deployment.created_at
        return self.account != before

    def allows(self, account: str | None) -> bool:
        """Whether versions and requests of this account count for the deployment."""
        return self.is_known and (account is None or self.account in {None, account})


class WeightTarget:
    """The version to serve, as the records until now say.

    Args:
        model_id: Only this model; None: any.
        deployment: Only versions that name this deployment; None: all.
        owner: Of the deployment; None: its account does not matter.
    """

    def __init__(self, *, model_id: str | None = None, deployment: str | None = None, owner: DeploymentOwner | None = None) -> None:
        self._model_id = model_id
        self._deployment = deployment
        self._owner = owner
        self._named: dict[str, WeightsPublished] = {}
        """The latest of each model that concerns this target, whatever its account."""
        self._latest: WeightsPublished | None = None
        self.target: WeightsPublished | None = None
        """None: nothing was published, or the model was deleted."""
        self.deleted = False
        """The model's last record is a tombstone."""
        self.changed = asyncio.Event()
        """Set at every change of `target` or `deleted`; its reader clears it."""

    def follow_model(self, model_id: str) -> None:
        """Count only this model, where its id is known later than this object."""
        self._model_id = model_id

    def aim(self, published: WeightsPublished | None) -> None:
        """Set the target, where another object follows the topic."""
        if published is not self.target:
            self.target = published
            self.changed.set()

    def observe(self, batch: Batch) -> None:
        """Read records of `weights`; the target changes once, to the last version in the batch."""
        before = (self.target, self.deleted)
        for record in batch:
            published = None if record.value is None else kept_or_none(record, (WeightsPublished,))
            if record.value is None:
                self._forget(record)
            elif isinstance(published, WeightsPublished) and self._concerns(published):
                self._named[published.model_id] = published
                self._consider(published)
        self._tell_since(before)

    def reconsider(self) -> None:
        """Choose again: the deployment has another owner now."""
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
        is_followed = self._model_id in {None, published.model_id}
        return is_followed and (self._deployment is None or self._deployment in published.rollout_deployments)

    def _is_newer(self, published: WeightsPublished) -> bool:
        latest = self._latest
        if latest is None:
            return True
        if published.model_id != latest.model_id:
            return published.published_at > latest.published_at
        if published.incarnation != latest.incarnation:
            return True  # one model's records are in one partition: the later record has the later incarnation
        if published.policy_version == latest.policy_version and published.digest != latest.digest:
            logger.error("version %d of %s was published twice with different content", published.policy_version, published.model_id)
        return published.policy_version > latest.policy_version

    def _forget(self, record: ConsumerRecord) -> None:
        key = (record.key or b"").decode(errors="replace")
        self._named.pop(key, None)
        followed = self._model_id or (None if self._latest is None else self._latest.model_id)
        if followed is not None and key == followed:
            self.target = None
            self.deleted = True


class WeightFeed(WeightTarget):
    """A target that follows the topics itself.

    Args:
        options: Client options.
        topics: Full names.
        model_id: Follow this model.
        deployment: Follow the models that name this deployment and are of its account. Exactly one of the two.
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
        """The followers, each until it is cancelled.

        Raises:
            KafkaUnavailableError: Kafka can't be reached, or lacks a topic.
        """
        partitions = await self.partitions()
        if (owner := self._owner) is None:
            return [self._run(lambda p=p: follow(self._options, self._topics.weights, p), self.observe) for p in partitions]  # type: ignore[misc]
        await partition_count(self._options, self._topics.gateway)
        caught_up = asyncio.Event()
        topics = (self._topics.weights, self._topics.gateway)

        def take(batch: Batch) -> None:
            if batch[0].topic == self._topics.weights:
                self.observe(batch)
            elif owner.observe(batch):
                self.reconsider()
                if self.target is None:
                    said = "deployment %s is account %s's now, which has published nothing for it"
                    logger.warning(said, self._deployment, owner.account)

        async def begin() -> None:
            await caught_up.wait()
            owner.is_known = True
            self.reconsider()

        return [self._run(lambda: follow_all(self._options, topics, caught_up), take), begin()]

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
