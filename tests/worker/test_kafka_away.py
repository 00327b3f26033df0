"""A worker whose Kafka is away."""

import asyncio
import re
from pathlib import Path

from tests.worker.conftest import WorkerProcess, settings_of

from headrace.core.local import LocalBroker
from headrace.core.topic_admin import apply


async def test_while_kafka_is_away_a_worker_logs_one_warning_and_ends_when_it_is_asked_to(tmp_path: Path, tiny_model: Path) -> None:
    broker = await asyncio.to_thread(LocalBroker(tmp_path / "broker").start)
    settings = settings_of(broker.bootstrap_servers, "away.", tmp_path, tiny_model)
    await apply(settings)
    log = tmp_path / "worker.log"
    worker = WorkerProcess(settings, log)
    try:
        await _logged(log, r"lane 0 is claimed(.|\n)*lane 1 is claimed|lane 1 is claimed(.|\n)*lane 0 is claimed")
        before = len(log.read_text())
        await asyncio.to_thread(broker.stop)
        await _logged(log, "Waiting for Kafka since")
        assert await asyncio.to_thread(worker.stop) == 0
    finally:
        worker.close()
        broker.stop()
    loud = [line for line in log.read_text()[before:].splitlines() if re.search(r" (WARNING|ERROR) ", line)]
    assert [re.sub(r".*(WARNING|ERROR) \S+ ", "", line)[:30] for line in loud] == [
        "Waiting for Kafka since " + loud[0].partition("since ")[2][:6],
        "the lanes are released without",
    ]


async def _logged(log: Path, pattern: str) -> None:
    async with asyncio.timeout(60):
        while not re.search(pattern, await asyncio.to_thread(log.read_text)):  # noqa: ASYNC110 - as below
            await asyncio.sleep(0.05)  # another process' log has no event
