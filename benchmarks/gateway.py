"""What the gateway adds to the Kafka commit of a job, and what a large job costs it in memory.

A real `headrace gateway` process, a real client over HTTP. Latency: the 50th percentile of POSTs of a 100 KB job, one after the other,
next to that of bare transactions (aiokafka, the same number of records and bytes, sent by this process), in turns. Memory: the peak
resident set of the process after a job of 50 MB.
"""

import asyncio
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import orjson
from aiokafka import AIOKafkaProducer
from benchmarks.groups import hosted_json
from benchmarks.measuring import Table

from headrace.core.kafka import client_options
from headrace.core.local import LocalBroker
from headrace.core.settings import BaseModelEntry, KafkaSettings, Settings, StoreSettings, TopicSettings
from headrace.core.topic_admin import apply

JOB_BYTES = 100_000
LARGE_BYTES = 50_000_000
POSTS = 40
"""Of a round."""
TARGET_MS = 30.0
TARGET_MB = 300.0


def run(rounds: int) -> Sequence[Table]:
    """Measure in so many rounds."""
    with tempfile.TemporaryDirectory() as folder, LocalBroker(Path(folder) / "broker") as broker:
        settings = Settings(
            kafka=KafkaSettings(bootstrap_servers=broker.bootstrap_servers),
            topics=TopicSettings(prefix="bench.", partitions=4),
            store=StoreSettings(url=f"file://{folder}/store"),
            base_models={"tiny": BaseModelEntry(path=f"{folder}/base")},
        )
        return asyncio.run(_measure(settings, rounds))


async def _measure(settings: Settings, rounds: int) -> Sequence[Table]:
    await apply(settings)
    async with _gateway(settings) as (process, http):
        body = {"project": "bench", "name": "agent", "base_model": "tiny", "return_existing": True}
        model_id = (await http.post("/v1/preview/models", json=body)).json()["id"]
        small = _job(model_id, JOB_BYTES)
        sizes = (len(small) // 6, 600, 500, 500)  # a group in its stored form, the job, its document, whose it is
        posts: list[float] = []
        bare: list[float] = []
        async with AIOKafkaProducer(**client_options(settings.kafka, "bench"), transactional_id="bench", acks="all") as producer:
            for _ in range(rounds):
                posts += [await _post(http, small) for _ in range(POSTS)]
                bare += [await _commit(producer, settings.topic_names.trajectory_groups, sizes) for _ in range(POSTS)]
        before = _peak_mb(process)
        large = _job(model_id, LARGE_BYTES)
        seconds = await _post(http, large)
        after = _peak_mb(process)
    added = _p50(posts) - _p50(bare)
    latency = Table(
        title="Gateway: a job of 100 KB over HTTP",
        command="python benchmarks/run.py gateway",
        columns=("way", "p50 ms", "p90 ms"),
        rows=[
            ("**POST /v1/preview/training-jobs**", f"{_p50(posts):.1f}", f"{_p90(posts):.1f}"),
            ("bare transaction of as many bytes", f"{_p50(bare):.1f}", f"{_p90(bare):.1f}"),
        ],
        verdict=f"{added:.1f} ms on top of the commit at p50 (target < {TARGET_MS:g})",
        reached=added < TARGET_MS,
    )
    memory = Table(
        title="Gateway: a job of 50 MB",
        command="python benchmarks/run.py gateway",
        columns=("moment", "peak resident set, MB"),
        rows=[("**after the job**", f"{after:.0f}"), ("before it", f"{before:.0f}")],
        verdict=f"{after:.0f} MB at most (target < {TARGET_MB:g}), {seconds / 1000:.1f} s for {len(large) / 1e6:.0f} MB",
        reached=after < TARGET_MB,
    )
    return [latency, memory]


@asynccontextmanager
async def _gateway(settings: Settings):  # noqa: ANN202 - a process and a client
    environment = os.environ | {
        "HEADRACE_KAFKA__BOOTSTRAP_SERVERS": str(settings.kafka.bootstrap_servers),
        "HEADRACE_TOPICS": settings.topics.model_dump_json(),
        "HEADRACE_STORE": settings.store.model_dump_json(),
        "HEADRACE_BASE_MODELS": orjson.dumps({name: entry.model_dump() for name, entry in settings.base_models.items()}).decode(),
    }
    process = subprocess.Popen(  # noqa: ASYNC220 - a benchmark waits for nothing else
        [sys.executable, "-m", "headrace.cli", "gateway", "--port", "0", "--log-level", "warning"],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        address = await asyncio.to_thread(process.stdout.readline)  # type: ignore[union-attr]  # asked for as a pipe
        async with httpx.AsyncClient(base_url=address.strip(), timeout=120, trust_env=False) as http:
            yield process, http
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def _job(model_id: str, size: int) -> bytes:
    """A job of about so many bytes, as the hosted API's client sends it."""
    group = orjson.loads(hosted_json(8, 120))
    del group["group_id"]
    for trajectory in group["trajectories"]:
        trajectory["initial_policy_version"] = trajectory["final_policy_version"] = 0  # the model is new
    count = max(1, round(size / len(orjson.dumps(group))))
    return orjson.dumps({"model_id": model_id, "trajectory_groups": [group] * count, "experimental_config": {"learning_rate": 5e-6}})


async def _post(http: httpx.AsyncClient, body: bytes) -> float:
    began = time.perf_counter()
    answer = await http.post("/v1/preview/training-jobs", content=body, headers={"content-type": "application/json"})
    answer.raise_for_status()
    return (time.perf_counter() - began) * 1000


async def _commit(producer: AIOKafkaProducer, topic: str, sizes: Sequence[int]) -> float:
    began = time.perf_counter()
    async with producer.transaction():
        for size in sizes:
            await producer.send_and_wait(topic, os.urandom(size), partition=0)
    return (time.perf_counter() - began) * 1000


def _p50(values: Sequence[float]) -> float:
    return statistics.median(values)


def _p90(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=10)[-1]


def _peak_mb(process: "subprocess.Popen[str]") -> float:
    text = Path(f"/proc/{process.pid}/status").read_text()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith("VmHWM"))) / 1000
