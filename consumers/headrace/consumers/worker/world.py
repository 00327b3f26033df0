"""The turn at the device: one world of ranks, and models that take turns on it in the order in which they ask.

`turn` gives a `Turn`. A call with that turn uses the device at once; a call without one waits for a turn of its own.
Guarantees: one step runs at a time. A rank that dies or hangs fails that step, not the worker, and the next step gets a new world. The
state on the ranks is used only if it is the very state that was committed (the committed-state-only invariant). When another model's turn
comes, the state is parked: written to this worker's disk, and read from there at the next turn. Nothing that blocks runs on the event loop.
Under a launcher (torchrun, deepspeed) the launcher starts the other ranks: a broken world is reported through `lost`, and the worker ends,
so that the launcher starts all of them again. Limitations: one base model at a time on a device.
"""

import asyncio
import logging
import shutil
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from headrace.core.errors import HeadraceError, OutageError
from headrace.core.outages import outage_of
from headrace.core.settings import Settings
from headrace.core.store import ObjectStore, fetch_folder
from headrace.schemas.weights import WeightsRef
from headrace.trainer.plan import BaseSource, SavePlan, StateKey, StepPlan, StepResult
from headrace.trainer.rank import RankDiedError, RankWorld, StepFailedError
from headrace.trainer.rank_main import seat_of_launcher
from headrace.trainer.world import WorldSettings

logger = logging.getLogger(__name__)

A = TypeVar("A")
R = TypeVar("R")


class WorldLostError(HeadraceError):
    """Ranks that a launcher started are gone; it restarts all, this worker included."""

    def __init__(self) -> None:
        super().__init__("a rank ended or hung in a world that a launcher started: all its ranks must be restarted")


class StateNotHeldError(HeadraceError):
    """The state that a step starts from is neither on the ranks nor parked, and no snapshot of it was given."""


@dataclass(frozen=True, eq=False, slots=True)
class Turn:
    """The right to use the device; only `TrainerWorld.turn` makes one."""


class TrainerWorld:
    """The ranks of this worker."""

    def __init__(self, settings: Settings, store: ObjectStore) -> None:
        self._settings = settings
        self._store = store
        self._turn = asyncio.Lock()  # fair: first come, first served
        launcher = seat_of_launcher()
        self.launched = launcher is not None
        """A launcher (torchrun, deepspeed) started the other ranks."""
        self._shape = world_settings(settings, None if launcher is None else launcher[0])
        self.lost = asyncio.Event()
        """A world that a launcher started is broken: this process must end."""
        self._ranks = self._new_world()
        self._resident: StateKey | None = None
        """The state on the ranks."""
        self._parking = settings.worker.work_dir.absolute() / "parked"
        self._parked: dict[str, StateKey] = {}
        self._forgetting: set[asyncio.Task[None]] = set()

    def _new_world(self) -> RankWorld:
        ranks = RankWorld(self._shape, launched=self.launched)
        ranks.start()
        return ranks

    def preload(self, base: BaseSource) -> None:
        """Let the ranks load a base model before the first step needs it."""
        self._ranks.preload(base)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[Turn]:
        """The device, for every call inside that is given this turn."""
        async with self._turn:
            yield Turn()

    @asynccontextmanager
    async def _turn_of(self, turn: Turn | None) -> AsyncIterator[None]:
        if turn is not None:
            yield
        else:
            async with self._turn:
                yield

    async def run(self, plan: StepPlan, snapshot: WeightsRef | None, turn: Turn | None = None) -> StepResult:
        """Run a step when its turn comes.

        Args:
            plan: Without `load_from`.
            snapshot: The committed snapshot of just `plan.state`; None where there is none. At step 0 the weights that the model begins
                with; None: the base model.
            turn: Held by the caller; None: the step waits for a turn of its own.

        Raises:
            StepFailedError: the step raised.
            RankOutageError: the step raised because a disk (for one) does not work; it may be run again.
            RankDiedError: a rank ended or hung; the next step gets a new world.
            WorldLostError: under a launcher, an earlier step broke the world, or a rank ended between steps.
            StateNotHeldError: the state is lost here, as after a rank's death: run it again from the last snapshot.
            HeadraceError: the snapshot can't be fetched.
        """
        asked = time.monotonic()
        async with self._turn_of(turn):
            logger.debug("step %d of %s waited %.3f s for its turn", plan.state.step + 1, plan.state.model_id, time.monotonic() - asked)
            return await self._run(plan, snapshot)

    async def _run(self, plan: StepPlan, snapshot: WeightsRef | None) -> StepResult:
        if self._resident is not None and self._ranks.alive and self._resident.model_id != plan.state.model_id:
            await self._park(self._resident)
        if not self._ranks.alive:
            self._resident = None
            if self.launched:  # no step is at fault
                self.lost.set()
                raise WorldLostError
            await asyncio.to_thread(self._ranks.close)
            self._ranks = self._new_world()
        load_from = await self._load_from(plan, snapshot)
        self._resident = None
        try:
            result = await self._in_thread(self._ranks.run, replace(plan, load_from=None if load_from is None else str(load_from)))
        except asyncio.CancelledError:
            # The lane is lost, or the step is not wanted any more: it will not be committed.
            logger.info("step %d of %s is cancelled", plan.state.step + 1, plan.state.model_id)
            raise
        finally:
            if self.launched and not self._ranks.alive:
                self.lost.set()
            if load_from is not None and load_from.parent != self._parking:
                await asyncio.to_thread(shutil.rmtree, load_from, ignore_errors=True)
        self._resident = result.key
        return result

    async def _load_from(self, plan: StepPlan, snapshot: WeightsRef | None) -> Path | None:
        """The local folder of the state that the plan starts from; None if the ranks hold it, or if it is the base model."""
        state = plan.state
        if (state.step == 0 and snapshot is None) or state == self._resident:
            return None
        if state == self._parked.get(state.model_id):
            return self._parked_at(state)
        if snapshot is None:
            raise StateNotHeldError(f"step {state.step} of {state.model_id} is neither on the ranks nor parked")
        folder = Path(plan.out_dir).with_suffix(".load")
        await asyncio.to_thread(fetch_folder, self._store, snapshot.uri, snapshot.digest, folder)
        return folder

    def holds(self, state: StateKey) -> bool:
        """Whether a step could start from this state without a snapshot. Another model's step may change that at any time."""
        return state.step == 0 or state == self._parked.get(state.model_id) or (state == self._resident and self._ranks.alive)

    async def save(self, state: StateKey, folder: Path) -> None:
        """Write a state that this worker holds into a new folder, as the `snapshot/` of a step.

        Raises:
            StateNotHeldError: the worker does not hold it (any more).
            StepFailedError, RankDiedError: the ranks could not.
        """
        async with self._turn:
            if state == self._resident and self._ranks.alive:
                await self._save(state, folder)
            elif state == self._parked.get(state.model_id):
                await asyncio.to_thread(shutil.copytree, self._parked_at(state), folder)
            else:
                raise StateNotHeldError(f"{state} is not held here")

    def forget(self, model_ids: Collection[str]) -> None:
        """Free the memory and the disk of models whose lane is released; done when the device's turn allows it."""
        task = asyncio.create_task(self._forget(frozenset(model_ids)))
        self._forgetting.add(task)
        task.add_done_callback(self._forgetting.discard)

    async def _forget(self, model_ids: frozenset[str]) -> None:
        async with self._turn:
            for model_id in model_ids:
                if (parked := self._parked.pop(model_id, None)) is not None:
                    await asyncio.to_thread(shutil.rmtree, self._parked_at(parked), ignore_errors=True)
                if self._resident is not None and self._resident.model_id == model_id and not self.launched:
                    self._resident = None
                    self._ranks.drop()

    async def _park(self, state: StateKey) -> None:
        """Write the state of a model whose turn ends. A state that can't be written is run again when its turn comes."""
        folder = self._parked_at(state)
        former = self._parked.pop(state.model_id, None)
        if former is not None:
            await asyncio.to_thread(shutil.rmtree, self._parked_at(former), ignore_errors=True)
        try:
            await self._save(state, folder)
        except (StepFailedError, RankDiedError, OutageError, OSError) as error:
            # The next step is not at fault; it gets a new world if it needs one. Other files need the room of a half-written one.
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            if (reason := outage_of(error)) is None:
                logger.exception("%s could not be parked", state)
            else:
                logger.warning("%s could not be parked, and is run again from its snapshot: %s", state, reason)
        else:
            self._parked[state.model_id] = state

    async def _save(self, state: StateKey, folder: Path) -> None:
        await asyncio.to_thread(folder.mkdir, parents=True)
        await self._in_thread(self._ranks.save, SavePlan(state=state, folder=str(folder)))

    def _parked_at(self, state: StateKey) -> Path:
        return self._parking / f"{state.model_id}-{state.step}-{state.attempt}"

    async def _in_thread(self, call: Callable[[A], R], argument: A) -> R:
        """A call that blocks on the ranks. A cancellation ends the ranks: the thread only ends when they do."""
        running = asyncio.ensure_future(asyncio.to_thread(call, argument))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            self._resident = None
            self._ranks.kill()
            await asyncio.gather(running, return_exceptions=True)
            raise
        except RankDiedError:
            self._resident = None
            raise

    async def close(self) -> None:
        """End the ranks."""
        for task in self._forgetting:
            task.cancel()
        if not self.launched:  # there, rank 0 must tell the ranks that the launcher started
            self._ranks.kill()
        await asyncio.to_thread(self._ranks.close)


def world_settings(settings: Settings, launched_size: int | None = None) -> WorldSettings:
    """The world that the settings describe; under a launcher, of the launcher's size."""
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
