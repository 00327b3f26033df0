"""Bringing the device to a model's committed state: from what is held, from the snapshot, or by running again the steps since.

Guarantees: a step only starts from the committed state; a step that is run again must come out as the ledger says, in the same
environment, else the model has diverged (exactly-once rule 13). What was run again is kept between turns like any other state. Gives up:
steps since the snapshot in parallel; they follow from each other.
"""

import asyncio
import logging
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from headrace.consumers.steps.kept_snapshots import RESUME, is_whole, stored_snapshots
from headrace.consumers.steps.ledger_tail import records_since_snapshot
from headrace.consumers.steps.rerun import CannotRerunError, Rerun, StepReruns, state_after
from headrace.consumers.steps.world import StateNotHeldError, TrainerWorld
from headrace.core.errors import HeadraceError
from headrace.core.kafka import client_options
from headrace.core.ledger import read_ledger
from headrace.core.reading import OffsetLostError
from headrace.core.settings import Settings
from headrace.core.store import DigestMismatchError, ObjectNotFoundError, ObjectStore
from headrace.schemas.state import ModelState, StepRecord, TrainingScalars
from headrace.schemas.weights import WeightsRef
from headrace.trainer.plan import StateKey
from headrace.trainer.rank import RankDiedError

logger = logging.getLogger(__name__)


class ModelDivergedError(HeadraceError):
    """The committed state can't be had again: the model stops, and publishes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """How far a model could be run again."""

    state: StateKey
    scalars: TrainingScalars
    snapshot: WeightsRef | None
    """Of just that state; None where the world holds it, or where it is the base model. At step 0 the weights that the model began with."""
    trained: int
    """The last step whose training is in it."""
    stopped: str | None
    """Why it is not the committed state; None: it is."""


class CatchUp:
    """Catches models of one lane up.

    Args:
        settings: Where the ledger is; how often a re-run may end its rank; how many steps back snapshots are kept.
        store: Where snapshots and weights are.
        lane: Partition number.
        world: The device.
        reruns: Runs steps again.
    """

    def __init__(self, settings: Settings, store: ObjectStore, lane: int, world: TrainerWorld, reruns: StepReruns) -> None:
        self._settings = settings
        self._options = client_options(settings.kafka, f"headrace-catch-up-{lane}")
        self._topic = settings.topic_names.steps
        self._store = store
        self._lane = lane
        self._world = world
        self._reruns = reruns
        self._max_attempts = settings.worker.max_step_attempts
        self._most = settings.worker.keep_snapshots * settings.worker.snapshot_every
        self._deaths: Counter[StateKey] = Counter()

    async def ready(self, state: ModelState) -> WeightsRef | None:
        """Make the next step possible; returns the snapshot that it starts from, or None where the world holds the state.

        Of a model's first step, the weights that it begins with; None for the base model.

        Raises:
            ModelDivergedError: the committed state can't be had again.
            HeadraceError: the store or the broker is away.
        """
        key = state_key(state)
        if key.step == 0:
            return state.start_weights
        if self._world.holds(key):
            return None
        if state.snapshot_step == state.policy_version:
            return state.snapshot
        logger.info("%s is run again from step %d to %d", state.name, state.snapshot_step + 1, state.policy_version)
        for record in await self._unheld(state):
            await self._again(state, record)
        return None

    async def reach(self, state: ModelState) -> Reached:
        """As `ready`, as far as it goes, whatever the digests say: what a resumed model goes on from.

        Where the snapshot can't be read: an older one, if all steps since can be run again; else the published weights, with a new
        optimizer.

        Raises:
            ModelDivergedError: neither can be had; says what is lost, and what can be done.
        """
        stored = _stored_before(state)
        if stored is not None and not await asyncio.to_thread(is_whole, self._store, stored):
            lost = f"the snapshot of step {state.snapshot_step} can't be read: {stored.uri}"
        else:
            try:
                records = await records_since_snapshot(self._options, self._topic, self._lane, state)
            except OffsetLostError as error:
                lost = f"the ledger lacks steps to run again: {error}"
            else:
                return await self._reach(state, stored, state.snapshot_step, records)
        async for step, snapshot, records in self._older(state):
            logger.info("%s: %s; it is run again from step %d on", state.name, lost, step)
            reached = await self._reach(state, snapshot, step, records)
            if reached.stopped is None:
                return reached
            lost = f"{lost}; from step {step} on: {reached.stopped}"
        if state.weights is None or not await asyncio.to_thread(is_whole, self._store, state.weights):
            raise ModelDivergedError(
                f"{lost}, and neither can the weights of version {state.policy_version}. `headrace replay --publish-to` makes a new model "
                "of a step that can still be run again; `headrace models delete` gives this one up"
            )
        begins = StateKey(model_id=state.model_id, incarnation=state.incarnation, step=0)
        said = f"{lost}: it goes on from the weights of version {state.policy_version}, with a new optimizer"
        return Reached(state=begins, scalars=state.scalars, snapshot=state.weights, trained=state.policy_version, stopped=said)

    async def _reach(self, state: ModelState, snapshot: WeightsRef | None, step: int, records: Sequence[StepRecord]) -> Reached:
        reached, scalars = key_at(state, step, records), records[0].scalars_before if records else state.scalars
        for record in records:
            try:
                rerun = await self._reruns.run(record, state.settings, snapshot, start=state.start_weights)
            except (CannotRerunError, StateNotHeldError, RankDiedError) as error:
                return Reached(state=reached, scalars=scalars, snapshot=snapshot, trained=reached.step, stopped=str(error))
            await asyncio.to_thread(shutil.rmtree, rerun.out_dir, ignore_errors=True)
            reached, scalars, snapshot = rerun.result.key, rerun.result.scalars, None
        return Reached(state=reached, scalars=scalars, snapshot=snapshot, trained=reached.step, stopped=None)

    async def _older(self, state: ModelState) -> AsyncIterator[tuple[int, WeightsRef | None, list[StepRecord]]]:
        """Where else a re-run may begin, the latest first, with the steps since; each is whole, and no step is missing."""
        ledger = await read_ledger(self._settings, state.model_id, incarnation=state.incarnation, shadow_of=state.shadow_of)
        between = await asyncio.to_thread(stored_snapshots, self._store, state)
        for i in range(len(ledger) - 1, -2, -1):
            step, since = (ledger[i].step, ledger[i + 1 :]) if i >= 0 else (0, ledger)
            snapshot = state.start_weights if i < 0 else ledger[i].snapshot or between.get((step, ledger[i].attempt))
            if step >= state.snapshot_step or (snapshot is None and i >= 0):
                continue
            whole = [record.step for record in since] == list(range(step + 1, state.policy_version + 1))
            if not whole or len(since) > self._most:
                continue
            if snapshot is None or await asyncio.to_thread(is_whole, self._store, snapshot):
                yield step, snapshot, since

    async def _records(self, state: ModelState) -> list[StepRecord]:
        try:
            return await records_since_snapshot(self._options, self._topic, self._lane, state)
        except OffsetLostError as error:
            raise ModelDivergedError(f"the ledger lacks steps to run again: {error}. {RESUME}") from error

    async def _unheld(self, state: ModelState) -> Sequence[StepRecord]:
        """The steps to run again: those behind the last one whose outcome is held already."""
        records = await self._records(state)
        held = [i for i, record in enumerate(records) if self._world.holds(state_after(record))]
        return records[held[-1] + 1 :] if held else records

    async def _again(self, state: ModelState, record: StepRecord) -> None:
        first = record.step == state.snapshot_step + 1
        try:
            rerun = await self._reruns.run(record, state.settings, _stored_before(state) if first else None, start=state.start_weights)
        except CannotRerunError as error:
            raise ModelDivergedError(f"{error}. {RESUME}") from error
        except (ObjectNotFoundError, DigestMismatchError) as error:
            what = f"the snapshot of step {state.snapshot_step}" if state.snapshot_step else "what it began with"
            raise ModelDivergedError(f"{what} can't be used: {error}. {RESUME}") from error
        except RankDiedError as error:
            self._deaths[state_after(record)] += 1
            if (deaths := self._deaths[state_after(record)]) >= self._max_attempts:
                said = f"step {record.step}, run again, ended its rank {deaths} times (worker.max_step_attempts): {error}. {RESUME}"
                raise ModelDivergedError(said) from error
            raise StateNotHeldError(str(error)) from error
        await asyncio.to_thread(shutil.rmtree, rerun.out_dir, ignore_errors=True)
        if problem := _problem(rerun):
            raise ModelDivergedError(f"step {record.step}, run again: {problem}. {RESUME}")
        logger.info("step %d of %s is run again, to the same digests", record.step, state.name)


def _stored_before(state: ModelState) -> WeightsRef | None:
    """What the steps since the snapshot began from: it, or the weights that the model began with."""
    return state.snapshot if state.snapshot_step else state.start_weights


def state_key(state: ModelState) -> StateKey:
    """The committed state."""
    return StateKey(model_id=state.model_id, incarnation=state.incarnation, step=state.policy_version, attempt=state.last_attempt)


def key_at(state: ModelState, step: int, since: Sequence[StepRecord]) -> StateKey:
    """The state after a step, from the records of those since."""
    attempt = since[0].attempt_before if since else state.last_attempt
    return StateKey(model_id=state.model_id, incarnation=state.incarnation, step=step, attempt=attempt)


def _problem(rerun: Rerun) -> str | None:
    """Why the outcome may not be gone on from: even with equal digests, another environment's next step would be another one."""
    found = (*rerun.differences, *rerun.fingerprint_differences)
    return "; ".join(found) if found else None
