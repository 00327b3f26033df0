"""What a step writes about itself once its files are stored: ledger record, event, published weights. Pure.

Guarantees: the record contains everything that a rerun needs: offsets, config, scalars before, the attempts of the states before and after.
"""

import math
from collections import Counter
from hashlib import sha256

import orjson

from headrace.consumers.worker.lane_model import LaneModel
from headrace.consumers.worker.selection import Batch, lag_of
from headrace.consumers.worker.storage.step_files import StoredStep
from headrace.consumers.worker.transaction import StepToCommit
from headrace.schemas.events import StepCompleted
from headrace.schemas.jobs import JobOptions
from headrace.schemas.state import StepRecord, offset_ranges
from headrace.schemas.training import TrainConfig
from headrace.schemas.weights import WeightsPublished
from headrace.trainer.plan import StepPlan, StepResult


def step_to_commit(
    model: LaneModel,
    batch: Batch,
    plan: StepPlan,
    result: StepResult,
    stored: StoredStep,
    *,
    options: JobOptions,
    window_ids: int,
    reported: tuple[int, int, int],
    hot_load_identity: str | None = None,
) -> StepToCommit:
    """What a step that has run adds to its transaction."""
    metrics = {name: value for name, value in result.metrics.items() if math.isfinite(value)}
    state, step = model.state, model.state.policy_version + 1
    record = StepRecord(
        model_id=state.model_id,
        incarnation=state.incarnation,
        step=step,
        attempt=plan.attempt,
        attempt_before=state.last_attempt,
        policy_version_before=state.policy_version,
        policy_version_after=step,
        job_id=batch.job_id,
        lane=model.lane,
        offsets=offset_ranges(batch.offsets),
        groups=len(batch.groups),
        cut=batch.cut,
        sft=plan.sft,
        options=options,
        logprobs=stored.logprobs,
        hot_load_identity=hot_load_identity,
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
        lag_histogram=_lags(state.policy_version, batch),
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
        rollout_deployments=options.rollout_deployments,
        account=state.account,
    )
    return StepToCommit(
        model_id=state.model_id,
        record=record,
        completed=completed,
        published=published,
        snapshot=stored.snapshot,
        offsets=batch.offsets,
        num_sequences=result.num_sequences,
        accelerator=result.fingerprint.device,
        window_ids=window_ids,
        reported=reported,
    )


def step_summary(name: str, record: StepRecord, seconds: float) -> str:
    """One line for the worker's log: what the step trained on, and what came of it."""
    metrics = record.metrics
    parts = [f"step {record.step} of {name}: {record.groups} groups"]
    if zero := int(metrics.get("groups_zero_variance", 0)):
        parts.append(f"{zero} of them without variance")
    parts += [f"{label} {metrics[key]:.4g}" for key, label in (("reward_mean", "reward"), ("entropy", "entropy")) if key in metrics]
    parts.append("no loss" if record.loss is None else f"loss {record.loss:.4g}")
    if seconds > 0 and "tokens" in metrics:
        parts.append(f"{metrics['tokens'] / seconds:,.0f} tokens/s")
    return ", ".join([*parts, f"{seconds:.3f} s"])


def why_nothing_trained(record: StepRecord) -> str | None:
    """Why a step made no update, or one without effect; None if it trained."""
    if record.cut in {"rebased", "forked"}:
        return None
    zero = record.metrics.get("groups_zero_variance", 0)
    if record.groups and zero == record.groups and record.sft is None:
        return f"all rewards are equal in each of its {record.groups} groups, so every advantage is zero: check the rewards of this task"
    if record.updates == 0:
        return "no trajectory of it can be trained on: `headrace inspect` lists the rejections with their reasons"
    return None


def config_digest(config: TrainConfig) -> str:
    """SHA-256 (hex) of a config as sorted JSON."""
    return sha256(orjson.dumps(config.model_dump(mode="json"), option=orjson.OPT_SORT_KEYS)).hexdigest()


def _lags(version: int, batch: Batch) -> dict[int, int]:
    """Trajectories by lag in policy versions."""
    lags = Counter(
        lag for waiting in batch.groups for trajectory in waiting.group.trajectories if (lag := lag_of(version, trajectory)) is not None
    )
    return dict(sorted(lags.items()))
