"""Follows the compacted `weights` topic for one engine: for its model, or for its deployment.

Guarantees: committed records only, from the beginning of the topic; it lives through broker outages. For a deployment all partitions are
followed, and `gateway`, which says whose the deployment is: nothing counts before that has been read, and a new owner counts at once.
What should be served is `WeightTarget`'s to say.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

from aiokafka import ConsumerRecord

from headrace.consumers.subscribers.deployment_owner import DeploymentOwner
from headrace.consumers.subscribers.weight_target import WeightTarget
from headrace.core.errors import HeadraceError
from headrace.core.kafka import ClientOptions
from headrace.core.kafka_outage import kafka_back, log_trouble
from headrace.core.lanes import lane_of
from headrace.core.reading import follow, follow_all
from headrace.core.topic_metadata import partition_count
from headrace.schemas.topics import Topics

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
