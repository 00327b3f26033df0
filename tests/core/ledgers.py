"""Records of a ledger as a worker would write them, for the tests of what reads it."""

import hashlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta

from headrace.schemas.reasons import RejectionReason
from headrace.schemas.state import Fingerprint, Rebased, StepRecord, offset_ranges
from headrace.schemas.training import SftConfig, TrainConfig
from headrace.schemas.weights import WeightsRef

FINGERPRINT = Fingerprint(
    headrace="0.1.0",
    torch="2.9.0",
    transformers="5.0.0",
    deepspeed="0.19.0",
    python="3.12.3",
    device="cpu",
    world_size=1,
    threads=2,
)
BEGAN = datetime(2026, 11, 30, 8, tzinfo=UTC)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def record(
    step: int,
    *,
    model_id: str = "m",
    incarnation: str = "i",
    attempt: str | None = None,
    loss: float | None = 0.5,
    metrics: Mapping[str, float] | None = None,
    offsets: Sequence[int] = (),
    lane: int = 0,
    cut: str = "groups_per_step",
    job_id: str | None = None,
    updates: int = 1,
    config: TrainConfig | None = None,
    sft: SftConfig | None = None,
    weights: str | None = None,
    plan: str = "plan",
    report: WeightsRef | None = None,
    snapshot: bool = False,
    refusals: Mapping[RejectionReason, int] | None = None,
    trajectory_refusals: Mapping[RejectionReason, int] | None = None,
    rebased: Rebased | None = None,
) -> StepRecord:
    attempt = attempt or f"attempt-{step}"
    place = f"file:///store/models/{model_id}/{incarnation}"
    weights_digest = digest(weights or f"weights {incarnation} {step}")
    return StepRecord(
        model_id=model_id,
        incarnation=incarnation,
        step=step,
        attempt=attempt,
        policy_version_before=step - 1,
        policy_version_after=step,
        job_id=job_id,
        lane=lane,
        offsets=offset_ranges(list(offsets)),
        groups=len(offsets),
        refusals=dict(refusals or {}),
        trajectory_refusals=dict(trajectory_refusals or {}),
        cut=cut,
        sft=sft,
        rebased=rebased,
        config=config or TrainConfig(),
        config_digest=digest("config"),
        plan_digest=digest(plan),
        seed=7,
        updates=updates,
        loss=loss,
        grad_norm=1.0,
        metrics=dict(metrics or {}),
        weights=WeightsRef(uri=f"{place}/weights/{step}-{attempt}", digest=weights_digest),
        snapshot=WeightsRef(uri=f"{place}/snapshots/{step}-{attempt}", digest=digest("snapshot")) if snapshot else None,
        report=report,
        fingerprint=FINGERPRINT,
        committed_at=BEGAN + timedelta(seconds=step),
    )
