"""Ids of attempts at steps: UUIDs that say whose they are.

Names in the object store carry them, and several clusters, prefixes or worker groups may share a store, where one model's name, and with it
its id, may stand for several models. So the first eight hex digits of an attempt's UUID are its origin: a hash of Kafka cluster, topic
prefix and worker group. Guarantees: an owner can tell the attempts that only its own ledger can know from all others; the other 90 bits are
random. Gives up: origins that collide (odds of 2^-32 a pair); recognising attempts of a cluster that was rebuilt.
"""

import hashlib
import uuid

from headrace.core.kafka import client_options
from headrace.core.settings import Settings
from headrace.core.topic_metadata import cluster_id


class Attempts:
    """Makes and recognises attempts of one worker group.

    Args:
        settings: Of a worker.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._origin: str | None = None
        self.latest: dict[str, str] = {}
        """By model id: what runs, or is being stored or committed, is among these."""

    async def origin(self) -> str:
        """Eight hex digits; the cluster is asked for its id once.

        Raises:
            KafkaUnavailableError: no broker.
        """
        if self._origin is None:
            cluster = await cluster_id(client_options(self._settings.kafka, "headrace-attempts"))
            self._origin = hashlib.sha256(f"{cluster}/{self._settings.worker_group_id}".encode()).hexdigest()[:8]
        return self._origin

    async def new(self, model_id: str) -> str:
        """A fresh attempt at a step of a model, or at storing a state of it. Raises as `origin`."""
        attempt = f"{await self.origin()}{str(uuid.uuid4())[8:]}"
        self.latest[model_id] = attempt
        return attempt
