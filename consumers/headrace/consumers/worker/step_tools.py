"""What the steps of a lane use: plans, recovery, the pipeline, attempts; and the snapshots that no step stores."""

import asyncio
import logging
import shutil
import time
from collections import Counter
from dataclasses import dataclass, field

from headrace.consumers.worker.admission.pool import AdmissionPool
from headrace.consumers.worker.attempts import Attempts
from headrace.consumers.worker.kl_references import KlReferences
from headrace.consumers.worker.lane_model import LaneModel
from headrace.consumers.worker.pipeline import Pipeline
from headrace.consumers.worker.plans import StepPlans, state_key
from headrace.consumers.worker.recovery import Recovery
from headrace.consumers.worker.storage.step_files import store_snapshot
from headrace.consumers.worker.storage.stored_snapshots import SnapshotKeeper
from headrace.consumers.worker.transaction import TakenSnapshot
from headrace.consumers.worker.world import StateNotHeldError, TrainerWorld
from headrace.core.settings import Settings
from headrace.core.store import ObjectStore
from headrace.trainer.plan import StateKey

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Timer:
    """Seconds of the worker's own phases."""

    began: float = field(default_factory=time.perf_counter)
    laps: dict[str, float] = field(default_factory=dict)

    def lap(self, phase: str) -> None:
        """A phase ends."""
        now = time.perf_counter()
        self.laps[phase] = now - self.began
        self.began = now


class StepTools:
    """What the steps of a lane use, as long as this worker has the lane."""

    def __init__(
        self, settings: Settings, store: ObjectStore, world: TrainerWorld, lane: int, *, pool: AdmissionPool, references: KlReferences
    ) -> None:
        self.settings = settings
        self.store = store
        self.world = world
        self.references = references
        self.plans = StepPlans(settings, store, pool, references)
        self.recovery = Recovery(settings, store, lane, world=world, pool=pool, references=references)
        self.attempts = Attempts(settings)
        self.pipeline = Pipeline(world)
        self.keeper = SnapshotKeeper(store, settings.worker.keep_snapshots)
        self.failures: Counter[StateKey] = Counter()
        """Failed attempts at the step from a state."""

    async def save(self, model: LaneModel) -> TakenSnapshot | None:
        """Store a snapshot of the committed state, if this worker holds the state and no snapshot of it is stored.

        Raises:
            HeadraceError: the ranks or the store could not.
        """
        key = state_key(model.state)
        if model.state.snapshot_step == key.step or not self.world.holds(key):
            return None
        folder = self.settings.worker.work_dir.absolute() / f"release-{key.model_id}-{key.step}"
        try:
            await self.world.save(key, folder)
            duplicates, window_ids = model.window.to_bytes(), model.window.since
            ref = await store_snapshot(self.store, folder, key, duplicates, await self.attempts.new(key.model_id))
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        return TakenSnapshot(ref=ref, window_ids=window_ids)

    async def recover_and_save(self, model: LaneModel) -> TakenSnapshot | None:
        """As `save`; a state that this worker does not hold is recovered first.

        Raises:
            ModelDivergedError: it can't be recovered.
            HeadraceError: the ranks or the store could not.
        """
        while model.state.snapshot_step != model.state.policy_version:
            try:
                await self.recovery.ready(model.state)
                return await self.save(model)
            except StateNotHeldError as error:
                logger.warning("%s: recovered once more", error)
        return None
