"""A step may take as long as it likes: nothing about correctness, and no membership, depends on its time."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

from tests.worker.conftest import WorkerProcess, following, learner
from tests.worker.groups import group

from headrace.core.settings import Settings
from headrace.producers import TrajectoryProducer
from headrace.schemas.state import StepRecord

SESSION_SECONDS = 6
"""The least that a broker allows unless it is told otherwise."""
Start = Callable[..., WorkerProcess]


def ranks_of(worker: WorkerProcess) -> list[int]:
    tasks = Path(f"/proc/{worker.process.pid}/task").iterdir()
    children = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
    return [pid for pid in children if Path(f"/proc/{pid}/comm").read_text().startswith("headrace-rank")]


async def test_a_step_longer_than_every_kafka_timeout_is_committed_by_its_first_attempt(
    settings: Settings, start_worker: Start, tmp_path: Path
) -> None:
    impatient = settings.model_copy(
        update={
            "kafka": settings.kafka.model_copy(update={"request_timeout_ms": 5000}),
            "worker": settings.worker.model_copy(
                update={"session_timeout_ms": SESSION_SECONDS * 1000, "heartbeat_interval_ms": 300, "transaction_timeout_ms": 2000}
            ),
        }
    )
    model = await learner(settings)
    worker = start_worker(impatient)
    async with following(settings, model.model_id) as seen, TrajectoryProducer(settings, model_id=model.model_id) as producer:
        for i in range(2):
            await producer.send(group(f"warm {i}", seed=i))
        await seen.until(StepRecord, 1)
        (rank,) = ranks_of(worker)
        os.kill(rank, signal.SIGSTOP)
        try:
            for i in range(2):
                await producer.send(group(f"slow {i}", seed=i))
            sent = asyncio.get_running_loop().time()
            # Not a wait for something: this is how long the step takes.
            await asyncio.sleep(SESSION_SECONDS + 3)
            assert len(seen.of(StepRecord)) == 1
        finally:
            os.kill(rank, signal.SIGCONT)
        (_, slow) = await seen.until(StepRecord, 2)
        assert asyncio.get_running_loop().time() - sent > SESSION_SECONDS
    assert slow.groups == 2
    log = (tmp_path / "worker.log").read_text()
    lane = f"lane {slow.lane} is claimed"
    assert log.count(lane) == 1, "the lane was lost and claimed again"
    assert worker.stop() == 0
