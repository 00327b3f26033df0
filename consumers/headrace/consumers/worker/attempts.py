"""Ids of attempts at steps: UUIDs that identify the worker group that made them.

Names in the object store contain them. Several clusters, prefixes or worker groups may share a store, and one model name, and so one id,
may exist in several of them. So the first eight hex digits of an attempt's UUID are its origin: a hash of Kafka cluster, topic prefix and
worker group. Guarantees: an owner can tell the attempts of its own ledger from all others; the other 90 bits are random (the attempt-names
invariant). Limitations: origins may collide (odds of 2^-32 a pair); attempts of a cluster that was rebuilt are not recognised.
"""

import hashlib
import uuid
from collections import deque

from headrace.core.kafka import client_options
from headrace.core.settings import Settings
from headrace.core.topic_admin import cluster_id

_RECENT = 4
"""Attempts of a model at a time are at most one that is stored, one that is prepared, and one for a snapshot."""


class Attempts:
    """Makes and recognises attempts of one worker group."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._origin: str | None = None
        self._recent: dict[str, deque[str]] = {}

    @property
    def recent(self) -> frozenset[str]:
        """The attempts that run, or are being stored or committed, are among these."""
        return frozenset(attempt for attempts in self._recent.values() for attempt in attempts)

    async def origin(self) -> str:
        """Eight hex digits; the cluster id is read once.

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
