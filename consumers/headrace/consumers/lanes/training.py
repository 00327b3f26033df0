"""The lane's steps, one after another: the complete batch that has waited longest, its intent, its step, its commit.

Guarantees: what a clock decided, and a batch that may have ended the worker before, is an intent in the log before its step runs
(exactly-once rules 9 and 10); a worker counts a batch once at most, when its own computing begins, and takes that back when the batch waits
for the end of an outage (`core.outages`): the worker lives, so the batch does not end it; a step whose job or model was given up meanwhile
is not committed; a model whose state can't be had again is stopped as diverged, and the others go on.
Limitations: steps of one lane run one after another.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, TypeVar

from headrace.consumers.lanes.committer import LaneCommitter
from headrace.consumers.memory.book import LaneBook, RunningStep
from headrace.consumers.memory.held import go_on, wait
from headrace.consumers.memory.model_run import ModelRun
from headrace.consumers.memory.transaction import CommittedStep
from headrace.consumers.steps.ahead import Following
from headrace.consumers.steps.catch_up import ModelDivergedError, state_key
from headrace.consumers.steps.cut import Batch, next_batch, short_of_nodes
from headrace.consumers.steps.foresight import foreseen
from headrace.consumers.steps.runner import BatchGivenUpError, CannotBeginError, StepRunner, finish_job
from headrace.consumers.steps.snapshots import SnapshotKeeper
from headrace.core.outages import outlast
from headrace.core.store import DigestMismatchError, InvalidKeyError, ObjectNotFoundError
from headrace.schemas.jobs import JobState
from headrace.schemas.reasons import RejectionReason
from headrace.schemas.state import Intent
from headrace.trainer.plan import BaseUnusableError, StateKey
from headrace.trainer.rank import RankDiedError, StepDivergedError, StepFailedError, cause_of

logger = logging.getLogger(__name__)

R = TypeVar("R")


class LaneTraining:
    """Trains what the lane's buckets hold.

    Args:
        book: The lane's memory.
        committer: Commits it.
        steps: Runs steps.
        keeper: Deletes old snapshots.
        max_attempts: `worker.max_step_attempts`.
        counted: The states from which this worker process has begun a step that it counted; it adds to them.
    """

    def __init__(
        self,
        book: LaneBook,
        committer: LaneCommitter,
        steps: StepRunner,
        keeper: SnapshotKeeper,
        *,
        max_attempts: int,
        counted: set[StateKey],
    ) -> None:
        self._book = book
        self._committer = committer
        self._steps = steps
        self._keeper = keeper
        self._max_attempts = max_attempts
        self._counted = counted
        self._stepping: ModelRun | None = None
        steps.waits = self._acquit
        self._proven: set[str] = set()
        self._deleting: set[asyncio.Task[None]] = set()
        self.leaving = False
        """No step is begun any more."""
        self.stepping = False
        """Whether a step runs."""

    async def run(self) -> None:
        """Train until the lane leaves, or the task is cancelled."""
        try:
            while not self.leaving:
                await self._book.changed.wait()
                self._book.changed.clear()
                while (found := self._next()) is not None:
                    self.stepping = True
                    run, batch = found
                    if batch is not None:
                        await self._step(run, batch)
                    elif run.settling:
                        await self._settle(run)
                    else:
                        await self._begin_anew(run)
                    self.stepping = False
                self._book.note_unreported()  # the cut may have refused groups
        finally:
            self._steps.ahead.drop()
            for task in self._deleting:
                task.cancel()

    def leave(self) -> None:
        """Begin no step any more; `run` returns after the one that runs, and the one that was begun ahead of its commit."""
        self.leaving = self._steps.ahead.leaving = True
        self._book.changed.set()

    def _next(self) -> tuple[ModelRun, Batch | None] | None:
        """A model that begins anew, else the complete batch that has waited longest, of all models, else a model that lacks a snapshot.

        Once the lane leaves, only the step that was begun ahead: the device is past the committed state, and a snapshot of that is to be
        left behind.
        """
        runs, nodes = list(self._book.runs.values()), self._book.state.nodes
        if self.leaving:
            runs = [run for run in runs if run.state.model_id == self._steps.ahead.model_id]
        for run in runs:
            if _begins_anew(run):
                return run, None
        ready = [(run, batch) for run in runs if (batch := next_batch(run, nodes)) is not None]
        for run in runs:
            if run.waiting_for is not None and run.retry.step and not run.settling and all(run is not other for other, _ in ready):
                go_on(run)  # nothing is there to try its base model with
        self._note_short_of_nodes(nodes)
        if self._steps.ahead.model_id not in {run.state.model_id for run, _ in ready}:
            self._steps.ahead.drop()  # a command took it away: others are to begin theirs
        if ready:
            return min(ready, key=lambda pair: pair[1].completed_at)
        return next(((run, None) for run in runs if run.settling and run.trains), None)

    def _coming(self, run: ModelRun, batch: Batch) -> Following:
        def may_still(coming: Batch) -> bool:
            return not self.leaving and _wanted(run, coming)

        return Following(now=partial(self._following, run, batch), may_still=may_still, changed=self._book.changed)

    def _following(self, run: ModelRun, batch: Batch) -> Batch | None:
        """What comes after the batch, if it is committed: the model's own next one, where none of another model waits for longer."""
        nodes = self._book.state.nodes
        if self.leaving or (own := foreseen(run, batch, nodes)) is None:
            return None
        others = [other for other in self._book.runs.values() if other is not run]
        if any(_begins_anew(other) for other in others):
            return None
        waiting = [found for other in others if (found := next_batch(other, nodes)) is not None]
        return own if all(own.completed_at < found.completed_at for found in waiting) else None

    def _note_short_of_nodes(self, nodes: int) -> None:
        for run in self._book.runs.values():
            for job_id, needed in short_of_nodes(run, nodes).items():
                machines = f"it needs {needed} nodes, and the worker that owns lane {self._book.state.lane} has {nodes}"
                run.note_waiting(job_id, f"{machines}: it is trained when one with as many owns the lane (a launcher across machines)")

    async def _step(self, run: ModelRun, batch: Batch) -> None:
        suspect = self._book.unclean and run.state.model_id not in self._proven
        try:
            # A batch under suspicion is counted when the device is its own: while it waits, another's may end the worker.
            async with self._steps.turn() if suspect else nullcontext():
                # Steps that are run again before it are not its own computing: what ends the worker there is not this batch.
                if suspect and not await self._running(run, batch, self._caught_up(run)):
                    return
                if not await self._begin(run, batch, suspect=suspect):
                    return
                # Under suspicion, a step that ends the worker must be known to be the one whose intent is in the log.
                following = Following() if suspect else self._coming(run, batch)
                step = await self._running(run, batch, self._steps.run(run, batch, following))
        except BatchGivenUpError as error:
            self._give_up(run, batch, str(error))
            await self._committer.commit()
            return
        except CannotBeginError as error:
            await self._stopped(run, batch, "stopped", str(error))
            return
        except ModelDivergedError as error:
            await self._stopped(run, batch, "diverged", str(error), own=isinstance(error.__cause__, StepDivergedError))
            return
        except BaseUnusableError as error:
            await self._waits(run, error)
            return
        if step is not None:
            await self._commit(run, step, partial(_finished, run, batch, step))
        else:
            _log_unwanted(run)

    async def _commit(self, run: ModelRun, step: CommittedStep, ready: Callable[[], bool]) -> None:
        if not await self._committer.commit(step, ready=ready):
            _log_unwanted(run)
            return
        self._proven.add(run.state.model_id)
        self._steps.committed(step.record)
        if step.snapshot is not None:
            deleting = asyncio.create_task(self._keeper.committed(run.state))
            self._deleting.add(deleting)
            deleting.add_done_callback(self._deleting.discard)
        record = step.record
        logger.info(
            "step %d of %s: %d groups, loss %s, %.3f s", record.step, run.state.name, record.groups, record.loss, step.completed.seconds
        )

    async def _begin(self, run: ModelRun, batch: Batch, *, suspect: bool) -> bool:
        """Commit the intent where one is needed; False: the batch is given up."""
        number = run.state.policy_version + 1
        before = run.intent if run.intent is not None and run.intent.step == number else None
        attempts = 0 if before is None else before.attempts
        counts = suspect and state_key(run.state) not in self._counted
        if counts and attempts >= self._max_attempts:
            message = f"its step has ended the worker {attempts} times (worker.max_step_attempts)"
            self._give_up(run, batch, message)
            await self._committer.commit()
            return False
        starts = batch.job_id is not None and _state_of(run, batch.job_id) is JobState.PENDING
        if not (starts or counts or (before is None and batch.cut == "linger")):
            return True
        if starts or counts:
            self._counted.add(state_key(run.state))
        run.intent = Intent(
            step=number,
            offsets=batch.offsets,
            reason="linger" if batch.cut == "linger" else "attempt" if batch.job_id is None else "job",
            job_id=batch.job_id,
            cut=batch.cut,
            attempts=attempts + 1 if counts or starts else attempts,
        )
        run.touch()
        if starts:
            # RUNNING is committed before the step, with the intent: what subscribers see never runs ahead of the log (design 12).
            run.move_job(str(batch.job_id), JobState.RUNNING)
        await self._committer.commit()
        self._proven.add(run.state.model_id)
        return _wanted(run, batch)

    async def _caught_up(self, run: ModelRun) -> bool:
        await self._steps.caught_up(run)
        return True

    async def _acquit(self) -> None:
        """The step waits for the end of an outage: its batch has not ended the worker, and this attempt does not count."""
        run = self._stepping
        if run is None or run.intent is None or run.intent.step != run.state.policy_version + 1 or not run.intent.attempts:
            return
        if state_key(run.state) in self._counted:
            run.intent = run.intent.model_copy(update={"attempts": run.intent.attempts - 1})
            run.touch()
            await asyncio.shield(self._committer.commit())  # a commit that is cancelled leaves its outcome open

    async def _running(self, run: ModelRun, batch: Batch, work: Coroutine[Any, Any, R]) -> R | None:
        """Work for the step, as a task that a command may end; None: one did."""
        task = asyncio.create_task(work, name=f"step-{run.state.name}")
        self._book.running = RunningStep(model_id=run.state.model_id, job_id=batch.job_id, offsets=frozenset(batch.offsets), task=task)
        self._stepping = run
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise  # the lane itself is given up
            return None
        finally:
            self._book.running = self._stepping = None

    async def _begin_anew(self, run: ModelRun) -> None:
        why = "be resumed" if run.start_from is None else f"begin from {run.start_from.snapshot.uri}"
        try:
            step = await outlast(f"{run.state.name}, which is to {why},", lambda: self._steps.begin_anew(run))
        except BaseUnusableError as error:
            await self._waits(run, error)
            return
        except (ModelDivergedError, ObjectNotFoundError, DigestMismatchError, InvalidKeyError, StepFailedError, RankDiedError) as error:
            detail = f"it can't {why}: {cause_of(error)}"
            forked = run.start_from is not None
            run.rebasing = run.start_from = None
            run.set_status("stopped" if forked else "diverged", detail)
            await self._committer.commit()
            return
        await self._commit(run, step, partial(_begun_anew, run))

    async def _settle(self, run: ModelRun) -> None:
        """Store a snapshot of a model that has no step for long: what its last steps trained on may go, retention takes it some day."""
        run.settling = False
        try:
            taken = await outlast(f"the snapshot of step {run.state.policy_version} of {run.state.name}", lambda: self._steps.settle(run))
        except BaseUnusableError as error:
            run.settling = True
            await self._waits(run, error)
            return
        except ModelDivergedError as error:
            await self._stopped(run, None, "diverged", str(error))
            return
        if taken is not None and run.status == "active":
            await self._committer.commit(snapshots={run.state.model_id: taken})
            logger.info("step %d of %s has a snapshot now", run.state.policy_version, run.state.name)

    async def _waits(self, run: ModelRun, error: BaseUnusableError) -> None:
        """The batch stays as it is, until the base model can be used; this attempt does not count."""
        if run.intent is not None and run.intent.attempts and state_key(run.state) in self._counted:
            self._counted.discard(state_key(run.state))
            run.intent = run.intent.model_copy(update={"attempts": run.intent.attempts - 1})
        wait(run, cause_of(error), ranks=True)
        await self._committer.commit()

    async def _stopped(
        self, run: ModelRun, batch: Batch | None, status: Literal["stopped", "diverged"], detail: str, *, own: bool = False
    ) -> None:
        """Stop a model. Its job waits for it. If the batch's own step diverges (`own`), its groups are rejected: it would do so again."""
        said = f"the model {'has diverged' if status == 'diverged' else 'is stopped'}: {detail}"
        logger.error("%s: %s", run.state.name, said)
        run.intent = None
        run.set_status(status, detail)
        if batch is not None and batch.job_id is not None and batch.job_id in run.jobs:
            if own and _state_of(run, batch.job_id) is not JobState.PAUSED:
                run.move_job(batch.job_id, JobState.FAILED, message=said)
                run.refuse_all(RejectionReason.MODEL_STOPPED, said, batch.job_id)
            else:
                run.note_waiting(batch.job_id, said)
        elif batch is not None and own:
            self._refuse(run, batch, said)
        await self._committer.commit()

    def _refuse(self, run: ModelRun, batch: Batch, message: str) -> None:
        for waiting in batch.groups:
            run.refuse(
                offset=waiting.offset,
                group_id=waiting.group.group_id,
                job_id=batch.job_id,
                reason=RejectionReason.STEP_FAILED,
                detail=message,
            )

    def _give_up(self, run: ModelRun, batch: Batch, message: str) -> None:
        self._refuse(run, batch, message)
        if batch.job_id is not None and batch.job_id in run.jobs:
            run.move_job(batch.job_id, JobState.FAILED, message=message)
        run.intent = None
        run.lingered = False
        run.touch()


def _begins_anew(run: ModelRun) -> bool:
    return run.usable and (run.rebasing is not None or run.start_from is not None)


def _begun_anew(run: ModelRun) -> bool:
    if wanted := _begins_anew(run):
        go_on(run)
    return wanted


def _finished(run: ModelRun, batch: Batch, step: CommittedStep) -> bool:
    """Say what the step leads to; False: a command took the batch away meanwhile."""
    if not _wanted(run, batch):
        return False
    go_on(run)
    for lost in batch.lost:
        run.reject_members(lost.waiting, lost.members, listed=True)
    finish_job(run, step)
    return True


def _log_unwanted(run: ModelRun) -> None:
    logger.info("step %d of %s is not wanted any more", run.state.policy_version + 1, run.state.name)


def _wanted(run: ModelRun, batch: Batch) -> bool:
    """Whether nothing happened meanwhile that takes the batch away: a deletion, a cancellation, a pause."""
    if run.status != "active" or any(offset not in run.waiting for offset in batch.offsets):
        return False
    return batch.job_id is None or _state_of(run, batch.job_id) is JobState.RUNNING


def _state_of(run: ModelRun, job_id: str) -> JobState | None:
    job = run.jobs.get(job_id)
    return None if job is None or job.document is None else job.document.state
