"""The producer and the subscriber of `docs/snippets` run as they stand."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from tests.consumers.conftest import tiny_model as tiny_model  # noqa: PLC0414 - a fixture, shared
from tests.worker.conftest import following, learner
from tests.worker.conftest import shared as shared  # noqa: PLC0414 - a fixture, shared

from headrace.core.settings import Settings
from headrace.schemas.state import StepRecord

ROOT = Path(__file__).parents[2]


async def test_the_producer_example_trains_a_model_and_the_subscriber_example_says_so(shared: Settings) -> None:
    model = await learner(shared, "readme", groups_per_step=1)
    environment = os.environ | {
        "HEADRACE_KAFKA__BOOTSTRAP_SERVERS": str(shared.kafka.bootstrap_servers),
        "HEADRACE_TOPICS": shared.topics.model_dump_json(),
        "HEADRACE_STORE": shared.store.model_dump_json(),
        "PYTHONUNBUFFERED": "1",
    }
    snippets = ROOT / "docs" / "snippets"
    subscriber = await asyncio.create_subprocess_exec(
        sys.executable, snippets / "subscriber.py", env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert subscriber.stdout is not None
    try:
        async with following(shared, model.model_id) as seen, asyncio.timeout(120):
            # A subscriber without a group starts from now on: groups are sent until it has told of one.
            told = asyncio.ensure_future(_line_with(subscriber.stdout, model.model_id))
            sent = 0
            while not told.done():
                producer = await asyncio.create_subprocess_exec(
                    sys.executable, snippets / "producer.py", model.model_id, env=environment, stdout=subprocess.PIPE
                )
                output, _ = await producer.communicate()
                assert b"offset=" in output
                sent += 1
                await seen.until(StepRecord, sent)
                await asyncio.wait({told}, timeout=1.0)
            assert "loss" in await told
    finally:
        subscriber.kill()
        await subscriber.wait()


async def _line_with(stream: asyncio.StreamReader, text: str) -> str:
    async for line in stream:
        if text in line.decode():
            return line.decode()
    raise AssertionError("the subscriber ended")
