"""One step of one model: from a cut batch to what its transaction will say.

Guarantees: a step starts from the committed state, caught up if need be; the plan is a pure function of the batch, the config, the model's
state and the step number; files are durable before `run` returns; what the log alone makes the next step is begun while they are stored,
and used only if it is what comes next (`ahead`); a step that fails `worker.max_step_attempts` times in a worker's life is given up as
`step_failed` (its groups are refused, its job fails with the message), so a poisonous batch can't stop a lane. An outage (`core.outages`)
is no failure of the step: it waits, and a computed step is not computed again. A batch that ends the worker itself is counted by the lane,
in intents.
"""

import asyncio
import logging
import shutil
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from headrace.consumers.intake.admission_pool import AdmissionPool
from headrace.consumers.memory.job_documents import evaluation_of, options_of, without_evaluation
from headrace.consumers.memory.model_run import ModelRun
from headrace.consumers.memory.refusals import member_events
from headrace.consumers.memory.transaction import CommittedStep, TakenSnapshot
from headrace.consumers.steps.ahead import Begun, Following, NextPlan, StepAhead, same_step
from headrace.consumers.steps.attempts import Attempts
from headrace.consumers.steps.catalogue import base_problem, problem_of
from headrace.consumers.steps.catch_up import CatchUp, ModelDivergedError, state_key
from headrace.consumers.steps.cut import Batch
from headrace.consumers.steps.evaluation_sets import EvaluationSetError
from headrace.consumers.steps.files import StoredStep, store_for_deployment, store_snapshot, store_step
from headrace.consumers.steps.kept_snapshots import RESUME
from headrace.consumers.steps.kl_references import KlReferences, ReferenceMissingError
from headrace.consumers.steps.plans import StepPlans, config_of
from headrace.consumers.steps.records import StepOutcome, committed_step
from headrace.consumers.steps.report import build_report
from headrace.consumers.steps.rerun import StepReruns
from headrace.consumers.steps.world import StateNotHeldError, TrainerWorld
from headrace.core.outages import outlast
from headrace.core.settings import Settings
from headrace.core.store import DigestMismatchError, InvalidKeyError, ObjectNotFoundError, ObjectStore
from headrace.schemas.jobs import JobState
from headrace.schemas.state import Rebased, StepRecord
from headrace.schemas.weights import WeightsRef
from headrace.trainer.plan import BaseUnusableError, StateKey, StepPlan, StepResult
from headrace.trainer.rank import BaseNotLoadedError, RankDiedError, StepDivergedError, StepFailedError, cause_of

logger = logging.getLogger(__name__)


class BatchGivenUpError(Exception):
    """The step failed for good; the message says why."""


class CannotBeginError(Exception):
    """The weights that the model begins with can't be had: it stops, and may be resumed when they are there."""


@dataclass(slots=True)
class _Timer:
    """Seconds of the worker's own phases."""

    began: float
    laps: dict[str, float]

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.laps[phase] = now - self.began
        self.began = now


class StepRunner:
    """Runs steps for one lane.

    Args:
        settings: Catalogue, working folder.
        store: Object store.
        world: The device.
        lane: Partition number.
        pool: Reads groups again where a step is run again, and evaluation sets.
        references: Policies that KL is measured against.
    """

    def __init__(
        self, settings: Settings, store: ObjectStore, world: TrainerWorld, lane: int, *, pool: AdmissionPool, references: KlReferences
    ) -> None:
        self._settings = settings
        self._store = store
        self._world = world
        self._lane = lane
        self._references = references
        self._plans = StepPlans(settings, store, pool, references)
        reruns = StepReruns(settings, world, pool, lane, references)
        self._max_attempts = settings.worker.max_step_attempts
        self._catch_up = CatchUp(settings, store, lane, world, reruns)
        self._work_dir = settings.worker.work_dir.absolute()
        self._failures: Counter[StateKey] = Counter()
        self.attempts = Attempts(settings)
        self.ahead = StepAhead(world)
        self.waits: Callable[[], Awaitable[None]] | None = None
        """Called when a step begins to wait for the end of an outage."""

    async def run(self, run: ModelRun, batch: Batch, following: Following) -> CommittedStep:
        """Run the step, `worker.max_step_attempts` times at most, and wait for whatever else it needs.

        Args:
            run: The model.
            batch: What it trains on.
            following: The batch that comes next if this step is committed: it is handed over while this one runs, and begun while its
                files are stored.

        Raises:
            BatchGivenUpError: it failed for good.
            CannotBeginError: it is the model's first, and its start weights can't be had.
            ModelDivergedError: the state that it starts from can't be had again, or an update made weights that are no longer sane.
            BaseUnusableError: the base model can't be used; the batch is not at fault.
        """
        return await outlast(_called(run), lambda: self._run(run, batch, following), waits=self.waits)

    async def caught_up(self, run: ModelRun) -> None:
        """Bring the device to the committed state, if steps must be run again for that: `run` inside the same turn finds it.

        Raises:
            ModelDivergedError: it can't be had again.
        """

        async def ready() -> None:
            while True:
                try:
                    await self._catch_up.ready(run.state)
                except StateNotHeldError as error:
                    logger.warning("%s: caught up once more", error)
                else:
                    return

        await outlast(_called(run), ready)

    async def _run(self, run: ModelRun, batch: Batch, following: Following) -> CommittedStep:
        self._check(run, batch)
        key = state_key(run.state)
        while True:
            timer = _Timer(time.perf_counter(), {})
            try:
                plan, snapshot, begun = await self._prepared(run, batch)
            except StateNotHeldError as error:
                logger.warning("%s: caught up once more", error)  # the world broke, or another's turn did
                continue
            except (ReferenceMissingError, EvaluationSetError) as error:
                raise BatchGivenUpError(str(error)) from error
            try:
                timer.lap("catch_up")
                coming = self._coming(run, plan, following)
                try:
                    result = await (self._world.run(plan, snapshot) if begun is None else self.ahead.take(begun))
                    timer.lap("in_world")
                    await self._go_ahead(run, result, coming)
                finally:
                    await coming.cancel()
                return await self._stored(run, batch, plan, result, timer)
            except (ObjectNotFoundError, DigestMismatchError, InvalidKeyError) as error:
                if run.state.policy_version == 0:
                    raise CannotBeginError(f"the weights that it begins with can't be used: {error}") from error
                if isinstance(error, InvalidKeyError):
                    raise  # another store than the one that trained it: this worker is set up wrongly
                raise ModelDivergedError(f"the snapshot of step {run.state.snapshot_step} can't be used: {error}. {RESUME}") from error
            except StateNotHeldError as error:
                logger.warning("%s: caught up once more", error)  # as above, after it was caught up
                shutil.rmtree(plan.out_dir, ignore_errors=True)
            except (StepFailedError, RankDiedError) as error:
                shutil.rmtree(plan.out_dir, ignore_errors=True)
                self._failed(key, error)
            except BaseException:
                shutil.rmtree(plan.out_dir, ignore_errors=True)
                self.ahead.drop()
                raise

    def _check(self, run: ModelRun, batch: Batch) -> None:
        if (missing := base_problem(run.state.settings, self._settings.base_models)) is not None:
            raise BaseUnusableError(missing)
        settings = run.state.settings.model_copy(update={"train": config_of(run, batch)})
        if (problem := problem_of(settings, self._settings.base_models)) is not None:
            raise BatchGivenUpError(problem)

    def _failed(self, key: StateKey, error: StepFailedError | RankDiedError) -> None:
        """Count a failed attempt; raises where there is no other, or where the step is not at fault."""
        if isinstance(error, BaseNotLoadedError):
            raise error
        if isinstance(error, StepDivergedError):  # another attempt would make the same numbers
            self.ahead.drop()
            raise ModelDivergedError(f"step {key.step + 1}: {cause_of(error).partition('DivergedError: ')[2]}") from error
        self._failures[key] += 1
        logger.error("step %d of %s failed (%d)", key.step + 1, key.model_id, self._failures[key], exc_info=error)
        if self._failures[key] >= self._max_attempts:
            del self._failures[key]
            raise BatchGivenUpError(cause_of(error)) from error

    async def _prepared(self, run: ModelRun, batch: Batch) -> tuple[StepPlan, WeightsRef | None, Begun | None]:
        """The plan, and the snapshot of the state that it starts from; or the step itself, where it was begun ahead."""
        if (begun := self.ahead.of(state_key(run.state))) is not None:
            same = False
            try:
                same = same_step(begun.plan, await self._plans.of(run, batch, begun.plan.attempt))
            finally:
                if not same:  # nor where its reference went meanwhile, or the step is ended here: nobody would take it
                    self.ahead.drop()
            if same:
                return begun.plan, None, begun
            logger.info("step %d of %s was begun ahead on something else", begun.plan.state.step + 1, run.state.name)
        # Before the plan: a step that is run again fetches a KL reference of its own, and one a model is kept.
        snapshot = await self._catch_up.ready(run.state)
        return await self._plans.of(run, batch, await self.attempts.new(run.state.model_id)), snapshot, None

    async def _plan_after(self, run: ModelRun, before: StepPlan, batch: Batch) -> StepPlan:
        return await self._plans.after(run, before, batch, await self.attempts.new(run.state.model_id))

    def _coming(self, run: ModelRun, plan: StepPlan, following: Following) -> NextPlan:
        # Once it has failed it runs alone, and always where it may fail only once: what is beside it may be what ends the ranks (rule 10).
        alone = self._failures[state_key(run.state)] > 0 or self._max_attempts == 1
        make = partial(self._plan_after, run, plan)
        return NextPlan(Following() if alone else following, make, self._world, lambda: self.ahead.model_id is None)

    async def _go_ahead(self, run: ModelRun, result: StepResult, coming: NextPlan) -> None:
        """Begin the step after this one on the device, where all that it needs is at hand; the ranks may have begun it."""
        if (gone_on_to := coming.gone_on_to(result)) is not None:
            self.ahead.begin(gone_on_to)
            return
        try:
            plan = await coming.plan()
        except Exception as error:  # noqa: BLE001 - it is the next step's to fail with, this one has run
            logger.debug("the step after step %d of %s is not begun ahead: %r", result.key.step, run.state.name, error)
        else:
            if plan is not None:
                self.ahead.begin(replace(plan, scalars=result.scalars))

    async def begin_anew(self, run: ModelRun) -> CommittedStep:
        """The first version of a fork, or the version by which a diverged model goes on: nothing is trained, files are written anew.

        Raises:
            StepFailedError, RankDiedError: the ranks could not take the state over.
            ModelDivergedError: the ledger itself lacks steps.
            HeadraceError: the store can't be reached, or has not what the state is to be copied from.
        """
        state = run.state
        attempt = await self.attempts.new(state.model_id)
        becomes = StateKey(model_id=state.model_id, incarnation=state.incarnation, step=state.policy_version + 1, attempt=attempt)
        snapshot: WeightsRef | None
        trained = state.policy_version
        if (origin := run.start_from) is not None:
            begins = StateKey(model_id=origin.forked_from, incarnation=origin.incarnation, step=origin.step, attempt=origin.attempt)
            scalars, snapshot, cut, stopped = origin.scalars, origin.snapshot, "forked", None
        else:
            reached = await self._catch_up.reach(state)
            begins, scalars, snapshot, cut, stopped = reached.state, reached.scalars, reached.snapshot, "rebased", reached.stopped
            trained = reached.trained
        plan = StepPlan(
            state=begins,
            attempt=attempt,
            base=self._plans.base(state),
            settings=state.settings,
            config=state.settings.train,
            groups=(),
            scalars=scalars,
            becomes=becomes,
            out_dir=self._plans.out_dir(attempt),
        )
        timer = _Timer(time.perf_counter(), {})
        try:
            result = await self._world.run(plan, snapshot)
            timer.lap("in_world")
            batch = Batch(groups=(), job_id=None, cut=cut, completed_at=-1)
            step = await self._stored(run, batch, plan, result, timer)
        except BaseException:
            shutil.rmtree(plan.out_dir, ignore_errors=True)
            raise
        if origin is not None:
            return replace(step, record=step.record.model_copy(update={"forked": origin}))
        if run.rebasing is None or state.weights is None:
            return step
        rebased = Rebased(
            step=min(trained + 1, state.policy_version),
            reason=run.rebasing if stopped is None else f"{run.rebasing}; resumed from step {trained}: {stopped}",
            expected_digest=state.weights.digest,
            found_digest=step.record.weights.digest,
            resumed_from=trained,
        )
        return replace(step, record=step.record.model_copy(update={"rebased": rebased}))

    def turn(self) -> AbstractAsyncContextManager[None]:
        """The device, before a step asks for it: `run` inside does not wait."""
        return self._world.turn()

    def committed(self, record: StepRecord) -> None:
        """A step is committed: later ones may name its weights as their reference."""
        self._references.note(record)

    async def settle(self, run: ModelRun) -> TakenSnapshot | None:
        """As `save`, of a state that is run again where it is not held.

        Raises:
            ModelDivergedError: it can't be had again.
            HeadraceError: the ranks or the store could not.
        """
        while run.state.snapshot_step != run.state.policy_version:
            try:
                await self._catch_up.ready(run.state)
                return await self.save(run)
            except StateNotHeldError as error:
                logger.warning("%s: caught up once more", error)
        return None

    async def save(self, run: ModelRun) -> TakenSnapshot | None:
        """Store a snapshot of the committed state, if this worker holds it and none is stored.

        Raises:
            HeadraceError: the ranks or the store could not.
        """
        key = state_key(run.state)
        if run.state.snapshot_step == key.step or not self._world.holds(key):
            return None
        folder = self._work_dir / f"release-{key.model_id}-{key.step}"
        try:
            await self._world.save(key, folder)
            duplicates, window_ids = run.window.to_bytes(), run.window.since
            ref = await store_snapshot(self._store, folder, key, duplicates, await self.attempts.new(key.model_id))
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        return TakenSnapshot(ref=ref, window_ids=window_ids)

    async def _stored(self, run: ModelRun, batch: Batch, plan: StepPlan, result: StepResult, timer: _Timer) -> CommittedStep:
        # Both at one moment: the snapshot's window, and which of the ids since the last snapshot it holds.
        duplicates, window_ids = run.window.to_bytes() if plan.snapshot else b"", run.window.since
        reported = (len(run.refused_since), len(run.refused_trajectories_since), run.refused_unlisted)
        lost = [event for group in batch.lost for event in member_events(run.state.model_id, self._lane, group.waiting, group.members)]
        report = await asyncio.to_thread(  # 0.1 s for thousands of trajectories
            build_report,
            plan=plan,
            batch=batch,
            result=result,
            lane=self._lane,
            refused=tuple(run.refused_since),
            refused_trajectories=[*run.refused_trajectories_since, *lost],
            unlisted=run.refused_unlisted,
            timings=timer.laps,
            rows=plan.report_rows,
        )
        asked = options_of(run.jobs, batch.job_id)

        async def store() -> tuple[StoredStep, str | None]:
            stored = await store_step(self._store, Path(plan.out_dir), result, duplicates, report)
            deployment = asked.hot_load_deployment
            return stored, None if deployment is None else await store_for_deployment(self._store, deployment, result.key, stored)

        # The step is computed, and stays: only its files wait.
        stored, identity = await outlast(f"{_called(run)}, which is computed and stored now,", store, waits=self.waits)
        await asyncio.to_thread(shutil.rmtree, plan.out_dir, ignore_errors=True)
        outcome = StepOutcome(
            plan=plan,
            result=result,
            stored=stored,
            batch=batch,
            window_ids=window_ids,
            reported=reported,
            asked=asked,
            hot_load_identity=identity,
        )
        return committed_step(run, self._lane, outcome)


def _called(run: ModelRun) -> str:
    """The next step, for the log."""
    return f"step {run.state.policy_version + 1} of {run.state.name}"


def finish_job(run: ModelRun, step: CommittedStep) -> None:
    """Move the step's job to COMPLETED, with what the document says of it."""
    record = step.record
    if record.job_id is None:
        return
    run.move_job(
        record.job_id,
        JobState.COMPLETED,
        step=record.step,
        num_sequences=step.num_sequences,
        metrics=without_evaluation(record.metrics),
        evaluation=evaluation_of(record.metrics),
        logprobs=record.logprobs,
        hot_load_identity=record.hot_load_identity,
        accelerator_seconds={step.accelerator: step.completed.seconds * record.fingerprint.world_size},
    )
