"""Which snapshots stay: the one that a model's committed state names, and some before it that a replay may start from.

Guarantees: called after a commit, it deletes only what is older than the snapshot that this commit named, so neither recovery nor a later
owner can need it, however long the caller was frozen in between (exactly-once rule 14); what counts is what is stored, so that a restart
forgets nothing. Weights are never deleted here, engines may ask for any version. Gives up: what attempts that never committed left
above the committed step, which is `orphans`' to find.
"""

import asyncio
import logging

from headrace.consumers.worker.storage.step_folders import StepFolder, delete_folder, list_folders
from headrace.core.errors import HeadraceError
from headrace.core.store import ObjectStore
from headrace.schemas.state import ModelState

logger = logging.getLogger(__name__)


class SnapshotKeeper:
    """Deletes snapshots that the policy does not keep.

    Args:
        store: Where they are.
        keep: `worker.keep_snapshots`: steps whose snapshot stays, the committed one included.
    """

    def __init__(self, store: ObjectStore, keep: int) -> None:
        self._store = store
        self._keep = keep

    async def committed(self, state: ModelState) -> None:
        """A state with a new snapshot is committed. A deletion that fails is only logged: the next one finds what is left."""
        try:
            await asyncio.to_thread(self._delete_old, state)
        except HeadraceError as error:
            logger.warning("old snapshots of %s stay for now: %s", state.name, error)

    def _delete_old(self, state: ModelState) -> None:
        if state.snapshot is None:
            return
        current = self._store.resolve(state.snapshot.uri)
        by_step: dict[int, list[StepFolder]] = {}
        named = None
        for folder in list_folders(self._store, state.model_id, state.incarnation, "snapshot"):
            by_step.setdefault(folder.step, []).append(folder)
            named = folder.step if folder.key == current else named
        if named is None:  # not where this worker stores snapshots: nothing says which are older
            return
        steps = sorted((step for step in by_step if step <= named), reverse=True)
        for step in steps[self._keep :]:
            for folder in by_step[step]:
                delete_folder(self._store, folder)
                logger.info("snapshot %s is deleted", folder.key)
