"""A lane on this worker: claim it, serve it, and give it up.

Claiming is, in this order: start the transactional producer, which fences the former owner; read the lane's `models` to the end
that was written; then stand at the lane's low-water mark (design section 4, exactly-once rules 1 to 5). Serving is three tasks on
one event loop: reading, training, and reporting what no step carries. After anything but a clean commit, all memory is void and
the lane is claimed again, if the group still gives it to us.

Guarantees: what this lane commits, it commits as the owner; a lost lane's running step is cancelled. Gives up: steps of one lane
side by side.
"""

import asyncio
import logging
from collections.abc import Callable

from headrace.consumers.admission_pool import AdmissionPool
from headrace.consumers.cut import Batch, next_batch
from headrace.consumers.duplicates import DuplicateWindow
from headrace.consumers.kl_references import KlReferences
from headrace.consumers.lane_book import LaneBook
from headrace.consumers.lane_commands import CommandHandler, problem_of
from headrace.consumers.lane_intake import MAX_PENDING, LaneIntake
from headrace.consumers.lane_phase import LanePhase, move
from headrace.consumers.lane_reader import LaneReader
from headrace.consumers.lane_writer import FencedError, LaneWriter, OutcomeUnknownError
from headrace.consumers.model_run import ModelRun
from headrace.consumers.recover import LaneMemory, read_states
from headrace.consumers.snapshots import SnapshotKeeper
from headrace.consumers.step_files import load_duplicates
from headrace.consumers.step_runner import BatchGivenUpError, StepRunner, finish_job
from headrace.consumers.transaction import CommittedStep, build
from headrace.consumers.world import TrainerWorld
from headrace.core.errors import HeadraceError
from headrace.core.kafka import client_options
from headrace.core.settings import Settings
from headrace.core.store import ObjectStore
from headrace.schemas.jobs import JobState
from headrace.schemas.reasons import RejectionReason
from headrace.schemas.state import Intent

logger = logging.getLogger(__name__)


class UnfitWorkerError(HeadraceError):
    """This worker's configuration does not fit a model that is trained already."""


class Lane:
    """One lane.

    Args:
        lane: Partition number.
        settings: All settings.
        store: Object store.
        pool: Tokenizing process.
        world: The device.
        wanted: Whether the group still gives us this lane.
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
    ) -> None:
        self.lane = lane
        self.phase = LanePhase.CLAIMING
        self._settings = settings
        self._topics = settings.topic_names
        self._options = client_options(settings.kafka, f"headrace-lane-{lane}")
        self._source = f"headrace/worker/{settings.worker.group}/lane/{lane}"
        self._store = store
        self._pool = pool
        self._wanted = wanted
        self._work_dir = settings.worker.work_dir.absolute()
        self._references = KlReferences(self._options, self._topics.steps, lane, store, self._work_dir / f"references-{lane}")
        self._steps = StepRunner(settings, store, world, lane, self._references)
        self._keeper = SnapshotKeeper(store)
        self._committing = asyncio.Lock()
        self._stepping = False

    async def run(self) -> None:
        """Own the lane until it is lost or the task is cancelled."""
        try:
            while self._wanted():
                try:
                    await self._own()
                except* (FencedError, OutcomeUnknownError) as errors:
                    logger.warning("lane %d: %s; what happened is read after fencing", self.lane, errors.exceptions[0])
                    self.phase = move(self.phase, LanePhase.FENCED)
                # A member that was cut off learns by its next heartbeat that the lane is another's. Claiming before that would fence the
                # rightful owner, which would claim again, and so on for ever (rule 3).
                await asyncio.sleep(2 * self._settings.worker.heartbeat_interval_ms / 1000)
                if self.phase is LanePhase.FENCED:
                    self.phase = move(self.phase, LanePhase.CLAIMING)
        finally:
            self.phase = LanePhase.RELEASED
            logger.info("lane %d is released", self.lane)

    async def _own(self) -> None:
        self._stepping = False
        writer = LaneWriter(self._settings, self.lane, self._options)
        reader = LaneReader(self._options, self._topics, self.lane)
        try:
            await writer.start()
            memory = await read_states(self._options, self._topics, self.lane)
            book = await self._book(memory)
            await reader.start(memory.lane.mark, memory.lane.commands_through)
            self.phase = move(self.phase, LanePhase.SERVING)
            logger.info("lane %d is ours: %d models, from offset %d", self.lane, len(book.runs), book.position)
            commands = CommandHandler(self._settings, book)
            intake = LaneIntake(self._settings, book, reader, commands, self._pool)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read(book, reader, commands, intake))
                tasks.create_task(self._train(book, writer))
                tasks.create_task(self._report(book, writer))
        finally:
            await asyncio.shield(asyncio.gather(writer.stop(), reader.stop(), return_exceptions=True))

    async def _book(self, memory: LaneMemory) -> LaneBook:
        book = LaneBook(state=memory.lane, position=memory.lane.mark)
        for model_id, state in memory.models.items():
            stored = b""
            if state.snapshot is not None and state.status == "active":
                folder = self._work_dir / f"claim-{self.lane}-{model_id}"
                stored = await load_duplicates(self._store, state.snapshot, folder)
            if state.status == "active" and (problem := problem_of(state.settings, self._settings.base_models)) is not None:
                # Its groups must not be refused because one worker is set up wrongly: nothing of the lane is touched.
                raise UnfitWorkerError(f"model {state.name} ({model_id}) can't be trained by this worker: {problem}")
            window = DuplicateWindow(self._settings.worker.duplicate_window, stored)
            book.runs[model_id] = ModelRun.of(state, window, self.lane)
        return book

    async def _read(self, book: LaneBook, reader: LaneReader, commands: CommandHandler, intake: LaneIntake) -> None:
        while True:
            reader.hold_groups(hold=self._stepping and self._full(book))
            new_commands, groups = await reader.read()
            if new_commands:
                commands.apply(new_commands)
            if groups:
                await intake.take(groups)

    def _full(self, book: LaneBook) -> bool:
        """Whether enough waits for now. Asked only while a step runs: without one, what completes a bucket may be the next record."""
        waiting = sum(len(run.waiting) for run in book.runs.values())
        return waiting > MAX_PENDING // 2 or book.waiting_bytes > self._settings.worker.read_ahead_bytes

    async def _train(self, book: LaneBook, writer: LaneWriter) -> None:
        while True:
            await book.changed.wait()
            book.changed.clear()
            while (chosen := _longest_waiting(book)) is not None:
                self._stepping = True
                await self._step(book, writer, *chosen)
                self._stepping = False
            book.note_unreported()  # the cut may have refused groups

    async def _step(self, book: LaneBook, writer: LaneWriter, run: ModelRun, batch: Batch) -> None:
        if batch.job_id is not None and _state_of(run, batch.job_id) is JobState.PENDING:
            # RUNNING is committed before the step, with the intent: what subscribers see never runs ahead of the log (design 12).
            run.intent = Intent(step=run.state.policy_version + 1, offsets=tuple(waiting.offset for waiting in batch.groups), reason="job")
            run.move_job(batch.job_id, JobState.RUNNING)
            await self._commit(book, writer)
        try:
            step = await self._steps.run(run, batch)
        except BatchGivenUpError as error:
            self._give_up(run, batch, str(error))
            await self._commit(book, writer)
            return
        # No await from here to the commit's own list: a commit in between would say these things without the step.
        for lost in batch.lost:
            run.reject_members(lost.waiting, lost.members)
        finish_job(run, step)
        await self._commit(book, writer, step)
        self._references.note(step.record)
        if step.snapshot is not None:
            await self._keeper.committed(run.state.model_id, step.snapshot)
        logger.info(
            "step %d of %s: %d groups, loss %s, %.3f s",
            step.record.step,
            run.state.name,
            step.record.groups,
            step.record.loss,
            step.completed.seconds,
        )

    def _give_up(self, run: ModelRun, batch: Batch, message: str) -> None:
        for waiting in batch.groups:
            run.refuse(
                offset=waiting.offset,
                group_id=waiting.group.group_id,
                job_id=batch.job_id,
                reason=RejectionReason.STEP_FAILED,
                detail=message,
            )
        if batch.job_id is not None:
            run.move_job(batch.job_id, JobState.FAILED, message=message)
        run.intent = None
        run.touch()

    async def _report(self, book: LaneBook, writer: LaneWriter) -> None:
        while True:
            await book.unreported.wait()
            # A linger, not a wait for something: refusals that come together go together, or with the step that comes first.
            await asyncio.sleep(self._settings.worker.refusal_linger_seconds)
            book.unreported.clear()
            if book.has_news:
                await self._commit(book, writer)

    async def _commit(self, book: LaneBook, writer: LaneWriter, step: CommittedStep | None = None) -> None:
        """Commit all news, and the step.

        Raises:
            FencedError, OutcomeUnknownError: memory is void.
        """
        async with self._committing:
            transaction = build(
                topics=self._topics,
                source=self._source,
                lane=book.state,
                position=book.position,
                runs=book.runs.values(),
                dead_letters=book.dead_letters,
                step=step,
            )
            await writer.commit(transaction.records, transaction.lane.mark)
            transaction.apply()
            del book.dead_letters[: transaction.dead_letters]
            # Commands may have been applied while the commit was on its way: their position stays ours.
            book.state = transaction.lane.model_copy(update={"commands_through": book.state.commands_through})


def _longest_waiting(book: LaneBook) -> tuple[ModelRun, Batch] | None:
    """The complete batch that has waited longest, of all models."""
    ready = [(run, batch) for run in book.runs.values() if (batch := next_batch(run)) is not None]
    return min(ready, key=lambda pair: pair[1].completed_at, default=None)


def _state_of(run: ModelRun, job_id: str) -> JobState | None:
    document = run.jobs[job_id].document
    return None if document is None else document.state
