"""A lane on this worker: claim it, serve it, and release it.

A claim starts the transactional producer, which fences the former owner; it reads the lane's `models` to the end that was written, returns
pending groups to their buckets, and reads on from the lane's position. Serving is six tasks on one event loop: reading, training, reporting
what no step carries, the clock, deleting what lost attempts left in the store, and deleting weights that clients deleted. After anything
but a clean commit, all memory is void, and the lane is claimed again, if the group still gives it to this worker (the unknown-outcome
invariant).

Guarantees: this worker commits only as the lane's owner. A lost lane's running step is cancelled. What a claim reads does not grow with the
log (bounded-claim). Where retention deleted needed records, the models that are affected stop and name the offsets. A lane that is released
in order leaves snapshots behind. Limitations: steps of one lane run one after another.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from headrace.consumers.worker.admission.pool import AdmissionPool
from headrace.consumers.worker.claim import load_models, read_states, recover_pending, stop_for_lost_records
from headrace.consumers.worker.clock import LaneClock
from headrace.consumers.worker.commands import CommandHandler
from headrace.consumers.worker.commits import FencedError, LaneCommitter, LaneWriter, OutcomeUnknownError
from headrace.consumers.worker.intake import LaneIntake
from headrace.consumers.worker.kl_references import KlReferences
from headrace.consumers.worker.lane_models import LaneModels
from headrace.consumers.worker.pending import MAX_PENDING
from headrace.consumers.worker.reader import LaneReader
from headrace.consumers.worker.step_tools import StepTools
from headrace.consumers.worker.storage.deleted_weights import WeightsDeleter
from headrace.consumers.worker.storage.orphans import OrphanCollector, Owned
from headrace.consumers.worker.training import LaneTraining
from headrace.consumers.worker.transaction import TakenSnapshot
from headrace.consumers.worker.world import TrainerWorld
from headrace.core.deadline import deadline
from headrace.core.errors import HeadraceError
from headrace.core.kafka import client_options
from headrace.core.kafka_outage import log_trouble
from headrace.core.outages import said
from headrace.core.reading import OffsetLostError
from headrace.core.settings import Settings
from headrace.core.store import ObjectStore
from headrace.core.topic_admin import retention_ms
from headrace.schemas.state import ModelState
from headrace.trainer.plan import StateKey

logger = logging.getLogger(__name__)

_LAST_COMMIT_SECONDS = 1.0


class LanePhase(StrEnum):
    """Phases of a lane on one worker."""

    CLAIMING = "claiming"
    """Fencing the former owner, reading states."""
    SERVING = "serving"
    """Reading, training, committing."""
    FENCED = "fenced"
    """Another producer with the lane's id has started, or the outcome of a commit is unknown: memory is void."""
    RELEASED = "released"


_VALID: dict[LanePhase, frozenset[LanePhase]] = {
    LanePhase.CLAIMING: frozenset({LanePhase.SERVING, LanePhase.FENCED, LanePhase.RELEASED}),
    LanePhase.SERVING: frozenset({LanePhase.FENCED, LanePhase.RELEASED}),
    LanePhase.FENCED: frozenset({LanePhase.CLAIMING, LanePhase.RELEASED}),
    LanePhase.RELEASED: frozenset(),
}


def is_transition_valid(current: LanePhase, to: LanePhase) -> bool:
    """Whether a lane may go from one phase to another."""
    return to in _VALID[current]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Serving:
    """The parts of one ownership of the lane."""

    models: LaneModels
    reader: LaneReader
    committer: LaneCommitter
    commands: CommandHandler
    intake: LaneIntake
    training: LaneTraining
    clock: LaneClock


class Lane:
    """One lane."""

    def __init__(
        self,
        lane: int,
        settings: Settings,
        *,
        store: ObjectStore,
        pool: AdmissionPool,
        world: TrainerWorld,
        wanted: Callable[[], bool],
        counted: set[StateKey] | None = None,
    ) -> None:
        self._counted = set() if counted is None else counted
        self.lane = lane
        self.phase = LanePhase.CLAIMING
        self.models: LaneModels | None = None
        """Of the latest claim."""
        self._settings = settings
        self._topics = settings.topic_names
        self._options = client_options(settings.kafka, f"headrace-lane-{lane}")
        self._store = store
        self._pool = pool
        self._world = world
        self._wanted = wanted
        folder = settings.worker.work_dir.absolute() / f"references-{lane}"
        references = KlReferences(self._options, self._topics.steps, lane, store, folder)
        self.tools = StepTools(settings, store, world, lane, pool=pool, references=references)
        self._orphans = OrphanCollector(settings, store, lane)
        self._leaving = asyncio.Event()

    def leave(self) -> None:
        """Release the lane in order: the step that runs may end, snapshots are stored, and then `run` returns."""
        self._leaving.set()

    def _move(self, to: LanePhase) -> None:
        if not is_transition_valid(self.phase, to):
            raise RuntimeError(f"a lane can't go from {self.phase} to {to}")
        self.phase = to

    async def run(self) -> None:
        """Own the lane until it is lost or left, or the task is cancelled."""
        try:
            while self._wanted() and not self._leaving.is_set():
                try:
                    await self._own()
                except* (FencedError, OutcomeUnknownError, OffsetLostError) as errors:
                    message = "lane %d: %s; what happened is read after fencing"
                    log_trouble(logger, logging.WARNING, errors, message, self.lane, errors.exceptions[0])
                    self._move(LanePhase.FENCED)
                if self._leaving.is_set():
                    break
                # A member that was cut off learns by its next heartbeat that the lane has another owner. A claim before that would fence
                # the rightful owner, which would claim again, and so on without end.
                await asyncio.sleep(2 * self._settings.worker.heartbeat_interval_ms / 1000)
                if self.phase is LanePhase.FENCED:
                    self._move(LanePhase.CLAIMING)
        finally:
            self.phase = LanePhase.RELEASED
            if self.models is not None:
                self._world.forget(self.models.models.keys())
            logger.info("lane %d is released", self.lane)

    async def _own(self) -> None:
        writer = LaneWriter(self._settings, self.lane, self._options)
        reader = LaneReader(self._options, self._topics, self.lane, self._settings.groups_topic)
        try:
            await writer.start()
            recovered = await read_states(self._options, self._topics, self.lane, self._settings.groups_topic)
            models = self.models = await load_models(self._settings, self._store, recovered)
            serving = await self._prepare(models, writer, reader)
            self._move(LanePhase.SERVING)
            logger.info("lane %d is claimed: %d models, from offset %d", self.lane, len(models.models), models.position)
            try:
                await self._serve(serving)
            except asyncio.CancelledError:
                await self._commit_release(serving)
                raise
        finally:
            await asyncio.shield(asyncio.gather(writer.stop(), reader.stop(), return_exceptions=True))

    async def _prepare(self, models: LaneModels, writer: LaneWriter, reader: LaneReader) -> _Serving:
        worker = self._settings.worker
        committer = LaneCommitter(models, writer, self._topics, f"headrace/worker/{worker.group}/lane/{self.lane}")
        commands = CommandHandler(self._settings, models)
        serving = _Serving(
            models=models,
            reader=reader,
            committer=committer,
            commands=commands,
            intake=LaneIntake(self._settings, models, reader, commands, self._pool),
            training=LaneTraining(models, committer, self.tools, self._counted),
            clock=LaneClock(worker, models, committer, await retention_ms(self._options, self._settings.groups_topic)),
        )
        first = await reader.start(models.position, models.state.commands_through)
        if first > models.position:
            stop_for_lost_records(models, self._settings.groups_topic, first)
        await recover_pending(self._settings, self._options, models, serving.intake)
        models.note_change()
        return serving

    async def _serve(self, serving: _Serving) -> None:
        async with asyncio.TaskGroup() as tasks:
            training = tasks.create_task(serving.training.run())
            others = [
                tasks.create_task(self._read(serving)),
                tasks.create_task(serving.clock.report()),
                tasks.create_task(serving.clock.tick()),
                tasks.create_task(self._collect_orphans(serving)),
                tasks.create_task(WeightsDeleter(self._store).run(serving.models.models.values)),
            ]
            tasks.create_task(self._leave(serving, training, others))

    async def _read(self, serving: _Serving) -> None:
        models, reader = serving.models, serving.reader
        while True:
            reader.hold_groups(hold=serving.training.stepping and self._is_full(models))
            new_commands, groups = await reader.read()
            if new_commands:
                serving.commands.apply(new_commands)
            await recover_pending(self._settings, self._options, models, serving.intake)
            if groups:
                await serving.intake.take(groups)
            if models.backlogged:
                await serving.committer.commit()
            models.position = max(models.position, await reader.position())

    def _is_full(self, models: LaneModels) -> bool:
        """Whether enough groups wait. Only used while a step runs: without a step, the next record may complete a bucket."""
        waiting = sum(len(model.waiting) for model in models.models.values() if model.trains)
        return waiting > MAX_PENDING // 2 or models.waiting_bytes > self._settings.worker.read_ahead_bytes

    async def _collect_orphans(self, serving: _Serving) -> None:
        def states() -> dict[str, ModelState]:
            return {model_id: model.state for model_id, model in serving.models.models.items()}

        async def owned() -> Owned:
            await serving.committer.commit()
            return Owned(states=states(), running=self.tools.attempts.recent)

        await self._orphans.run(states, owned)

    async def _leave(self, serving: _Serving, training: asyncio.Task[None], others: list[asyncio.Task[None]]) -> None:
        """Wait until the lane is to be released in order, and do that."""
        await self._leaving.wait()
        seconds = self._settings.worker.release_seconds
        serving.training.leave()
        await asyncio.wait({training}, timeout=seconds)
        await serving.committer.idle()
        for task in (training, *others):
            task.cancel()
        await asyncio.wait({training, *others})
        snapshots: dict[str, TakenSnapshot] = {}
        try:
            async with deadline(max(1.0, seconds)):
                for model_id, model in serving.models.models.items():
                    if model.status == "active" and (taken := await self.tools.save(model)) is not None:
                        snapshots[model_id] = taken
        except (HeadraceError, OSError) as error:
            logger.warning("lane %d is released without all its snapshots: %s", self.lane, said(error))
        await self._commit_release(serving, snapshots, max(1.0, seconds))

    async def _commit_release(
        self, serving: _Serving, snapshots: Mapping[str, TakenSnapshot] | None = None, seconds: float = _LAST_COMMIT_SECONDS
    ) -> None:
        """Commit that the lane was released in order. A new owner has fenced this commit already."""
        for model in serving.models.models.values():
            if model.intent is not None and model.intent.attempts:  # its batch has not ended this worker
                model.change(intent=model.intent.model_copy(update={"attempts": 0}))
        try:
            async with deadline(seconds):
                await serving.committer.commit(snapshots=snapshots, clean=True)
        except FencedError as error:
            logger.info("lane %d has another owner already: %s", self.lane, said(error))
        except (OutcomeUnknownError, TimeoutError) as error:
            logger.info("lane %d is released without a last record of its owner: %s", self.lane, said(error))
