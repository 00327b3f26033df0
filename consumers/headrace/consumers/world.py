"""The turn at the device: one rank process, and models that take turns on it in the order in which they ask.

Guarantees: one step at a time; a rank that dies fails that step, not the worker, and the next step gets a new one; what the rank
holds is used only if it is the very state that was committed (exactly-once rule 5). Nothing that blocks runs on the event loop.
Gives up: more than one base model at a time on a device.
"""

import asyncio
import logging
import shutil
import time
from dataclasses import replace
from pathlib import Path

from headrace.core.settings import Settings
from headrace.core.store import ObjectStore, fetch_folder
from headrace.schemas.weights import WeightsRef
from headrace.trainer.plan import BaseSource, StateKey, StepPlan, StepResult
from headrace.trainer.rank import RankProcess

logger = logging.getLogger(__name__)


class TrainerWorld:
    """The rank process of this worker.

    Args:
        settings: Threads, working folder.
        store: Where snapshots are.
    """

    def __init__(self, settings: Settings, store: ObjectStore) -> None:
        self._settings = settings
        self._store = store
        self._turn = asyncio.Lock()  # fair: first come, first served
        self._rank = self._new_rank()
        self._resident: StateKey | None = None

    def _new_rank(self) -> RankProcess:
        rank = RankProcess(threads=self._settings.worker.threads)
        rank.start()
        return rank

    def preload(self, base: BaseSource) -> None:
        """Let the rank load a base model before the first step asks for it."""
        self._rank.preload(base)

    async def run(self, plan: StepPlan, snapshot: WeightsRef | None) -> StepResult:
        """Run a step when its turn comes.

        Args:
            plan: Without `load_from`.
            snapshot: The committed snapshot of `plan.state`; None at step 0.

        Raises:
            StepFailedError: the step raised; the rank lives on.
            RankDiedError: the rank ended; the next step gets a new one.
            HeadraceError: the snapshot can't be fetched.
        """
        asked = time.monotonic()
        async with self._turn:
            logger.debug("step %d of %s waited %.3f s for its turn", plan.state.step + 1, plan.state.model_id, time.monotonic() - asked)
            load_from = await self._load_from(plan, snapshot)
            if not self._rank.alive:
                await self._replace_rank()
            self._resident = None
            running = asyncio.ensure_future(asyncio.to_thread(self._rank.run, _with_load(plan, load_from)))
            try:
                result = await asyncio.shield(running)
            except asyncio.CancelledError:
                # The lane is lost: nobody will commit this step. The thread only ends when its rank does.
                logger.info("step %d of %s is cancelled", plan.state.step + 1, plan.state.model_id)
                self._rank.kill()
                await asyncio.gather(running, return_exceptions=True)
                raise
            finally:
                if load_from is not None:
                    await asyncio.to_thread(shutil.rmtree, load_from, ignore_errors=True)
            self._resident = result.key
            return result

    async def _load_from(self, plan: StepPlan, snapshot: WeightsRef | None) -> Path | None:
        if plan.state.step == 0 or plan.state == self._resident:
            return None
        if snapshot is None:
            raise RuntimeError(f"step {plan.state.step} of {plan.state.model_id} has no snapshot to start from")
        folder = Path(plan.out_dir).with_suffix(".load")
        await asyncio.to_thread(fetch_folder, self._store, snapshot.uri, snapshot.digest, folder)
        return folder

    async def _replace_rank(self) -> None:
        await asyncio.to_thread(self._rank.close)
        self._rank = self._new_rank()

    async def close(self) -> None:
        """End the rank process."""
        self._rank.kill()
        await asyncio.to_thread(self._rank.close)


def _with_load(plan: StepPlan, folder: Path | None) -> StepPlan:
    return replace(plan, load_from=None if folder is None else str(folder))
