"""Records of a ledger as a worker would write them, for the tests of what reads it."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from aiokafka import AIOKafkaProducer
from pydantic import BaseModel

from headrace.core.kafka import client_options
from headrace.core.lanes import lane_of
from headrace.core.settings import Settings
from headrace.core.store import ObjectStore, store_folder
from headrace.schemas.claim import GroupClaim
from headrace.schemas.envelope import seal
from headrace.schemas.reasons import RejectionReason
from headrace.schemas.state import REPORT_FILE, ROWS_FILE, Fingerprint, ModelState, Rebased, StepRecord, StepReport, offset_ranges
from headrace.schemas.training import SftConfig, TrainConfig
from headrace.schemas.trajectory import TrajectoryGroup
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


async def write(settings: Settings, records: Iterable[BaseModel], *, key: str, source: str = "test/worker") -> list[int]:
    """Records into the topics that carry them, in the partition of the model `key`; returns their offsets."""
    topics = settings.topic_names
    topic_of = {
        StepRecord: topics.steps,
        ModelState: topics.models,
        TrajectoryGroup: topics.trajectory_groups,
        GroupClaim: topics.trajectory_groups,
    }
    options = client_options(settings.kafka, "test")
    producer = AIOKafkaProducer(**options)
    await producer.start()
    try:
        offsets = []
        for each in records:
            value, headers = seal(each, source=source)
            topic = topic_of.get(type(each), topics.training_events)
            lane = lane_of(key, settings.topics.partitions)
            sent = await producer.send_and_wait(topic, value, key=key.encode(), partition=lane, headers=headers)
            offsets.append(int(sent.offset))
        return offsets
    finally:
        await producer.stop()


def store_report(store: ObjectStore, report: StepReport, scratch: Path, *, rows: bytes | None = None) -> WeightsRef:
    """A report as a worker stores it."""
    folder = scratch / f"report-{report.step}-{report.attempt}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / REPORT_FILE).write_text(report.model_dump_json())
    if rows is not None:
        (folder / ROWS_FILE).write_bytes(rows)
    _, ref = store_folder(
        store,
        f"models/{report.model_id}/{report.incarnation}/reports/{report.step}-{report.attempt}",
        folder,
        kind="report",
        model_id=report.model_id,
        incarnation=report.incarnation,
        step=report.step,
        attempt=report.attempt,
    )
    return ref
