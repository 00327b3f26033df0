"""Sending 100 KB groups: `TrajectoryProducer` against a bare aiokafka producer that sends the same bytes.

Same broker, compression, idempotence, linger and batch size. Ours also encodes each prepared group, checks it, counts bytes and
reports its position; the bare producer is given bytes that are encoded already.
"""

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

from aiokafka import AIOKafkaProducer
from benchmarks.groups import group
from benchmarks.measuring import Comparison, Rates

from headrace.core.local import LocalBroker
from headrace.core.models import create_model
from headrace.core.settings import BaseModelEntry, KafkaSettings, ProducerSettings, Settings
from headrace.core.topic_admin import apply
from headrace.producers import TrajectoryProducer
from headrace.producers.link import BATCH_BYTES
from headrace.schemas.codec import SampledGroup, encode_safetensors
from headrace.schemas.training import ModelSettings

TARGET = 0.7
GROUPS = 300
MODEL = "0be5c0de-0000-4000-8000-000000000000"


async def _ours(settings: Settings, groups: list[SampledGroup]) -> float:
    async with TrajectoryProducer(settings, model_id=MODEL) as producer:
        await producer.send(groups[0])
        start = time.perf_counter()
        deliveries = [await producer.submit(groups[i % len(groups)]) for i in range(GROUPS)]
        await asyncio.gather(*deliveries)
        return time.perf_counter() - start


async def _bare(settings: Settings, bodies: list[bytes]) -> float:
    compression = settings.producer.compression
    options: dict[str, Any] = {
        "bootstrap_servers": settings.kafka.bootstrap_servers,
        "enable_idempotence": True,
        "acks": "all",
        "compression_type": None if compression == "none" else compression,
        "linger_ms": settings.producer.linger_ms,
        "max_batch_size": BATCH_BYTES,
    }
    topic = settings.topic_names.trajectory_groups
    async with AIOKafkaProducer(**options) as producer:
        await producer.send_and_wait(topic, bodies[0], MODEL.encode())
        start = time.perf_counter()
        positions = [await producer.send(topic, bodies[i % len(bodies)], MODEL.encode()) for i in range(GROUPS)]
        await asyncio.gather(*positions)
        return time.perf_counter() - start


async def _compare(bootstrap_servers: str, compression: str, rounds: int) -> Comparison:
    settings = Settings(
        kafka=KafkaSettings(bootstrap_servers=bootstrap_servers),
        producer=ProducerSettings.model_validate({"compression": compression}),
    )
    groups = [group(8, 1100, seed) for seed in range(20)]
    bodies = [encode_safetensors(g) for g in groups]
    megabytes = sum(len(bodies[i % len(bodies)]) for i in range(GROUPS)) / 1e6
    await _ours(settings, groups)
    await _bare(settings, bodies)  # both sides warm
    ours: list[float] = []
    reference: list[float] = []
    for _ in range(rounds):
        reference.append(megabytes / await _bare(settings, bodies))
        ours.append(megabytes / await _ours(settings, groups))
    return Comparison(
        title=f"Produce: groups of {len(bodies[0]) / 1000:.0f} KB, {compression}",
        command="python benchmarks/run.py produce",
        ours=Rates(name="TrajectoryProducer, from prepared groups", unit="MB/s", per_round=ours),
        reference=Rates(name="bare aiokafka, from bytes", unit="MB/s", per_round=reference),
        target=TARGET,
        notes="" if compression == "zstd" else "Not the default compression; for comparison.",
    )


async def _all(bootstrap_servers: str, rounds: int) -> list[Comparison]:
    catalogue = {"none": BaseModelEntry(path="/none")}  # no worker runs
    settings = Settings(kafka=KafkaSettings(bootstrap_servers=bootstrap_servers), base_models=catalogue)
    await apply(settings)
    await create_model(settings, project="bench", name=MODEL, model=ModelSettings(base_model="none"))
    return [await _compare(bootstrap_servers, compression, rounds) for compression in ("zstd", "none")]


def run(rounds: int) -> list[Comparison]:
    """Measure, against a broker of our own."""
    with tempfile.TemporaryDirectory() as folder, LocalBroker(Path(folder)) as broker:
        return asyncio.run(_all(broker.bootstrap_servers, rounds))
