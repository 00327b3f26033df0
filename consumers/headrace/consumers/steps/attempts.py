"""Ids of attempts at steps: UUIDs that say whose they are.

Names in the object store carry them, and several clusters, prefixes or worker groups may share a store, where one model's name, and with it
its id, may stand for several models. So the first eight hex digits of an attempt's UUID are its origin: a hash of Kafka cluster, topic
prefix and worker group. Guarantees: an owner can tell the attempts that only its own ledger can know from all others; the other 90 bits are
random. Gives up: origins that collide (odds of 2^-32 a pair); recognising attempts of a cluster that was rebuilt.
"""

import hashlib
import uuid
from collections import deque

from headrace.core.kafka import client_options
from headrace.core.settings import Settings
from headrace.core.topic_metadata import cluster_id

_RECENT = 4
"""Of a model: one that is stored, one begun ahead, and one for a snapshot are the most at a time."""


class Attempts:
    """Makes and recognises attempts of one worker group.

    Args:
        settings: Of a worker.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._origin: str | None = None
        self._recent: dict[str, deque[str]] = {}

    @property
    def recent(self) -> frozenset[str]:
        """What runs, or is being stored or committed, is among these."""
        return frozenset(attempt for attempts in self._recent.values() for attempt in attempts)

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
        self._recent.setdefault(model_id, deque(maxlen=_RECENT)).append(attempt)
        return attempt
