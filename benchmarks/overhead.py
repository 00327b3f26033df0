"""The overhead of a step of the demo's model over forward, backward and optimizer, with real Kafka and a worker as a user starts it.

First steps that follow each other: all groups are in the log before the worker starts, so nothing but the worker itself is in the way. The
time between the commits of two steps, minus the rank's own clock for scoring and updating, is the overhead. Then steps that are waited for:
the last group of a step goes out, and the clock stops when a `read_committed` subscriber has the weights event.
"""

import asyncio
import itertools
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measuring import Table

from headrace.core.kafka import client_options
from headrace.core.lanes import lane_of
from headrace.core.local import LocalBroker
from headrace.core.models import create_model
from headrace.core.reading import follow
from headrace.core.settings import BaseModelEntry, KafkaSettings, Settings, StoreSettings, TopicSettings, WorkerSettings
from headrace.core.topic_admin import apply
from headrace.producers import TrajectoryProducer
from headrace.schemas.codec import SampledGroup
from headrace.schemas.envelope import header_text, open_record
from headrace.schemas.events import StepCompleted
from headrace.schemas.training import BatchPolicy, ModelSettings, OptimizerSettings, TrainConfig
from headrace.schemas.weights import WeightsPublished

SHARE = 0.20
LATENCY_MS = 150.0
GROUPS = 16
"""Groups of a step, as in the demo."""
WARM = 8
"""Steps at the start that are not counted: the worker still reads the backlog, and caches are cold."""
BACKLOG = 72
ALONE = 24
"""Steps that are waited for."""
COMPUTE = ("seconds_score", "seconds_update")
PHASES = ("seconds_prepare", "seconds_pack", "seconds_write")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """What the log says of a step."""

    committed: float
    """Seconds: when its ledger record was written."""
    metrics: Mapping[str, float]
    seconds: float
    """In the rank."""

    @property
    def compute(self) -> float:
        """Seconds of forward, backward and optimizer."""
        return sum(self.metrics.get(name, 0.0) for name in COMPUTE)


def _groups(base: Path, count: int) -> list[SampledGroup]:
    from headrace.consumers import LocalEngine  # noqa: PLC0415 - torch, for this benchmark only
    from headrace.demo.tasks import VaultTask  # noqa: PLC0415 - as above

    engine = LocalEngine(str(base), threads=1)
    return VaultTask().sample(engine, random.Random(0), groups=count, rollouts=8)


async def _send(settings: Settings, model_id: str, groups: Sequence[SampledGroup], name: str) -> None:
    async with TrajectoryProducer(settings, model_id=model_id) as producer:
        named = (SampledGroup(group=g.group.model_copy(update={"group_id": f"{name}-{i}"}), turns=g.turns) for i, g in enumerate(groups))
        await asyncio.gather(*[await producer.submit(group) for group in named])


class _Watch:
    """A subscriber of what the worker commits."""

    def __init__(self, settings: Settings, lane: int) -> None:
        self._settings = settings
        self._lane = lane
        self.steps: dict[int, _Step] = {}
        self.published: dict[int, float] = {}
        """When the weights event of a version came here (`time.perf_counter`)."""
        self.changed = asyncio.Condition()

    async def run(self) -> None:
        """Until cancelled."""
        names = self._settings.topic_names
        async with asyncio.TaskGroup() as tasks:
            for topic in (names.steps, names.training_events, names.weights):
                tasks.create_task(self._follow(topic))

    async def _follow(self, topic: str) -> None:
        options = client_options(self._settings.kafka, "bench-overhead")
        async with aclosing(follow(options, topic, self._lane)) as batches:
            async for batch in batches:
                now = time.perf_counter()
                for record in batch:
                    headers = header_text(record.headers)
                    kind = headers["ce_type"]
                    if kind == "headrace.weights-published.v1":
                        event = open_record(record.value, headers, (WeightsPublished,))
                        assert isinstance(event, WeightsPublished)  # noqa: S101 - narrows the type
                        self.published[event.policy_version] = now
                    elif kind == "headrace.step-completed.v1":
                        done = open_record(record.value, headers, (StepCompleted,))
                        assert isinstance(done, StepCompleted)  # noqa: S101 - narrows the type
                        self.steps[done.step] = _Step(committed=record.timestamp / 1000, metrics=done.metrics, seconds=done.seconds)
                async with self.changed:
                    self.changed.notify_all()

    async def until(self, version: int) -> None:
        """Wait until a version is published and its step known."""
        async with asyncio.timeout(300), self.changed:
            await self.changed.wait_for(lambda: version in self.published and version in self.steps)


def _worker(settings: Settings, log: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        "HEADRACE_KAFKA__BOOTSTRAP_SERVERS": str(settings.kafka.bootstrap_servers),
        "HEADRACE_TOPICS": settings.topics.model_dump_json(),
        "HEADRACE_STORE": settings.store.model_dump_json(),
        "HEADRACE_WORKER": settings.worker.model_dump_json(),
        "HEADRACE_BASE_MODELS": "{" + ",".join(f'"{k}":{v.model_dump_json()}' for k, v in settings.base_models.items()) + "}",
    }
    command = os.environ.get("HEADRACE_BENCH_WORKER", "-m headrace.cli worker").split()  # another start of the worker, to look inside
    with log.open("wb") as out:
        return subprocess.Popen([sys.executable, *command], env=environment, stdout=out, stderr=out)


async def _measure(settings: Settings, base: Path, log: Path) -> tuple[list[_Step], list[float], list[float]]:
    await apply(settings)
    model = ModelSettings(
        base_model="demo",
        adaptation="full",
        optimizer=OptimizerSettings(weight_decay=0.0, max_grad_norm=1.0),
        batch=BatchPolicy(groups_per_step=GROUPS),
        train=TrainConfig(learning_rate=6e-4, loss_fn="ppo", scale_rewards=False),
        max_sequence_tokens=64,
    )
    view = await create_model(settings, project="bench", name="overhead", model=model)
    groups = await asyncio.to_thread(_groups, base, 8 * GROUPS)
    backlog = WARM + BACKLOG
    await _send(settings, view.model_id, [groups[i % len(groups)] for i in range(backlog * GROUPS)], "backlog")
    worker = _worker(settings, log)
    watch = _Watch(settings, lane_of(view.model_id, settings.topics.partitions))
    watching = asyncio.create_task(watch.run())
    try:
        await watch.until(backlog)
        following = [watch.steps[n] for n in range(WARM, backlog + 1)]
        waits, beside = [], []
        async with TrajectoryProducer(settings, model_id=view.model_id) as producer:
            for i in range(ALONE):
                version = backlog + 1 + i
                named = [
                    SampledGroup(group=g.group.model_copy(update={"group_id": f"alone-{i}-{k}"}), turns=g.turns)
                    for k, g in enumerate(groups[:GROUPS])
                ]
                await asyncio.gather(*[await producer.submit(group) for group in named[:-1]])
                await asyncio.sleep(0.5)  # the worker has taken those in: what is measured begins with the last
                began = time.perf_counter()
                await producer.send(named[-1])
                await watch.until(version)
                took = watch.published[version] - began
                waits.append(took - watch.steps[version].compute)
                beside.append(took - watch.steps[version].seconds)
        return following, waits, beside
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        worker.terminate()
        await asyncio.to_thread(worker.wait, 30)


def _rows(steps: Sequence[_Step]) -> tuple[list[list[str]], float]:
    """Of steps that follow each other, the first only says when the second began."""
    periods = [after.committed - before.committed for before, after in itertools.pairwise(steps)]
    counted = steps[1:]
    total, compute = sum(periods), sum(step.compute for step in counted)
    share = 1 - compute / total
    rows = [["commit to commit", f"{1000 * statistics.median(periods):.1f}", f"{1000 * total / len(periods):.1f}", ""]]
    in_rank = sum(step.seconds for step in counted)
    parts = [("forward, backward, optimizer", [step.compute for step in counted])]
    parts += [(f"rank: {name.removeprefix('seconds_')}", [step.metrics.get(name, 0.0) for step in counted]) for name in PHASES]
    for name, values in parts:
        rows.append(
            [name, f"{1000 * statistics.median(values):.1f}", f"{1000 * statistics.mean(values):.1f}", f"{sum(values) / total:.1%}"]
        )
    outside = (total - in_rank) / len(counted)
    rows.append(["outside the rank: plan, store, commit", "", f"{1000 * outside:.1f}", f"{outside * len(counted) / total:.1%}"])
    return rows, share


def run(_rounds: int) -> list[Table]:
    """Measure, against a broker of our own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = folder / "base"
        subprocess.run([sys.executable, "-m", "headrace.demo.base_model", str(base), "0"], check=True)
        with LocalBroker(folder / "kafka") as broker:
            settings = Settings(
                kafka=KafkaSettings(bootstrap_servers=broker.bootstrap_servers),
                topics=TopicSettings(prefix="overhead.", partitions=2),
                store=StoreSettings(url=f"file://{folder}/store"),
                worker=WorkerSettings(work_dir=folder / "work", threads=1),
                base_models={"demo": BaseModelEntry(path=str(base))},
            )
            log = folder / "worker.log"
            try:
                following, waits, beside = asyncio.run(_measure(settings, base, log))
            except BaseException:
                print(log.read_text()[-4000:] if log.exists() else "the worker was not started", file=sys.stderr)
                raise
            if keep := os.environ.get("HEADRACE_BENCH_LOG"):
                Path(keep).write_bytes(log.read_bytes())
    rows, share = _rows(following)
    waited = 1000 * statistics.median(waits)
    quantiles = statistics.quantiles([1000 * w for w in waits], n=10)
    command = "python benchmarks/run.py overhead"
    return [
        Table(
            title=f"Overhead of a step: demo model, {GROUPS} groups of 8, {BACKLOG} steps that follow each other, file store",
            command=command,
            columns=["part", "median ms", "mean ms", "share"],
            rows=rows,
            verdict=f"everything but forward, backward and optimizer is {share:.1%} of a step (target < {SHARE:.0%})",
            reached=share < SHARE,
        ),
        Table(
            title="Last group in to weights event out, minus the step, file store",
            command=command,
            columns=["minus", "p50 ms", "p10 ms", "p90 ms"],
            rows=[
                ["forward, backward, optimizer", f"{waited:.1f}", f"{quantiles[0]:.1f}", f"{quantiles[-1]:.1f}"],
                ["all of the rank's time", f"{1000 * statistics.median(beside):.1f}", "", ""],
            ],
            verdict=f"{waited:.0f} ms p50 (target < {LATENCY_MS:.0f} ms)",
            reached=waited < LATENCY_MS,
        ),
    ]
