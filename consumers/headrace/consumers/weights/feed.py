"""Follows the compacted `weights` topic for one engine: for its model, or for its deployment.

Guarantees: committed records only, from the beginning of the topic; it lives through broker outages. For a deployment all partitions are
followed. What should be served is `WeightTarget`'s to say.
"""

import asyncio
import logging
from contextlib import aclosing

from headrace.consumers.weights.target import WeightTarget
from headrace.core.errors import HeadraceError
from headrace.core.kafka import ClientOptions
from headrace.core.kafka_outage import kafka_back, log_trouble
from headrace.core.lanes import lane_of
from headrace.core.reading import follow
from headrace.core.topic_metadata import partition_count

logger = logging.getLogger(__name__)

_LONGEST_PAUSE = 30.0


class WeightFeed(WeightTarget):
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
        super().__init__(model_id=model_id, deployment=deployment)
        self._options = options
        self._topic = topic
        self._shadows = shadows

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
                log_trouble(
                    logger, logging.WARNING, error, "following %s partition %d: %s; again in %g s", self._topic, partition, error, pause
                )
                await asyncio.sleep(pause)  # a pause between attempts, no synchronisation
                await kafka_back()
                pause = min(2 * pause, _LONGEST_PAUSE)
