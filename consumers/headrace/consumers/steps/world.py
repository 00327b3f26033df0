"""The turn at the device: one world of ranks, and models that take turns on it in the order in which they ask.

Guarantees: one step at a time, and one that the ranks have gone on to by themselves is its asker's, or nobody's; a rank that dies or hangs
fails that step, not the worker, and the next step gets a new world; what the ranks hold is used only if it is the very state that was
committed (exactly-once rule 5). A model whose turn ends is parked: its state is written to this worker's disk, and read from there when its
turn comes again. Nothing that blocks runs on the event loop. Under a launcher (torchrun, deepspeed) the other ranks are its to start: a
world that broke is reported through `lost`, and the worker ends, so that the launcher starts all of them anew. Gives up: more than one base
model at a time on a device; the order of asking for one step, which the ranks may have gone on to before another asked.
"""

import asyncio
import logging
import shutil
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from headrace.core.errors import HeadraceError, OutageError
from headrace.core.outages import outage_of
from headrace.core.settings import BaseModelEntry, Settings
from headrace.core.store import ObjectStore, fetch_folder
from headrace.schemas.weights import WeightsRef
from headrace.trainer.plan import BaseSource, SavePlan, StateKey, StepPlan, StepResult
from headrace.trainer.rank import RankDiedError, RankOutageError, RankWorld, StepFailedError
from headrace.trainer.rank_main import seat_of_launcher
from headrace.trainer.world import WorldSettings

logger = logging.getLogger(__name__)

_turn_is_ours: ContextVar[bool] = ContextVar("turn_is_ours", default=False)
A = TypeVar("A")
R = TypeVar("R")


class WorldLostError(HeadraceError):
    """Ranks that a launcher started are gone; it restarts all, this worker included."""

    def __init__(self) -> None:
        super().__init__("a rank ended or hung in a world that a launcher started: all its ranks must be started anew")


class StateNotHeldError(HeadraceError):
    """The state that a step starts from is neither on the ranks nor parked, and no snapshot of it was given."""


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
        self.launched = launcher is not None
        """A launcher (torchrun, deepspeed) started the other ranks."""
        self._shape = world_settings(settings, None if launcher is None else launcher[0])
        self.lost = asyncio.Event()
        """A world that a launcher started is broken: this process must end."""
        self._ranks = self._new_world()
        self._resident: StateKey | None = None
        self._whose: str | None = None
        """The folder of the plan that has the turn."""
        self._queue = 0
        """How many wait for their turn."""
        self._asked: set[str] = set()
        """The folders of the plans that `run` was called with, and has not returned from."""
        self._settled: dict[str, StepResult | HeadraceError] = {}
        """What came, in another's turn, of plans that the ranks went on to, by their folder."""
        self._handed: str | None = None
        """The folder of the last plan that the ranks may go on to: where they end before they say that they did, it is nobody's."""
        self._parking = settings.worker.work_dir.absolute() / "parked"
        self._parked: dict[str, StateKey] = {}
        self._forgetting: set[asyncio.Task[None]] = set()

    def _new_world(self) -> RankWorld:
        ranks = RankWorld(self._shape, launched=self.launched)
        ranks.start()
        return ranks

    def preload(self, base: BaseSource) -> None:
        """Let the ranks load a base model before the first step asks for it."""
        self._ranks.preload(base)

    async def hand_over(self, plan: StepPlan, *, goes_on: bool) -> None:
        """Give the ranks a plan before its turn, to be made ready while another runs. It is run by `run` like any other.

        Args:
            plan: The plan.
            goes_on: They may begin it when they have made its state: `StepResult.goes_on` says that they did. Not if somebody waits.
        """
        if self._ranks.alive:
            goes_on = goes_on and self._queue == 0
            if goes_on:
                self._handed = plan.out_dir
            await asyncio.to_thread(self._ranks.hand_over, plan, goes_on=goes_on)

    async def hold_back(self) -> None:
        """Ask the ranks not to go on to what was handed over last: it may not be what comes next."""
        if self._ranks.alive:
            await asyncio.to_thread(self._ranks.hold_back)

    async def run(self, plan: StepPlan, snapshot: WeightsRef | None) -> StepResult:
        """Run a step when its turn comes.

        Args:
            plan: Without `load_from`.
            snapshot: The committed snapshot of just `plan.state`; None where there is none. At step 0 the weights that the model begins
                with; None: the base model.

        Raises:
            StepFailedError: the step raised.
            RankOutageError: the step raised, since a disk (for one) does not work; it may be run again.
            RankDiedError: a rank ended or hung; the next step gets a new world.
            WorldLostError: under a launcher, an earlier step broke the world, or a rank ended between steps.
            StateNotHeldError: the state is lost here, as after a rank's death: it must be run again from the last snapshot.
            HeadraceError: the snapshot can't be fetched.
        """
        asked = time.monotonic()
        self._asked.add(plan.out_dir)
        try:
            async with self.turn():
                logger.debug("step %d of %s waited %.3f s for its turn", plan.state.step + 1, plan.state.model_id, time.monotonic() - asked)
                self._whose = plan.out_dir
                try:
                    return await self._run(plan, snapshot)
                finally:
                    self._whose = None
        finally:
            self._asked.discard(plan.out_dir)
            self._settled.pop(plan.out_dir, None)

    def has_turn(self, plan: StepPlan) -> bool:
        """Whether the plan has its turn: what ends it now may end the ranks."""
        return self._whose == plan.out_dir

    async def _run(self, plan: StepPlan, snapshot: WeightsRef | None) -> StepResult:
        if (settled := self._settled.pop(plan.out_dir, None)) is not None:
            if isinstance(settled, HeadraceError):
                raise settled
            return settled
        if self._ranks.alive and self._ranks.going == plan.out_dir:
            return await self._result_of(plan)
        await self._settle()
        if self._resident is not None and self._ranks.alive and self._resident.model_id != plan.state.model_id:
            await self._park(self._resident)
        if not self._ranks.alive:
            self._resident = None
            if self.launched:  # nobody's step is to blame
                self.lost.set()
                raise WorldLostError
            await self._replace()
        load_from = await self._load_from(plan, snapshot)
        try:
            return await self._result_of(_with_load(plan, load_from))
        finally:
            if load_from is not None and load_from.parent != self._parking:
                await asyncio.to_thread(shutil.rmtree, load_from, ignore_errors=True)

    async def _result_of(self, plan: StepPlan) -> StepResult:
        self._resident = None
        try:
            result = await self._in_thread(self._ranks.run, plan)
        except asyncio.CancelledError:
            # The lane is lost, or the step is not wanted any more: nobody will commit it.
            logger.info("step %d of %s is cancelled", plan.state.step + 1, plan.state.model_id)
            raise
        finally:
            self._see_whether_lost()
        self._resident = result.key if result.goes_on is None else None
        return result

    def _see_whether_lost(self) -> None:
        if self.launched and not self._ranks.alive:
            self.lost.set()

    async def _settle(self) -> None:
        """Wait, in another's turn, for the end of a step that the ranks have gone on to; it is kept for who has asked for it."""
        while self._ranks.alive and (going := self._ranks.going) is not None:
            came: StepResult | HeadraceError
            try:
                came = await self._in_thread(RankWorld.settle, self._ranks)
            except (StepFailedError, RankOutageError, RankDiedError) as error:
                came = error
            else:
                self._resident = came.key if came.goes_on is None else None
            finally:
                self._see_whether_lost()
            if going in self._asked:
                self._settled[going] = came
            else:
                await asyncio.to_thread(shutil.rmtree, going, ignore_errors=True)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """The device for what the caller does inside, and the tasks that it starts there: they wait for no further turn."""
        if _turn_is_ours.get():
            yield
            return
        self._queue += 1
        try:
            await self._turn.acquire()
        finally:
            self._queue -= 1
        token = _turn_is_ours.set(True)
        try:
            yield
        finally:
            self._turn.release()
            _turn_is_ours.reset(token)

    def holds(self, state: StateKey) -> bool:
        """Whether a step could start from this state without a snapshot. Not for long: somebody else's turn may break the world."""
        return state.step == 0 or state == self._parked.get(state.model_id) or (state == self._resident and self._ranks.alive)

    async def save(self, state: StateKey, folder: Path) -> None:
        """Write a state that this worker holds into a new folder, as the `snapshot/` of a step.

        Raises:
            StateNotHeldError: it does not (any more).
            StepFailedError, RankDiedError: the ranks could not.
        """
        async with self.turn():
            if state == self._resident and self._ranks.alive:
                await self._save(state, folder)
            elif state == self._parked.get(state.model_id):
                await asyncio.to_thread(shutil.copytree, self._parked_at(state), folder)
            else:
                raise StateNotHeldError(f"{state} is not held here")

    def forget(self, model_ids: Collection[str]) -> None:
        """Free the memory and the disk of models whose lane is given up; done when the device's turn allows it."""
        task = asyncio.create_task(self._forget(frozenset(model_ids)))
        self._forgetting.add(task)
        task.add_done_callback(self._forgetting.discard)

    async def _forget(self, model_ids: frozenset[str]) -> None:
        async with self.turn():
            if not self.launched:  # there nothing is dropped, and who ends the wait would end the ranks
                await self._settle()
            for model_id in model_ids:
                if (parked := self._parked.pop(model_id, None)) is not None:
                    await asyncio.to_thread(shutil.rmtree, self._parked_at(parked), ignore_errors=True)
                if self._resident is not None and self._resident.model_id == model_id and not self.launched:
                    self._resident = None
                    self._ranks.drop()

    async def _park(self, state: StateKey) -> None:
        """Keep the state of a model whose turn ends. One that can't be written is run again when its turn comes."""
        folder = self._parked_at(state)
        former = self._parked.pop(state.model_id, None)
        if former is not None:
            await asyncio.to_thread(shutil.rmtree, self._parked_at(former), ignore_errors=True)
        try:
            await self._save(state, folder)
        except (StepFailedError, RankDiedError, OutageError, OSError) as error:
            # Not the fault of the step that comes next, which gets a new world if it must. What was written takes room that others need.
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
        """A call that blocks on the ranks. Cancelled, it ends the ranks: the thread only ends when they do."""
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

    async def _load_from(self, plan: StepPlan, snapshot: WeightsRef | None) -> Path | None:
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

    async def _replace(self) -> None:
        await asyncio.to_thread(self._ranks.close)
        if self._handed is not None and self._handed not in self._asked:
            await asyncio.to_thread(shutil.rmtree, self._handed, ignore_errors=True)
        self._ranks = self._new_world()

    async def close(self) -> None:
        """End the ranks."""
        for task in self._forgetting:
            task.cancel()
        if not self.launched:  # there, rank 0 must say goodbye to those that it did not start
            self._ranks.kill()
        await asyncio.to_thread(self._ranks.close)


def base_source(entry: BaseModelEntry) -> BaseSource:
    """A base model of the catalogue, as the ranks and the tokenizing process load it."""
    return BaseSource(path=entry.path, gguf_file=entry.gguf_file)


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
