"""From Kafka to groups that are ready to pack, against a bare aiokafka consumer of the same bytes; groups of 8 × 2,000 sampled tokens.

Ours is what a lane does with records: its reader, and admission (headers, decoding, checks, tokenizing). All processes of the path share
one core; the broker has the others. Rates are groups for each second of processor time, of all processes of the path together: what one
core does when no one else uses it. The bare consumer polls as the lane's reader does, `read_committed`, and looks at the length of each
value: once with the reader's fetch size, once with aiokafka's own, which is smaller and slower.
The hosted APIs' JSON has no prompt ids: its prompts go through the chat template. It comes compressed, or needs a larger limit than the
broker's 1 MiB; or it comes as our own senders send what is large: a claim check, with the payload in a file store.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from benchmarks.groups import hosted_json
from benchmarks.measuring import Comparison, Rates, Table

from headrace.consumers.worker.admission.messages import AdmissionRequest, Admitted
from headrace.consumers.worker.admission.pool import AdmissionPool
from headrace.consumers.worker.reader import LaneReader
from headrace.core.importing import keep_memory
from headrace.core.kafka import client_options
from headrace.core.local import LocalBroker
from headrace.core.payloads import claim
from headrace.core.settings import KafkaSettings, Settings, StoreSettings
from headrace.core.store import open_store
from headrace.schemas.codec import JSON_TYPE, SAFETENSORS_TYPE, decode_group, encode_safetensors
from headrace.schemas.envelope import header_text, seal, type_of
from headrace.schemas.topics import Topics
from headrace.schemas.training import ModelSettings
from headrace.schemas.trajectory import TrajectoryGroup
from headrace.trainer.plan import BaseSource

TARGET = 0.8
HOSTED_TARGET = 250.0
PROMPT = 100
ROOT = Path(__file__).resolve().parent.parent
_LIMIT = 4 << 20
_POLL_RECORDS = 256
_OWN_FETCH_BYTES = 1 << 20
_FETCH_BYTES = 4 << 20
"""As `LaneReader` asks for."""

# A base model's folder without weights: what tokenizing needs. In a process of its own, since transformers would stay in this one's memory.
_BASE = """
import sys, pathlib
from transformers import Qwen3Config
from tests.trainer.tiny import save_byte_tokenizer
Qwen3Config(vocab_size=151_936, max_position_embeddings=32_768).save_pretrained(sys.argv[1])
save_byte_tokenizer(pathlib.Path(sys.argv[1]))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """Records of one form in a topic of their own."""

    name: str
    topics: Topics
    compression: str
    count: int
    bytes: int
    """Of one value."""


def _plain_bodies(count: int) -> list[bytes]:
    """Groups as our own producers send them: each choice with the ids of its prompt."""
    bodies = []
    for seed in range(count):
        raw = orjson.loads(hosted_json(8, 2000, seed))
        for trajectory in raw["trajectories"]:
            trajectory["messages_and_choices"][-1]["prompt_token_ids"] = list(range(1000, 1000 + PROMPT))
        bodies.append(encode_safetensors(decode_group(orjson.dumps(raw))))
    return bodies


async def _fill(
    settings: Settings, names: tuple[str, str], values: Sequence[bytes], headers: Sequence[tuple[str, bytes]], count: int
) -> _Case:
    """Make a topic and fill it; `names`: of the form, and of the compression."""
    name, compression = names
    topics = Topics(prefix=f"{name}-{compression}.".replace(" ", "-"))
    options = client_options(settings.kafka, "bench-ingest")
    admin = AIOKafkaAdminClient(bootstrap_servers=settings.kafka.bootstrap_servers)
    await admin.start()
    large = {"max.message.bytes": str(_LIMIT)}
    await admin.create_topics([NewTopic(topics.trajectory_groups, 1, 1, topic_configs=large), NewTopic(topics.commands, 1, 1)])
    await admin.close()
    kind = None if compression == "none" else compression
    async with AIOKafkaProducer(**options, compression_type=kind, max_request_size=_LIMIT, max_batch_size=1 << 20, linger_ms=5) as producer:
        await asyncio.gather(
            *[await producer.send(topics.trajectory_groups, values[i % len(values)], b"model", headers=list(headers)) for i in range(count)]
        )
    return _Case(name=name, topics=topics, compression=compression, count=count, bytes=len(values[0]))


class _Clock:
    """Processor time of this process and of those that it started and that still run, in seconds."""

    def __init__(self) -> None:
        self._began = self._now()

    @property
    def seconds(self) -> float:
        """Since it was made."""
        return self._now() - self._began

    @staticmethod
    def _now() -> float:
        total = time.process_time()
        for task in Path("/proc/self/task").iterdir():
            for child in (task / "children").read_text().split():
                user, system = Path("/proc", child, "stat").read_text().rpartition(")")[2].split()[11:13]
                total += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
        return total


async def _bare(settings: Settings, case: _Case, fetch_bytes: int) -> float:
    """Groups a second."""
    partition = TopicPartition(case.topics.trajectory_groups, 0)
    consumer = AIOKafkaConsumer(
        **client_options(settings.kafka, "bench-bare"),
        enable_auto_commit=False,
        isolation_level="read_committed",
        max_partition_fetch_bytes=fetch_bytes,
    )
    await consumer.start()
    consumer.assign([partition])
    consumer.seek(partition, 0)
    found = size = 0
    clock = _Clock()
    while found < case.count:
        for records in (await consumer.getmany(partition, timeout_ms=1000, max_records=_POLL_RECORDS)).values():
            found += len(records)
            size += sum(len(record.value) for record in records)
    seconds = clock.seconds
    await consumer.stop()
    return found / seconds


async def _ours(settings: Settings, case: _Case, pool: AdmissionPool, base: BaseSource) -> float:
    """Groups a second."""
    reader = LaneReader(client_options(settings.kafka, "bench-ours"), case.topics, 0)
    await reader.start(0, 0)
    model = ModelSettings(base_model="bench", max_sequence_tokens=4096)
    found = 0
    clock = _Clock()
    while found < case.count:
        _commands, records = await reader.read()
        requests = [
            AdmissionRequest(
                value=record.value,
                headers=dict(header_text(record.headers)),
                fallback_id=f"{record.partition}-{record.offset}",
                base=base,
                settings=model,
            )
            for record in records
        ]
        answers = await pool.admit(requests)
        wrong = next((answer for answer in answers if not isinstance(answer, Admitted)), None)
        if wrong is not None:
            raise RuntimeError(f"a group of the benchmark was not admitted: {wrong}")
        found += len(answers)
    seconds = clock.seconds
    await reader.stop()
    return found / seconds


async def _measure(settings: Settings, base: BaseSource, pool: AdmissionPool, rounds: int) -> list[Comparison | Table]:
    plain_headers = [("content-type", SAFETENSORS_TYPE.encode()), ("ce_type", type_of(TrajectoryGroup).encode())]
    bodies = _plain_bodies(16)
    cases = [await _fill(settings, ("safetensors", kind), bodies, plain_headers, 300) for kind in ("zstd", "none")]
    results: list[Comparison | Table] = []
    for case in cases:
        await _ours(settings, case, pool, base)  # warm
        rates: dict[str, list[float]] = {"ours": [], "same": [], "own": []}
        for _ in range(rounds):
            rates["same"].append(await _bare(settings, case, _FETCH_BYTES))
            rates["ours"].append(await _ours(settings, case, pool, base))
            rates["own"].append(await _bare(settings, case, _OWN_FETCH_BYTES))
        for name, label in (("own", "aiokafka's own fetch size"), ("same", "the reader's fetch size")):
            results.append(
                Comparison(
                    title=f"Ingest on one core: safetensors, {case.bytes:,} bytes a group, {case.compression}; bare with {label}",
                    command="python benchmarks/run.py ingest",
                    ours=Rates(name="lane reader and admission", unit="groups/s", per_round=rates["ours"]),
                    reference=Rates(name=f"bare aiokafka consumer, {label}", unit="groups/s", per_round=rates[name]),
                    target=TARGET,
                )
            )
    results.append(await _hosted(settings, base, pool, rounds))
    return results


async def _hosted(settings: Settings, base: BaseSource, pool: AdmissionPool, rounds: int) -> Table:
    hosted = [hosted_json(8, 2000, seed) for seed in range(8)]
    headers = [("content-type", JSON_TYPE.encode()), ("ce_type", type_of(TrajectoryGroup).encode())]
    cases = [await _fill(settings, ("hosted", kind), hosted, headers, 60) for kind in ("zstd", "none")]
    store = open_store(settings.store.url, settings.s3)
    claims = [seal(claim(store, body, JSON_TYPE, f"claimed-{i}"), source="bench") for i, body in enumerate(hosted)]
    cases.append(await _fill(settings, ("hosted claims", "zstd"), [value for value, _ in claims], claims[0][1], 60))
    rows, best = [], 0.0
    for case in cases:
        await _ours(settings, case, pool, base)
        bare = [await _bare(settings, case, _FETCH_BYTES) for _ in range(rounds)]
        ours = Rates(name="", unit="groups/s", per_round=[await _ours(settings, case, pool, base) for _ in range(rounds)])
        best = max(best, ours.median)
        reference = Rates(name="", unit="groups/s", per_round=bare)
        spread = f"{min(ours.per_round):,.0f} to {max(ours.per_round):,.0f}"
        rows.append([f"{case.name}, {case.compression}", f"{case.bytes:,}", f"{ours.median:,.0f}", spread, f"{reference.median:,.0f}"])
    return Table(
        title="Ingest on one core: the hosted APIs' JSON",
        command="python benchmarks/run.py ingest",
        columns=["form", "bytes a value", "groups/s", "min to max", "bare consumer, groups/s"],
        rows=rows,
        verdict=f"{best:,.0f} groups/s (target ≥ {HOSTED_TARGET:.0f})",
        reached=best >= HOSTED_TARGET,
    )


def run(rounds: int) -> list[Comparison | Table]:
    """Measure, against a broker of our own."""
    keep_memory()
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-c", _BASE, str(folder / "base")], check=True, env=environment)
        os.sched_setaffinity(0, cores[1:] or cores)
        try:
            with LocalBroker(folder / "kafka") as broker:
                os.sched_setaffinity(0, cores[:1])
                settings = Settings(
                    kafka=KafkaSettings(bootstrap_servers=broker.bootstrap_servers), store=StoreSettings(url=f"file://{folder}/store")
                )
                pool = AdmissionPool(settings)
                try:
                    return asyncio.run(_measure(settings, BaseSource(path=str(folder / "base")), pool, rounds))
                finally:
                    pool.close()
        finally:
            os.sched_setaffinity(0, cores)
