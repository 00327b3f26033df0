"""Bringing the device to a model's committed state: from what is held, from the snapshot, or by running again the steps since.

Guarantees: a step only starts from the committed state; a step that is run again must come out as the ledger says, in the same
environment, else the model has diverged (exactly-once rule 13). What was run again is kept between turns like any other state. Gives up:
steps since the snapshot in parallel; they follow from each other.
"""

import asyncio
import logging
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.consumers.steps.ledger_tail import records_since_snapshot
from headrace.consumers.steps.rerun import CannotRerunError, Rerun, StepReruns, state_after
from headrace.consumers.steps.world import StateNotHeldError, TrainerWorld
from headrace.core.errors import HeadraceError
from headrace.core.kafka import ClientOptions
from headrace.core.reading import OffsetLostError
from headrace.core.store import DigestMismatchError, ObjectNotFoundError
from headrace.schemas.state import ModelState, StepRecord, TrainingScalars
from headrace.schemas.weights import WeightsRef
from headrace.trainer.plan import StateKey
from headrace.trainer.rank import RankDiedError

logger = logging.getLogger(__name__)

_RESUME = "`headrace models resume` goes on from what could be run again, as a new version"


class ModelDivergedError(HeadraceError):
    """The committed state can't be had again: the model stops, and publishes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """How far a model could be run again."""

    state: StateKey
    scalars: TrainingScalars
    snapshot: WeightsRef | None
    """Of just that state; None where the world holds it, or where it is the base model. At step 0 the weights that the model began with."""
    stopped: str | None
    """Why not further; None: it is the committed step."""


class CatchUp:
    """Catches models of one lane up.

    Args:
        options: Kafka client options.
        steps_topic: The ledger.
        lane: Partition number.
        world: The device.
        reruns: Runs steps again.
        max_attempts: Of one re-run; its rank having died so often, the model is said to have diverged.
    """

    def __init__(
        self, options: ClientOptions, steps_topic: str, lane: int, world: TrainerWorld, reruns: StepReruns, *, max_attempts: int
    ) -> None:
        self._options = options
        self._topic = steps_topic
        self._lane = lane
        self._world = world
        self._reruns = reruns
        self._max_attempts = max_attempts
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
        """As `ready`, as far as it goes, whatever the digests say: what a resumed model goes on from."""
        records = await self._records(state)
        reached, snapshot = key_at_snapshot(state, records), _stored_before(state)
        scalars = records[0].scalars_before if records else state.scalars
        for record in records:
            try:
                rerun = await self._reruns.run(record, state.settings, snapshot, start=state.start_weights)
            except (CannotRerunError, StateNotHeldError, RankDiedError) as error:
                return Reached(state=reached, scalars=scalars, snapshot=snapshot, stopped=str(error))
            await asyncio.to_thread(shutil.rmtree, rerun.out_dir, ignore_errors=True)
            reached, scalars, snapshot = rerun.result.key, rerun.result.scalars, None
        return Reached(state=reached, scalars=scalars, snapshot=snapshot, stopped=None)

    async def _records(self, state: ModelState) -> list[StepRecord]:
        try:
            return await records_since_snapshot(self._options, self._topic, self._lane, state)
        except OffsetLostError as error:
            raise ModelDivergedError(f"the ledger lacks steps to run again: {error}. {_RESUME}") from error

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
            raise ModelDivergedError(f"{error}. {_RESUME}") from error
        except (ObjectNotFoundError, DigestMismatchError) as error:
            what = f"the snapshot of step {state.snapshot_step}" if state.snapshot_step else "what it began with"
            raise ModelDivergedError(f"{what} can't be used: {error}. {_RESUME}") from error
        except RankDiedError as error:
            self._deaths[state_after(record)] += 1
            if (deaths := self._deaths[state_after(record)]) >= self._max_attempts:
                said = f"step {record.step}, run again, ended its rank {deaths} times (worker.max_step_attempts): {error}. {_RESUME}"
                raise ModelDivergedError(said) from error
            raise StateNotHeldError(str(error)) from error
        await asyncio.to_thread(shutil.rmtree, rerun.out_dir, ignore_errors=True)
        if problem := _problem(rerun):
            raise ModelDivergedError(f"step {record.step}, run again: {problem}. {_RESUME}")
        logger.info("step %d of %s is run again, to the same digests", record.step, state.name)


def _stored_before(state: ModelState) -> WeightsRef | None:
    """What the steps since the snapshot began from: it, or the weights that the model began with."""
    return state.snapshot if state.snapshot_step else state.start_weights


def state_key(state: ModelState) -> StateKey:
    """The committed state."""
    return StateKey(model_id=state.model_id, incarnation=state.incarnation, step=state.policy_version, attempt=state.last_attempt)


def key_at_snapshot(state: ModelState, since: Sequence[StepRecord]) -> StateKey:
    """The state that the snapshot is of, or the base model where there is none: where the steps since began."""
    attempt = since[0].attempt_before if since else state.last_attempt
    return StateKey(model_id=state.model_id, incarnation=state.incarnation, step=state.snapshot_step, attempt=attempt)


def _problem(rerun: Rerun) -> str | None:
    """Why the outcome may not be gone on from: even with equal digests, another environment's next step would be another one."""
    found = (*rerun.differences, *rerun.fingerprint_differences)
    return "; ".join(found) if found else None
