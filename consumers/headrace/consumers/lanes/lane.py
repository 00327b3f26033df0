"""A lane on this worker: claim it, serve it, and give it up.

Claiming is, in this order: start the transactional producer, which fences the former owner; read the lane's `models` to the end
that was written; put pending groups back into their buckets, each by its offset; then read on where the lane stood (design section 4,
exactly-once rules 1 to 8). Serving is six tasks on one event loop: reading, training, reporting what no step carries, the clock,
collecting what lost attempts left in the store, and deleting weights that clients deleted. After anything but a clean commit, all memory is
void and the lane is claimed again, if the group still gives it to us.

Guarantees: what this lane commits, it commits as the owner; a lost lane's running step is cancelled; what a claim reads does not grow with
the log; where retention took what was needed, the models that it concerns stop and say which offsets. A lane that is given up in order
leaves snapshots behind. Gives up: steps of one lane side by side.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from headrace.consumers.intake.admission_pool import AdmissionPool
from headrace.consumers.lanes.clock import LaneClock
from headrace.consumers.lanes.commands import CommandHandler
from headrace.consumers.lanes.committer import LaneCommitter
from headrace.consumers.lanes.intake import LaneIntake
from headrace.consumers.lanes.pending import recover_pending
from headrace.consumers.lanes.phase import LanePhase, move
from headrace.consumers.lanes.reader import LaneReader
from headrace.consumers.lanes.recover import LaneMemory, read_states
from headrace.consumers.lanes.training import LaneTraining
from headrace.consumers.lanes.writer import FencedError, LaneWriter, OutcomeUnknownError
from headrace.consumers.memory.book import LaneBook
from headrace.consumers.memory.held import MAX_PENDING, go_on, wait
from headrace.consumers.memory.model_run import ModelRun
from headrace.consumers.memory.transaction import TakenSnapshot
from headrace.consumers.steps.catalogue import base_problem
from headrace.consumers.steps.doomed_weights import WeightsDeleter
from headrace.consumers.steps.kept_snapshots import unknown_versions, window_of
from headrace.consumers.steps.kl_references import KlReferences
from headrace.consumers.steps.orphans import OrphanCollector, Owned
from headrace.consumers.steps.runner import StepRunner
from headrace.consumers.steps.snapshots import SnapshotKeeper
from headrace.consumers.steps.world import TrainerWorld
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
from headrace.trainer.plan import BaseUnusableError, StateKey
from headrace.trainer.rank_main import nodes_of_launcher

logger = logging.getLogger(__name__)


_HAND_OVER_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Serving:
    """What one ownership of the lane works with."""

    book: LaneBook
    reader: LaneReader
    committer: LaneCommitter
    commands: CommandHandler
    intake: LaneIntake
    training: LaneTraining
    clock: LaneClock


class Lane:
    """One lane.

    Args:
        lane: Partition number.
        settings: All settings.
        store: Object store.
        pool: Tokenizing process.
        world: The device.
        wanted: Whether the group still gives us this lane.
        counted: What this worker process has counted as begun, of all its lanes; see `LaneTraining`.
    """

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
        self._settings = settings
        self._topics = settings.topic_names
        self._options = client_options(settings.kafka, f"headrace-lane-{lane}")
        self._store = store
        self._pool = pool
        self._world = world
        self._wanted = wanted
        references = settings.worker.work_dir.absolute() / f"references-{lane}"
        kl = KlReferences(self._options, self._topics.steps, lane, store, references)
        self._steps = StepRunner(settings, store, world, lane, pool=pool, references=kl)
        self._orphans = OrphanCollector(settings, store, lane)
        self._leaving = asyncio.Event()
        self._last: LaneBook | None = None

    def leave(self) -> None:
        """Give the lane up in order: the step that runs may end, snapshots are stored; `run` returns then."""
        self._leaving.set()

    async def run(self) -> None:
        """Own the lane until it is lost or left, or the task is cancelled."""
        try:
            while self._wanted() and not self._leaving.is_set():
                try:
                    await self._own()
                except* (FencedError, OutcomeUnknownError, OffsetLostError) as errors:
                    message = "lane %d: %s; what happened is read after fencing"
                    log_trouble(logger, logging.WARNING, errors, message, self.lane, errors.exceptions[0])
                    self.phase = move(self.phase, LanePhase.FENCED)
                if self._leaving.is_set():
                    break
                # A member that was cut off learns by its next heartbeat that the lane is another's. Claiming before that would fence the
                # rightful owner, which would claim again, and so on for ever (rule 3).
                await asyncio.sleep(2 * self._settings.worker.heartbeat_interval_ms / 1000)
                if self.phase is LanePhase.FENCED:
                    self.phase = move(self.phase, LanePhase.CLAIMING)
        finally:
            self.phase = LanePhase.RELEASED
            if self._last is not None:
                self._world.forget(self._last.runs.keys())
            logger.info("lane %d is released", self.lane)

    async def _own(self) -> None:
        writer = LaneWriter(self._settings, self.lane, self._options)
        reader = LaneReader(self._options, self._topics, self.lane, self._settings.groups_topic)
        try:
            await writer.start()
            memory = await read_states(self._options, self._topics, self.lane, self._settings.groups_topic)
            book = self._last = await self._book(memory)
            serving = await self._ready(book, writer, reader)
            self.phase = move(self.phase, LanePhase.SERVING)
            logger.info("lane %d is ours: %d models, from offset %d", self.lane, len(book.runs), book.position)
            try:
                await self._serve(serving)
            except asyncio.CancelledError:
                await self._hand_over(serving)
                raise
        finally:
            await asyncio.shield(asyncio.gather(writer.stop(), reader.stop(), return_exceptions=True))

    async def _book(self, memory: LaneMemory) -> LaneBook:
        lane = memory.lane.model_copy(update={"nodes": nodes_of_launcher()})
        book = LaneBook(state=lane, position=memory.lane.scanned, ledger_end=memory.ledger_end, unclean=not memory.lane.clean)
        for model_id, state in memory.models.items():
            window, problem = await window_of(self._settings, self._store, state)
            unknown = await asyncio.to_thread(unknown_versions, self._store, state, lost=problem is not None)
            run = book.runs[model_id] = ModelRun.of(state.model_copy(update={"unknown_versions": unknown}), window, self.lane)
            if unknown != state.unknown_versions:
                message = "%s: the ledger ends at version %d, but later ones were published; Kafka has lost their records: %s"
                logger.error(message, state.name, state.policy_version, ", ".join(unknown))
                run.touch(urgent=True)
            if run.status == "active" and run.rebasing is None and problem is not None:
                logger.error("%s: the model has diverged: %s", state.name, problem)
                run.set_status("diverged", problem)
            if run.status == "active" and (missing := base_problem(state.settings, self._settings.base_models)) is not None:
                wait(run, missing)
        return book

    async def _ready(self, book: LaneBook, writer: LaneWriter, reader: LaneReader) -> _Serving:
        worker = self._settings.worker
        source = f"headrace/worker/{worker.group}/lane/{self.lane}"
        committer = LaneCommitter(book, writer, self._topics, source)
        commands = CommandHandler(self._settings, book)
        intake = LaneIntake(self._settings, book, reader, commands, self._pool)
        keeper = SnapshotKeeper(self._store, worker.keep_snapshots)
        retention = await retention_ms(self._options, self._settings.groups_topic)
        serving = _Serving(
            book=book,
            reader=reader,
            committer=committer,
            commands=commands,
            intake=intake,
            training=LaneTraining(book, committer, self._steps, keeper, max_attempts=worker.max_step_attempts, counted=self._counted),
            clock=LaneClock(worker, book, committer, retention),
        )
        first = await reader.start(book.position, book.state.commands_through)
        if first > book.position:
            self._records_lost(book, first)
        await self._recover_pending(serving)
        book.note_news()
        return serving

    def _records_lost(self, book: LaneBook, first: int) -> None:
        """Retention took records that nobody has read: whose they were is not known, so every model of the lane stops (rule 7)."""
        these = "this 1 record" if first - book.position == 1 else f"these {first - book.position} records"
        detail = (
            f"{self._settings.groups_topic} partition {self.lane}: offsets {book.position} to {first - 1} were deleted by retention before "
            f"they were read; groups of this model may be among them. `headrace models resume` goes on without {these}, and "
            f"trains on every group of this model from offset {first} on, which wait until then"
        )
        book.position = first
        for run in book.runs.values():
            if run.status == "active":
                logger.error("%s stops: %s", run.state.name, detail)
                run.set_status("stopped", detail)
            elif run.status != "deleted":
                run.set_status(run.status, f"{run.status_detail}; and {detail}")
        book.note_news()

    async def _recover_pending(self, serving: _Serving) -> None:
        """Put pending groups that are not in memory into their buckets; what waits for its base model tries it when that is due."""
        for run in list(serving.book.runs.values()):
            if run.status != "active" or not (run.retry.due if run.waiting_for is not None else run.unread):
                continue
            ranks = run.retry.ranks
            try:
                if (problem := base_problem(run.state.settings, self._settings.base_models)) is not None:
                    raise BaseUnusableError(problem)
                if run.unread:
                    await recover_pending(self._options, self._settings.groups_topic, run, serving.intake)
            except BaseUnusableError as error:
                wait(run, str(error))
            else:
                if run.waiting_for is not None and ranks:
                    run.retry.step = True
                elif run.waiting_for is not None:
                    go_on(run)
            serving.book.note_news()

    async def _serve(self, serving: _Serving) -> None:
        async with asyncio.TaskGroup() as tasks:
            training = tasks.create_task(serving.training.run())
            others = [
                tasks.create_task(self._read(serving)),
                tasks.create_task(serving.clock.report()),
                tasks.create_task(serving.clock.tick()),
                tasks.create_task(self._collect_orphans(serving)),
                tasks.create_task(WeightsDeleter(self._store).run(serving.book.runs.values)),
            ]
            tasks.create_task(self._leave(serving, training, others))

    async def _collect_orphans(self, serving: _Serving) -> None:
        def states() -> dict[str, ModelState]:
            return {model_id: run.state for model_id, run in serving.book.runs.items()}

        async def owned() -> Owned:
            await serving.committer.commit()
            return Owned(states=states(), running=self._steps.attempts.recent)

        await self._orphans.run(states, owned)

    async def _leave(self, serving: _Serving, training: asyncio.Task[None], others: list[asyncio.Task[None]]) -> None:
        """Wait until the lane is to be given up in order, and do that."""
        await self._leaving.wait()
        serving.training.leave()
        await asyncio.wait({training}, timeout=self._settings.worker.release_seconds)
        await serving.committer.quiet()
        for task in (training, *others):
            task.cancel()
        await asyncio.wait({training, *others})
        snapshots: dict[str, TakenSnapshot] = {}
        try:
            async with deadline(max(1.0, self._settings.worker.release_seconds)):
                for model_id, run in serving.book.runs.items():
                    if run.status == "active" and (taken := await self._steps.save(run)) is not None:
                        snapshots[model_id] = taken
        except (HeadraceError, OSError) as error:
            logger.warning("lane %d is given up without all its snapshots: %s", self.lane, said(error))
        await self._hand_over(serving, snapshots, max(1.0, self._settings.worker.release_seconds))

    async def _hand_over(
        self, serving: _Serving, snapshots: Mapping[str, TakenSnapshot] | None = None, seconds: float = _HAND_OVER_SECONDS
    ) -> None:
        """Say that the lane was given up in order, if nobody has taken it over yet; one who has, has fenced this commit."""
        _acquit(serving.book)
        try:
            async with deadline(seconds):
                await serving.committer.commit(snapshots=snapshots, clean=True)
        except FencedError as error:
            logger.info("lane %d has another owner already: %s", self.lane, said(error))
        except (OutcomeUnknownError, TimeoutError) as error:
            logger.info("lane %d is given up without a last record of its owner: %s", self.lane, said(error))

    async def _read(self, serving: _Serving) -> None:
        book, reader = serving.book, serving.reader
        while True:
            reader.hold_groups(hold=serving.training.stepping and self._full(book))
            new_commands, groups = await reader.read()
            if new_commands:
                serving.commands.apply(new_commands)
            await self._recover_pending(serving)
            if groups:
                await serving.intake.take(groups)
            if book.much_is_unwritten:
                await serving.committer.commit()
            book.position = max(book.position, await reader.position())

    def _full(self, book: LaneBook) -> bool:
        """Whether enough waits for now. Asked only while a step runs: without one, what completes a bucket may be the next record."""
        waiting = sum(len(run.waiting) for run in book.runs.values() if run.trains)
        return waiting > MAX_PENDING // 2 or book.waiting_bytes > self._settings.worker.read_ahead_bytes


def _acquit(book: LaneBook) -> None:
    """No batch has ended this worker: none is under suspicion (rule 10)."""
    for run in book.runs.values():
        if run.intent is not None and run.intent.attempts:
            run.intent = run.intent.model_copy(update={"attempts": 0})
            run.touch()
