"""One step of one model: from a cut batch to what its transaction will say.

Guarantees: the plan is a pure function of the batch, the config, the model's state and the step number; files are durable before
this returns; a step that fails twice is given up as `step_failed` (its groups are refused, its job fails with the message), so a
poisonous batch can't stop a lane. Gives up: attempts across crashes of the worker itself are not counted yet.
"""

import logging
import math
import shutil
import uuid
from collections import Counter
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import orjson

from headrace.consumers.cut import Batch, lag_of
from headrace.consumers.kl_references import KlReferences, ReferenceMissingError
from headrace.consumers.lane_commands import problem_of
from headrace.consumers.model_run import ModelRun
from headrace.consumers.step_files import store_step
from headrace.consumers.step_report import build_report
from headrace.consumers.transaction import CommittedStep
from headrace.consumers.world import TrainerWorld
from headrace.core.settings import Settings
from headrace.core.store import ObjectStore
from headrace.schemas.events import StepCompleted
from headrace.schemas.jobs import JobState
from headrace.schemas.state import StepRecord, offset_ranges
from headrace.schemas.training import SftConfig, TrainConfig
from headrace.schemas.weights import WeightsPublished
from headrace.trainer.options import merged_config, resolve
from headrace.trainer.plan import BaseSource, StateKey, StepPlan, StepResult
from headrace.trainer.rank import RankDiedError, StepFailedError

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 2


class BatchGivenUpError(Exception):
    """The step failed for good; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """A batch with everything that its step needs."""

    plan: StepPlan
    duplicates: bytes
    lag_histogram: dict[int, int]


class StepRunner:
    """Runs steps for one lane.

    Args:
        settings: Catalogue, working folder.
        store: Object store.
        world: The device.
        lane: Partition number.
        references: Policies that KL is measured against.
    """

    def __init__(self, settings: Settings, store: ObjectStore, world: TrainerWorld, lane: int, references: KlReferences) -> None:
        self._settings = settings
        self._store = store
        self._world = world
        self._lane = lane
        self._references = references
        self._work_dir = settings.worker.work_dir.absolute()
        self._failures: Counter[tuple[str, str, int]] = Counter()

    async def run(self, run: ModelRun, batch: Batch) -> CommittedStep:
        """Run the step; try again once.

        Raises:
            BatchGivenUpError: it failed for good.
            HeadraceError: the store can't be reached.
        """
        config = self._config(run, batch)
        sft = self._sft(run, batch)
        if (problem := problem_of(run.state.settings.model_copy(update={"train": config}), self._settings.base_models)) is not None:
            raise BatchGivenUpError(problem)
        key = (run.state.model_id, run.state.incarnation, run.state.policy_version)
        while True:
            try:
                prepared = await self._prepare(run, batch, config, sft)
            except ReferenceMissingError as error:
                raise BatchGivenUpError(str(error)) from error
            try:
                result = await self._world.run(prepared.plan, run.state.snapshot)
            except (StepFailedError, RankDiedError) as error:
                self._failures[key] += 1
                logger.exception("step %d of %s failed (%d)", key[2] + 1, key[0], self._failures[key])
                if self._failures[key] >= MAX_ATTEMPTS:
                    del self._failures[key]
                    raise BatchGivenUpError(str(error).strip().splitlines()[-1] if str(error).strip() else repr(error)) from error
                continue
            except BaseException:
                shutil.rmtree(prepared.plan.out_dir, ignore_errors=True)
                raise
            return await self._committed(run, batch, prepared, result)

    def _config(self, run: ModelRun, batch: Batch) -> TrainConfig:
        job = run.jobs.get(batch.job_id) if batch.job_id is not None else None
        own = job.document.config if job is not None and job.document is not None else None
        return merged_config(run.state.settings.train, own)

    @staticmethod
    def _sft(run: ModelRun, batch: Batch) -> SftConfig | None:
        """The settings of a supervised job; None for any other step."""
        job = run.jobs.get(batch.job_id) if batch.job_id is not None else None
        document = job.document if job is not None else None
        return None if document is None or document.kind != "sft" else document.sft or SftConfig()

    async def _prepare(self, run: ModelRun, batch: Batch, config: TrainConfig, sft: SftConfig | None) -> _Prepared:
        state = run.state
        attempt = str(uuid.uuid4())
        options = resolve(config)
        reference = None
        if options.needs_reference and sft is None:
            reference = await self._references.of(state.model_id, state.incarnation, state.policy_version, options.kl)
        entry = self._settings.base_models[state.settings.base_model]
        plan = StepPlan(
            state=StateKey(model_id=state.model_id, incarnation=state.incarnation, step=state.policy_version, attempt=state.last_attempt),
            attempt=attempt,
            base=BaseSource(path=entry.path, gguf_file=entry.gguf_file),
            settings=state.settings,
            config=config,
            groups=tuple(waiting.group for waiting in batch.groups),
            sft=sft,
            scalars=state.scalars,
            reference=reference,
            report_rows=self._settings.worker.report_rows,
            out_dir=str(self._work_dir / attempt),
        )
        lags = Counter(
            lag
            for waiting in batch.groups
            for trajectory in waiting.group.trajectories
            if (lag := lag_of(state.policy_version, trajectory.initial_policy_version, trajectory.final_policy_version)) is not None
        )
        return _Prepared(plan=plan, duplicates=run.window.to_bytes(), lag_histogram=dict(sorted(lags.items())))

    async def _committed(self, run: ModelRun, batch: Batch, prepared: _Prepared, result: StepResult) -> CommittedStep:
        state, plan = run.state, prepared.plan
        report = build_report(
            plan=plan,
            batch=batch,
            result=result,
            lane=self._lane,
            refused=run.rejected,
            refused_trajectories=run.rejected_trajectories,
            unlisted=0,
            timings={},
            rows=plan.report_rows,
        )
        stored = await store_step(self._store, Path(plan.out_dir), result, prepared.duplicates, report)
        step = state.policy_version + 1
        metrics = {name: value for name, value in result.metrics.items() if math.isfinite(value)}
        record = StepRecord(
            model_id=state.model_id,
            incarnation=state.incarnation,
            step=step,
            attempt=plan.attempt,
            policy_version_before=state.policy_version,
            policy_version_after=step,
            job_id=batch.job_id,
            lane=self._lane,
            offsets=offset_ranges([waiting.offset for waiting in batch.groups]),
            groups=len(batch.groups),
            cut=batch.cut,
            config=plan.config,
            config_digest=sha256(orjson.dumps(plan.config.model_dump(mode="json"), option=orjson.OPT_SORT_KEYS)).hexdigest(),
            plan_digest=result.plan_digest,
            seed=result.seed,
            updates=result.updates,
            loss=result.loss,
            grad_norm=result.grad_norm,
            metrics=metrics,
            weights=stored.weights,
            snapshot=stored.snapshot,
            plots=stored.plots,
            report=stored.report,
            scalars=result.scalars,
            fingerprint=result.fingerprint,
        )
        completed = StepCompleted(
            model_id=state.model_id,
            incarnation=state.incarnation,
            step=step,
            policy_version=step,
            job_id=batch.job_id,
            groups=len(batch.groups),
            trajectories=sum(len(waiting.group.trajectories) for waiting in batch.groups),
            tokens=result.tokens,
            metrics=metrics,
            lag_histogram=prepared.lag_histogram,
            seconds=result.seconds,
        )
        published = WeightsPublished(
            model_id=state.model_id,
            incarnation=state.incarnation,
            policy_version=step,
            base_model=state.settings.base_model,
            format="lora" if result.weights_format == "lora" else "full",
            uri=stored.weights.uri,
            digest=stored.weights.digest,
            files=stored.weights_manifest.files,
        )
        return CommittedStep(
            model_id=state.model_id,
            record=record,
            completed=completed,
            published=published,
            snapshot=stored.snapshot,
            offsets=tuple(waiting.offset for waiting in batch.groups),
            num_sequences=result.num_sequences,
            accelerator=result.fingerprint.device,
        )


def finish_job(run: ModelRun, step: CommittedStep) -> None:
    """Move the step's job to COMPLETED, with what the document says of it."""
    if step.record.job_id is None:
        return
    run.move_job(
        step.record.job_id,
        JobState.COMPLETED,
        step=step.record.step,
        num_sequences=step.num_sequences,
        metrics=step.completed.metrics,
        accelerator_seconds={step.accelerator: step.completed.seconds},
    )
