"""What a step says of itself once its files are stored: ledger record, event, published weights. Pure.

Guarantees: everything that a re-run needs stands in the record: offsets, config, scalars before, the attempts that made the states before
and after. Gives up: nothing.
"""

import math
from collections import Counter
from dataclasses import dataclass
from hashlib import sha256

import orjson

from headrace.consumers.memory.model_run import ModelRun
from headrace.consumers.memory.transaction import CommittedStep
from headrace.consumers.steps.cut import Batch, lag_of
from headrace.consumers.steps.files import StoredStep
from headrace.schemas.events import StepCompleted
from headrace.schemas.jobs import JobOptions
from headrace.schemas.state import ModelState, Rebased, StepRecord, offset_ranges
from headrace.schemas.training import TrainConfig
from headrace.schemas.weights import WeightsPublished
from headrace.trainer.plan import StepPlan, StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """A step that has run, with its files in the store."""

    plan: StepPlan
    result: StepResult
    stored: StoredStep
    batch: Batch
    window_ids: int
    reported: tuple[int, int, int]
    asked: JobOptions
    """By the step's job."""
    hot_load_identity: str | None = None
    rebased: Rebased | None = None


def committed_step(run: ModelRun, lane: int, outcome: StepOutcome) -> CommittedStep:
    """What the step adds to its transaction."""
    result, batch, stored = outcome.result, outcome.batch, outcome.stored
    metrics = {name: value for name, value in result.metrics.items() if math.isfinite(value)}
    record = _record(run.state, lane, outcome, metrics)
    completed = StepCompleted(
        model_id=record.model_id,
        incarnation=record.incarnation,
        step=record.step,
        policy_version=record.step,
        job_id=batch.job_id,
        groups=len(batch.groups),
        trajectories=sum(len(waiting.group.trajectories) for waiting in batch.groups),
        tokens=result.tokens,
        metrics=metrics,
        lag_histogram=_lags(run.state.policy_version, batch),
        seconds=result.seconds,
    )
    published = WeightsPublished(
        model_id=record.model_id,
        incarnation=record.incarnation,
        policy_version=record.step,
        base_model=run.state.settings.base_model,
        format="lora" if result.weights_format == "lora" else "full",
        uri=stored.weights.uri,
        digest=stored.weights.digest,
        files=stored.weights_manifest.files,
        rollout_deployments=outcome.asked.rollout_deployments,
        account=run.state.account,
    )
    return CommittedStep(
        model_id=record.model_id,
        record=record,
        completed=completed,
        published=published,
        snapshot=stored.snapshot,
        offsets=batch.offsets,
        num_sequences=result.num_sequences,
        accelerator=result.fingerprint.device,
        window_ids=outcome.window_ids,
        reported=outcome.reported,
    )


def _record(state: ModelState, lane: int, outcome: StepOutcome, metrics: dict[str, float]) -> StepRecord:
    plan, result, batch, stored = outcome.plan, outcome.result, outcome.batch, outcome.stored
    step = state.policy_version + 1
    return StepRecord(
        model_id=state.model_id,
        incarnation=state.incarnation,
        step=step,
        attempt=plan.attempt,
        attempt_before=state.last_attempt,
        policy_version_before=state.policy_version,
        policy_version_after=step,
        job_id=batch.job_id,
        lane=lane,
        offsets=offset_ranges(batch.offsets),
        groups=len(batch.groups),
        cut=batch.cut,
        sft=plan.sft,
        options=outcome.asked,
        logprobs=stored.logprobs,
        hot_load_identity=outcome.hot_load_identity,
        rebased=outcome.rebased,
        config=plan.config,
        config_digest=config_digest(plan.config),
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
        scalars_before=plan.scalars,
        scalars=result.scalars,
        fingerprint=result.fingerprint,
    )


def config_digest(config: TrainConfig) -> str:
    """SHA-256 (hex) of a config as sorted JSON."""
    return sha256(orjson.dumps(config.model_dump(mode="json"), option=orjson.OPT_SORT_KEYS)).hexdigest()


def _lags(version: int, batch: Batch) -> dict[int, int]:
    """Trajectories by lag in policy versions."""
    lags = Counter(
        lag for waiting in batch.groups for trajectory in waiting.group.trajectories if (lag := lag_of(version, trajectory)) is not None
    )
    return dict(sorted(lags.items()))
