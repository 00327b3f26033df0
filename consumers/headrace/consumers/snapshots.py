"""Which snapshots stay: the last two of each model. Weights are never deleted here, engines may ask for any version.

Guarantees: only names that this owner saw committed are deleted, after a newer one was committed (exactly-once rule 14). Gives
up: what attempts that never committed left behind.
"""

import asyncio
import logging
from collections import defaultdict, deque

from headrace.core.errors import HeadraceError
from headrace.core.store import ObjectStore
from headrace.schemas.weights import WeightsRef

logger = logging.getLogger(__name__)

KEEP = 2


class SnapshotKeeper:
    """Deletes snapshots that nothing refers to any more.

    Args:
        store: Where they are.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._kept: defaultdict[str, deque[WeightsRef]] = defaultdict(deque)

    async def committed(self, model_id: str, snapshot: WeightsRef) -> None:
        """A step with this snapshot is committed. A deletion that fails is only logged: it costs space, not correctness."""
        kept = self._kept[model_id]
        kept.append(snapshot)
        while len(kept) > KEEP:
            old = kept.popleft()
            try:
                await asyncio.to_thread(self._delete, old)
            except HeadraceError as error:
                logger.warning("snapshot %s stays: %s", old.uri, error)

    def _delete(self, snapshot: WeightsRef) -> None:
        for stored in list(self._store.list(self._store.resolve(snapshot.uri) + "/")):
            self._store.delete(stored.key)
