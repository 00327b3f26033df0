"""The turn at the device: one world of ranks, and models that take turns on it in the order in which they ask.

Guarantees: one step at a time; a rank that dies or hangs fails that step, not the worker, and the next step gets a new world; what the
ranks hold is used only if it is the very state that was committed (exactly-once rule 5). Nothing that blocks runs on the event loop.
Under a launcher (torchrun, deepspeed) the other ranks are its to start: a world that broke is reported through `lost`, and the worker
ends, so that the launcher starts all of them anew. Gives up: more than one base model at a time on a device.
"""

import asyncio
import logging
import shutil
import time
from dataclasses import replace
from pathlib import Path

from headrace.core.errors import HeadraceError
from headrace.core.settings import Settings
from headrace.core.store import ObjectStore, fetch_folder
from headrace.schemas.weights import WeightsRef
from headrace.trainer.plan import BaseSource, StateKey, StepPlan, StepResult
from headrace.trainer.rank import RankWorld
from headrace.trainer.rank_main import seat_of_launcher
from headrace.trainer.world import WorldSettings

logger = logging.getLogger(__name__)


class WorldLostError(HeadraceError):
    """Ranks that a launcher started are gone; it restarts all, this worker included."""

    def __init__(self) -> None:
        super().__init__("a rank ended or hung in a world that a launcher started: all its ranks must be started anew")


class TrainerWorld:
    """The ranks of this worker.

    Args:
        settings: Threads, working folder.
        store: Where snapshots are.
    """

    def __init__(self, settings: Settings, store: ObjectStore) -> None:
        self._settings = settings
        self._store = store
        self._turn = asyncio.Lock()  # fair: first come, first served
        launcher = seat_of_launcher()
        self._launched = launcher is not None
        self._shape = world_settings(settings, None if launcher is None else launcher[0])
        self.lost = asyncio.Event()
        """A world that a launcher started is broken: this process must end."""
        self._ranks = self._new_world()
        self._resident: StateKey | None = None

    def _new_world(self) -> RankWorld:
        ranks = RankWorld(self._shape, launched=self._launched)
        ranks.start()
        return ranks

    def preload(self, base: BaseSource) -> None:
        """Let the ranks load a base model before the first step asks for it."""
        self._ranks.preload(base)

    async def run(self, plan: StepPlan, snapshot: WeightsRef | None) -> StepResult:
        """Run a step when its turn comes.

        Args:
            plan: Without `load_from`.
            snapshot: The committed snapshot of `plan.state`; None at step 0.

        Raises:
            StepFailedError: the step raised.
            RankDiedError: a rank ended or hung; the next step gets a new world.
            WorldLostError: under a launcher, an earlier step broke the world, or a rank ended between steps.
            HeadraceError: the snapshot can't be fetched.
        """
        asked = time.monotonic()
        async with self._turn:
            logger.debug("step %d of %s waited %.3f s for its turn", plan.state.step + 1, plan.state.model_id, time.monotonic() - asked)
            load_from = await self._load_from(plan, snapshot)
            if not self._ranks.alive:
                if self._launched:  # nobody's step is to blame
                    self.lost.set()
                    raise WorldLostError
                await self._replace()
            self._resident = None
            running = asyncio.ensure_future(asyncio.to_thread(self._ranks.run, _with_load(plan, load_from)))
            try:
                result = await asyncio.shield(running)
            except asyncio.CancelledError:
                # The lane is lost: nobody will commit this step. The thread only ends when its ranks do.
                logger.info("step %d of %s is cancelled", plan.state.step + 1, plan.state.model_id)
                self._ranks.kill()
                await asyncio.gather(running, return_exceptions=True)
                raise
            finally:
                if self._launched and not self._ranks.alive:
                    self.lost.set()
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

    async def _replace(self) -> None:
        await asyncio.to_thread(self._ranks.close)
        self._ranks = self._new_world()

    async def close(self) -> None:
        """End the ranks."""
        if not self._launched:  # there, rank 0 must say goodbye to those that it did not start
            self._ranks.kill()
        await asyncio.to_thread(self._ranks.close)


def world_settings(settings: Settings, launched_size: int | None = None) -> WorldSettings:
    """The world that the settings ask for; under a launcher of the launcher's size."""
    worker = settings.worker
    return WorldSettings(
        size=launched_size or worker.ranks,
        threads=worker.threads,
        zero_stage=worker.zero_stage,
        offload_optimizer=worker.offload_optimizer,
        activation_checkpointing=worker.activation_checkpointing,
        tokens_per_pass=worker.tokens_per_pass,
        silence_seconds=worker.rank_silence_seconds,
        collective_seconds=worker.collective_timeout_seconds,
    )


def _with_load(plan: StepPlan, folder: Path | None) -> StepPlan:
    return replace(plan, load_from=None if folder is None else str(folder))
