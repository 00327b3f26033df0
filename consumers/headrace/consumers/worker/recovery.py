"""Recovery: the device gets a model's committed state from this worker, from the snapshot, or by running the steps since it again.

Guarantees: a step only starts from the committed state. A step that is run again must have the outcome of the ledger, in the same
environment, or else the model has diverged (the verified-rerun invariant). Of the ledger, only the records of steps since the snapshot are
read, by the bounds that the state lists, however long the ledger is. Limitations: the steps since the snapshot run one after another,
because each starts from the one before.
"""

import asyncio
import logging
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from aiokafka import AIOKafkaConsumer, TopicPartition

from headrace.consumers.worker.admission.pool import AdmissionPool
from headrace.consumers.worker.kl_references import KlReferences
from headrace.consumers.worker.plans import state_key
from headrace.consumers.worker.rerun import CannotRerunError, StepReruns, key_after
from headrace.consumers.worker.storage.stored_snapshots import RESUME, is_whole, stored_snapshots
from headrace.consumers.worker.world import StateNotHeldError, TrainerWorld, Turn
from headrace.core.errors import HeadraceError
from headrace.core.fetching import records_in, single_reader
from headrace.core.kafka import ClientOptions, client_options, plain_errors
from headrace.core.kept import kept_or_none
from headrace.core.ledger import read_ledger
from headrace.core.polling import UnreadableRecord
from headrace.core.reading import OffsetLostError, end_offsets
from headrace.core.settings import Settings
from headrace.core.store import DigestMismatchError, ObjectNotFoundError, ObjectStore
from headrace.schemas.state import ModelState, StepRecord, TrainingScalars
from headrace.schemas.weights import WeightsRef
from headrace.trainer.plan import StateKey
from headrace.trainer.rank import RankDiedError

logger = logging.getLogger(__name__)


class ModelDivergedError(HeadraceError):
    """The committed state can't be recovered: the model stops, and publishes nothing."""


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


class Recovery:
    """Recovers the models of one lane."""

    def __init__(
        self, settings: Settings, store: ObjectStore, lane: int, *, world: TrainerWorld, pool: AdmissionPool, references: KlReferences
    ) -> None:
        self._settings = settings
        self._options = client_options(settings.kafka, f"headrace-recovery-{lane}")
        self._topic = settings.topic_names.steps
        self._store = store
        self._lane = lane
        self._world = world
        self._reruns = StepReruns(settings, world, pool, lane, references)
        self._max_attempts = settings.worker.max_step_attempts
        self._most = settings.worker.keep_snapshots * settings.worker.snapshot_every
        self._deaths: Counter[StateKey] = Counter()

    async def ready(self, state: ModelState, turn: Turn | None = None) -> WeightsRef | None:
        """Make the next step possible. Returns the snapshot that it starts from; None if the world holds the state, or for the base model.

        Raises:
            ModelDivergedError: the committed state can't be recovered.
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
        try:
            records = await records_since_snapshot(self._options, self._topic, self._lane, state)
        except OffsetLostError as error:
            raise ModelDivergedError(f"the ledger lacks steps to run again: {error}. {RESUME}") from error
        # The steps behind the last one whose outcome this worker still holds.
        held = [i for i, record in enumerate(records) if self._world.holds(key_after(record))]
        for record in records[held[-1] + 1 :] if held else records:
            await self._rerun(state, record, turn)
        return None

    async def _rerun(self, state: ModelState, record: StepRecord, turn: Turn | None) -> None:
        snapshot = _stored_before(state) if record.step == state.snapshot_step + 1 else None
        key = key_after(record)
        try:
            rerun = await self._reruns.run(record, state.settings, snapshot, start=state.start_weights, turn=turn)
        except CannotRerunError as error:
            raise ModelDivergedError(f"{error}. {RESUME}") from error
        except (ObjectNotFoundError, DigestMismatchError) as error:
            what = f"the snapshot of step {state.snapshot_step}" if state.snapshot_step else "what it began with"
            raise ModelDivergedError(f"{what} can't be used: {error}. {RESUME}") from error
        except RankDiedError as error:
            self._deaths[key] += 1
            if (deaths := self._deaths[key]) >= self._max_attempts:
                detail = f"step {record.step}, run again, ended its rank {deaths} times (worker.max_step_attempts): {error}. {RESUME}"
                raise ModelDivergedError(detail) from error
            raise StateNotHeldError(str(error)) from error
        await asyncio.to_thread(shutil.rmtree, rerun.out_dir, ignore_errors=True)
        # Even with equal digests, the next step would differ in another environment.
        if problems := (*rerun.differences, *rerun.fingerprint_differences):
            raise ModelDivergedError(f"step {record.step}, run again: {'; '.join(problems)}. {RESUME}")
        logger.info("step %d of %s is run again, to the same digests", record.step, state.name)

    async def reach(self, state: ModelState) -> Reached:
        """The state that a resumed model continues from: as `ready`, as far as reruns are possible, with any digests.

        Where the snapshot can't be read: an older one, if all steps since can be run again; else the published weights, with a new
        optimizer.

        Raises:
            ModelDivergedError: neither can be used; says what is lost, and what can be done.
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
        why = f"{lost}: it continues from the weights of version {state.policy_version}, with a new optimizer"
        return Reached(state=begins, scalars=state.scalars, snapshot=state.weights, trained=state.policy_version, stopped=why)

    async def _reach(self, state: ModelState, snapshot: WeightsRef | None, step: int, records: Sequence[StepRecord]) -> Reached:
        attempt = records[0].attempt_before if records else state.last_attempt
        reached = StateKey(model_id=state.model_id, incarnation=state.incarnation, step=step, attempt=attempt)
        scalars = records[0].scalars_before if records else state.scalars
        for record in records:
            try:
                rerun = await self._reruns.run(record, state.settings, snapshot, start=state.start_weights)
            except (CannotRerunError, StateNotHeldError, RankDiedError) as error:
                return Reached(state=reached, scalars=scalars, snapshot=snapshot, trained=reached.step, stopped=str(error))
            await asyncio.to_thread(shutil.rmtree, rerun.out_dir, ignore_errors=True)
            reached, scalars, snapshot = rerun.result.key, rerun.result.scalars, None
        return Reached(state=reached, scalars=scalars, snapshot=snapshot, trained=reached.step, stopped=None)

    async def _older(self, state: ModelState) -> AsyncIterator[tuple[int, WeightsRef | None, list[StepRecord]]]:
        """Older states from which reruns may begin, the latest first, with the steps since; each is whole, and no step is missing."""
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


def _stored_before(state: ModelState) -> WeightsRef | None:
    """The state that the steps since the snapshot began from: the snapshot, or the weights that the model began with."""
    return state.snapshot if state.snapshot_step else state.start_weights


async def records_since_snapshot(options: ClientOptions, topic: str, lane: int, state: ModelState) -> list[StepRecord]:
    """The ledger records of the steps after the snapshot, up to the committed one, in step order.

    Raises:
        OffsetLostError: the ledger does not have one of them.
        HeadraceError: Kafka can't be reached.
    """
    steps = range(state.snapshot_step + 1, state.policy_version + 1)
    if len(steps) != len(state.steps_since):
        raise RuntimeError(f"{state.model_id}: {len(state.steps_since)} bounds for the steps {steps}; a defect of Headrace")
    if not steps:
        return []
    where = TopicPartition(topic, lane)
    with plain_errors(options):
        end = (await end_offsets(options, topic, [lane]))[lane]
        async with single_reader(options, where) as consumer:
            bounds = zip(steps, state.steps_since, strict=True)
            return [await _first_record(consumer, state, step, range(bound, end)) for step, bound in bounds]


async def _first_record(consumer: AIOKafkaConsumer, state: ModelState, step: int, span: range) -> StepRecord:
    async with aclosing(records_in(consumer, span)) as records:
        async for record in records:
            if isinstance(record, UnreadableRecord) or record.key != state.model_id.encode():
                continue
            opened = kept_or_none(record, (StepRecord,))
            if isinstance(opened, StepRecord) and (opened.incarnation, opened.step) == (state.incarnation, step):
                return opened
    (where,) = consumer.assignment()
    raise OffsetLostError(
        f"{where.topic} partition {where.partition} has no record of step {step} of {state.model_id} from offset {span.start} on"
    )
