"""One step of one model, from its batch to its commit, in the order in which it happens.

1. the intent, where a clock, a job or a suspicion needs one; 2. the device at the committed state; 3. the plan; 4. the ranks, or the
prepared step that ran already; 5. the next step is prepared; 6. report and files are stored; 7. ledger record and weights event; 8. the
commit. Guarantees: a clock's decision, a job's start, and a batch that may have ended the worker before are intents in the log before their
step runs (the intent-first and attempt-limit invariants). Files are durable before the commit (durable-before-commit). A worker counts a
batch at most once, when its own computing begins, and takes that back when the batch waits for the end of an outage: the worker lives, so
the batch does not end it. A step that fails `worker.max_step_attempts` times on this worker raises `BatchGivenUpError`, so that a poisonous
batch can't stop a lane. An outage is no failure: the step waits, and a computed step is not computed again. Limitations: one step of a lane
at a time.
"""

import asyncio
import logging
import shutil
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

from headrace.consumers.worker.base_models import base_problem, resume_with_base, settings_problem
from headrace.consumers.worker.commits import LaneCommitter
from headrace.consumers.worker.jobs import evaluation_of, options_of, without_evaluation
from headrace.consumers.worker.kl_references import ReferenceMissingError
from headrace.consumers.worker.lane_model import LaneModel, member_events
from headrace.consumers.worker.lane_models import LaneModels, RunningStep
from headrace.consumers.worker.ledger_record import step_summary, step_to_commit, why_nothing_trained
from headrace.consumers.worker.pipeline import PreparedStep, same_step
from headrace.consumers.worker.plans import EvaluationSetError, config_of, state_key
from headrace.consumers.worker.recovery import ModelDivergedError
from headrace.consumers.worker.selection import Batch
from headrace.consumers.worker.step_tools import StepTools, Timer
from headrace.consumers.worker.storage.step_files import StoredStep, store_for_deployment, store_step
from headrace.consumers.worker.storage.step_report import build_report
from headrace.consumers.worker.storage.stored_snapshots import RESUME
from headrace.consumers.worker.transaction import StepToCommit
from headrace.consumers.worker.world import StateNotHeldError, Turn
from headrace.core.outages import outlast
from headrace.core.store import DigestMismatchError, InvalidKeyError, ObjectNotFoundError
from headrace.schemas.jobs import JobState
from headrace.schemas.state import Intent
from headrace.trainer.plan import BaseUnusableError, StateKey, StepPlan, StepResult
from headrace.trainer.rank import BaseNotLoadedError, RankDiedError, StepDivergedError, StepFailedError, cause_of

logger = logging.getLogger(__name__)

R = TypeVar("R")


class BatchGivenUpError(Exception):
    """The step can't succeed; the message says why."""


class CannotBeginError(Exception):
    """The weights that the model begins with can't be used: it stops, and may be resumed when they can."""


class LaneSteps:
    """Takes the steps of one owner of a lane.

    `counted` has the states from which this worker process has begun a step that it counted. `select_next` gives the batch that follows a
    model's current batch if that is committed; None if it can't be known.
    """

    def __init__(
        self,
        models: LaneModels,
        committer: LaneCommitter,
        tools: StepTools,
        *,
        counted: set[StateKey],
        select_next: Callable[[LaneModel, Batch], Batch | None],
    ) -> None:
        self._models = models
        self._committer = committer
        self._tools = tools
        self._counted = counted
        self._select_next = select_next
        self._max_attempts = tools.settings.worker.max_step_attempts
        self._proven: set[str] = set()
        """Models of which no batch is under suspicion any more."""
        self._deleting: set[asyncio.Task[None]] = set()

    async def take(self, model: LaneModel, batch: Batch) -> None:
        """One step, from its batch to its commit; nothing, if a command takes the batch away meanwhile.

        Raises:
            BatchGivenUpError: it can't succeed.
            CannotBeginError: it is the model's first, and the weights that the model begins with can't be used.
            ModelDivergedError: the committed state can't be recovered, or an update made weights that are no longer finite.
            BaseUnusableError: the base model can't be used; the batch is not at fault.
            FencedError, OutcomeUnknownError: a commit failed, and memory is void.
        """
        suspect = self._models.unclean and model.state.model_id not in self._proven
        # A batch under suspicion is counted when the device is its own: while it waits for the device, another step may end the worker.
        async with self._tools.world.turn() if suspect else nullcontext() as turn:
            # Steps that are run again before it are not part of it: if they end the worker, this batch is not at fault.
            if suspect and not await self._cancellable(model, batch, self._recover(model, turn)):
                return
            if not await self._commit_intent(model, batch, suspect=suspect):
                return
            step = await self._cancellable(model, batch, self._run_and_store(model, batch, turn))
        if step is None:
            _log_unwanted(model)
        else:
            await self.commit(model, step, lambda: self._finish(model, batch, step))

    async def _cancellable(self, model: LaneModel, batch: Batch, work: Coroutine[Any, Any, R]) -> R | None:
        """Work for the step, as a task that a command may cancel; None if one did."""
        task = asyncio.create_task(work, name=f"step-{model.state.name}")
        offsets = frozenset(batch.offsets)
        self._models.running = RunningStep(model_id=model.state.model_id, job_id=batch.job_id, offsets=offsets, task=task)
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise  # the lane itself is released
            return None
        finally:
            self._models.running = None

    async def _commit_intent(self, model: LaneModel, batch: Batch, *, suspect: bool) -> bool:
        """Commit the intent where one is needed; False if the batch is not wanted any more."""
        number = model.state.policy_version + 1
        before = model.intent if model.intent is not None and model.intent.step == number else None
        attempts = 0 if before is None else before.attempts
        counts = suspect and state_key(model.state) not in self._counted
        if counts and attempts >= self._max_attempts:
            raise BatchGivenUpError(f"its step has ended the worker {attempts} times (worker.max_step_attempts)")
        starts = batch.job_id is not None and model.job_state(batch.job_id) is JobState.PENDING
        if not (starts or counts or (before is None and batch.cut == "linger")):
            return True
        if starts or counts:
            self._counted.add(state_key(model.state))
        intent = Intent(
            step=number,
            offsets=batch.offsets,
            reason="linger" if batch.cut == "linger" else "attempt" if batch.job_id is None else "job",
            job_id=batch.job_id,
            cut=batch.cut,
            attempts=attempts + 1 if counts or starts else attempts,
        )
        model.change(intent=intent)
        if starts:
            # RUNNING is committed before the step, with the intent: subscribers never see more than the log has.
            model.move_job(str(batch.job_id), JobState.RUNNING)
        await self._committer.commit()
        self._proven.add(model.state.model_id)
        return _is_wanted(model, batch)

    async def _uncount(self, model: LaneModel) -> None:
        """The step waits for the end of an outage: its batch has not ended the worker, and this attempt does not count."""
        if model.intent is None or model.intent.step != model.state.policy_version + 1 or not model.intent.attempts:
            return
        if state_key(model.state) in self._counted:
            model.change(intent=model.intent.model_copy(update={"attempts": model.intent.attempts - 1}))
            await asyncio.shield(self._committer.commit())  # the outcome of a cancelled commit would be unknown

    async def _recover(self, model: LaneModel, turn: Turn | None) -> bool:
        """Bring the device to the committed state."""

        async def recovered() -> bool:
            while True:
                try:
                    await self._tools.recovery.ready(model.state, turn)
                except StateNotHeldError as error:
                    logger.warning("%s: recovered once more", error)
                else:
                    return True

        return await outlast(_called(model), recovered)

    async def _run_and_store(self, model: LaneModel, batch: Batch, turn: Turn | None) -> StepToCommit:
        timer = Timer()
        suspect = turn is not None
        called = _called(model)
        plan, result = await outlast(called, lambda: self._run(model, batch, turn, timer), waits=lambda: self._uncount(model))
        try:
            if not suspect:  # a suspect that ends the worker must be the batch whose intent is in the log
                await self._prepare_next(model, batch, plan, result)
            return await self.store(model, batch, plan, result, timer)
        except BaseException:
            shutil.rmtree(plan.out_dir, ignore_errors=True)
            self._tools.pipeline.discard()
            raise

    async def _run(self, model: LaneModel, batch: Batch, turn: Turn | None, timer: Timer) -> tuple[StepPlan, StepResult]:
        """The step on the ranks, `worker.max_step_attempts` times at most."""
        self._check_settings(model, batch)
        pipeline = self._tools.pipeline
        while True:
            try:
                if (prepared := await self._take_prepared(model, batch)) is not None:
                    plan, running = prepared.plan, pipeline.take(prepared)
                else:
                    # Before the plan: a rerun fetches a KL reference of its own, and few of them are kept for a model.
                    snapshot = await self._tools.recovery.ready(model.state, turn)
                    attempt = await self._tools.attempts.new(model.state.model_id)
                    plan = await self._tools.plans.of_batch(model, batch, attempt)
                    running = self._tools.world.run(plan, snapshot, turn)
            except StateNotHeldError as error:
                logger.warning("%s: recovered once more", error)  # the world broke, or another model's turn lost the state
                continue
            except (ReferenceMissingError, EvaluationSetError) as error:
                raise BatchGivenUpError(str(error)) from error
            timer.lap("catch_up")
            try:
                result = await running
            except BaseException as error:  # noqa: BLE001 - judged there, and raised if it is not a failed attempt
                shutil.rmtree(plan.out_dir, ignore_errors=True)
                self._handle_failure(model, error)
            else:
                timer.lap("in_world")
                return plan, result

    def _check_settings(self, model: LaneModel, batch: Batch) -> None:
        catalogue = self._tools.settings.base_models
        if (missing := base_problem(model.state.settings, catalogue)) is not None:
            raise BaseUnusableError(missing)
        settings = model.state.settings.model_copy(update={"train": config_of(model, batch)})
        if (problem := settings_problem(settings, catalogue)) is not None:
            raise BatchGivenUpError(problem)

    async def _take_prepared(self, model: LaneModel, batch: Batch) -> PreparedStep | None:
        """The prepared step, if it is this very step; one that is not is discarded."""
        prepared = self._tools.pipeline.from_state(state_key(model.state))
        if prepared is None:
            return None
        same = False
        try:
            same = same_step(prepared.plan, await self._tools.plans.of_batch(model, batch, prepared.plan.attempt))
        finally:
            if not same:
                self._tools.pipeline.discard()
        if not same:
            logger.info("step %d of %s was prepared with another batch or config", prepared.plan.state.step + 1, model.state.name)
        return prepared if same else None

    def _handle_failure(self, model: LaneModel, error: BaseException) -> None:
        """Count a failed attempt; raises if there is no further one, or if the step is not at fault."""
        key = state_key(model.state)
        match error:
            case StateNotHeldError():
                logger.warning("%s: recovered once more", error)  # after it was recovered, as above
                return
            case ObjectNotFoundError() | DigestMismatchError() | InvalidKeyError() if key.step == 0:
                raise CannotBeginError(f"the weights that it begins with can't be used: {error}") from error
            case ObjectNotFoundError() | DigestMismatchError():
                raise ModelDivergedError(f"the snapshot of step {model.state.snapshot_step} can't be used: {error}. {RESUME}") from error
            case StepDivergedError():  # another attempt would compute the same numbers
                self._tools.pipeline.discard()
                raise ModelDivergedError(f"step {key.step + 1}: {cause_of(error).partition('DivergedError: ')[2]}") from error
            case BaseNotLoadedError():
                raise error
            case StepFailedError() | RankDiedError():
                failures = self._tools.failures
                failures[key] += 1
                logger.error("step %d of %s failed (%d)", key.step + 1, key.model_id, failures[key], exc_info=error)
                if failures[key] >= self._max_attempts:
                    del failures[key]
                    raise BatchGivenUpError(cause_of(error)) from error
            case _:  # an outage, a cancellation, another store than the one that trained the model
                self._tools.pipeline.discard()
                raise error

    async def _prepare_next(self, model: LaneModel, batch: Batch, plan: StepPlan, result: StepResult) -> None:
        """Let the device compute the next step while this one is stored and committed, if the log already decides what it is."""
        if self._tools.pipeline.prepared is not None or (following := self._select_next(model, batch)) is None:
            return
        try:
            attempt = await self._tools.attempts.new(model.state.model_id)
            self._tools.pipeline.prepare(await self._tools.plans.after(model, plan, result, following, attempt))
        except Exception as error:  # noqa: BLE001 - the next step fails with it itself, this one has run
            logger.debug("the step after step %d of %s is not prepared: %r", result.key.step, model.state.name, error)

    async def store(self, model: LaneModel, batch: Batch, plan: StepPlan, result: StepResult, timer: Timer) -> StepToCommit:
        """Store the report and the files of a step that has run, and make its ledger record."""
        # Both at one moment: the snapshot's window, and how many of the ids since the last snapshot it contains.
        duplicates, window_ids = model.window.to_bytes() if plan.snapshot else b"", model.window.since
        since, reported = model.since_step, model.since_step.counts
        lost = [event for group in batch.lost for event in member_events(model.state.model_id, model.lane, group.waiting, group.members)]
        report = await asyncio.to_thread(  # 0.1 s for thousands of trajectories
            build_report,
            plan=plan,
            batch=batch,
            result=result,
            lane=model.lane,
            refused=tuple(since.groups),
            refused_trajectories=[*since.trajectories, *lost],
            unlisted=since.unlisted,
            timings=timer.laps,
            rows=plan.report_rows,
        )
        options, store = options_of(model.jobs, batch.job_id), self._tools.store

        async def stored_files() -> tuple[StoredStep, str | None]:
            stored = await store_step(store, Path(plan.out_dir), result, duplicates, report)
            deployment = options.hot_load_deployment
            return stored, None if deployment is None else await store_for_deployment(store, deployment, result.key, stored)

        # A computed step stays: only its files wait for the end of an outage.
        called = f"{_called(model)}, which is computed and stored now,"
        stored, identity = await outlast(called, stored_files, waits=lambda: self._uncount(model))
        await asyncio.to_thread(shutil.rmtree, plan.out_dir, ignore_errors=True)
        return step_to_commit(
            model,
            batch,
            plan,
            result,
            stored,
            options=options,
            window_ids=window_ids,
            reported=reported,
            hot_load_identity=identity,
        )

    def _finish(self, model: LaneModel, batch: Batch, step: StepToCommit) -> bool:
        """Apply what the step leads to, directly before its transaction is built; False if the batch is not wanted any more."""
        if not _is_wanted(model, batch):
            return False
        resume_with_base(model)
        for group in batch.lost:
            model.reject_members(group.waiting, group.members, in_report=True)
        if batch.job_id is not None:
            model.move_job(batch.job_id, JobState.COMPLETED, **_document_fields(step))
        model.use_groups(batch.offsets)
        return True

    async def commit(self, model: LaneModel, step: StepToCommit, ready: Callable[[], bool]) -> None:
        """Commit a step, unless it is not wanted any more; then apply it."""
        if not await self._committer.commit(step, ready=ready):
            _log_unwanted(model)
            return
        self._proven.add(model.state.model_id)
        self._tools.references.note(step.record)
        if step.snapshot is not None:
            deleting = asyncio.create_task(self._tools.keeper.committed(model.state))
            self._deleting.add(deleting)
            deleting.add_done_callback(self._deleting.discard)
        record, seconds = step.record, step.completed.seconds
        logger.info("%s", step_summary(model.state.name, record, seconds))
        if (why := why_nothing_trained(record)) is not None:
            logger.warning("step %d of %s trained nothing: %s", record.step, model.state.name, why)

    def close(self) -> None:
        """Discard the prepared step, and cancel deletions."""
        self._tools.pipeline.discard()
        for task in self._deleting:
            task.cancel()


def _document_fields(step: StepToCommit) -> dict[str, Any]:
    """What a completed job's document contains about its step."""
    record = step.record
    return {
        "step": record.step,
        "num_sequences": step.num_sequences,
        "metrics": without_evaluation(record.metrics),
        "evaluation": evaluation_of(record.metrics),
        "logprobs": record.logprobs,
        "hot_load_identity": record.hot_load_identity,
        "accelerator_seconds": {step.accelerator: step.completed.seconds * record.fingerprint.world_size},
    }


def _is_wanted(model: LaneModel, batch: Batch) -> bool:
    """Whether the batch is still there: no deletion, cancellation or pause came meanwhile."""
    if model.status != "active" or any(offset not in model.waiting for offset in batch.offsets):
        return False
    return batch.job_id is None or model.job_state(batch.job_id) is JobState.RUNNING


def _called(model: LaneModel) -> str:
    """The next step, for the log."""
    return f"step {model.state.policy_version + 1} of {model.state.name}"


def _log_unwanted(model: LaneModel) -> None:
    logger.info("%s is not wanted any more", _called(model))
