"""The examples run as they stand, each in a process of its own, with one worker and one engine, and train the model."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from aiokafka import AIOKafkaProducer
from tests.consumers.conftest import tiny_model as tiny_model  # noqa: PLC0414 - a fixture, shared
from tests.engine.site import Site, running
from tests.worker.conftest import environment_of, following, learner
from tests.worker.conftest import shared as shared  # noqa: PLC0414 - a fixture, shared

from headrace.core.kafka import client_options
from headrace.core.settings import Settings
from headrace.schemas.jobs import JobState
from headrace.schemas.state import StepRecord

EXAMPLES = Path(__file__).parents[2] / "examples"


async def output_of(settings: Settings, name: str, *arguments: str, **environment: str) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        EXAMPLES / name,
        *arguments,
        env=os.environ | environment_of(settings) | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()


async def test_agents_sample_from_the_engine_and_their_groups_train(shared: Settings, tmp_path: Path) -> None:
    """The agent with a tool, and one that is a program of its own and does not import Headrace."""
    model = await learner(shared, "example-agents", groups_per_step=2)
    async with (
        AIOKafkaProducer(**client_options(shared.kafka, "test")) as kafka,
        following(shared, model.model_id) as seen,
        running(Site(shared, kafka, tmp_path)) as client,
    ):
        engine = str(client.base_url)
        output = await output_of(shared, "tool_agent.py", model.model_id, ENGINE_URL=engine)
        assert output.count("offset=") == 2
        assert await seen.until(StepRecord, 1)
        plain = [sys.executable, str(EXAMPLES / "plain_agent.py")]
        output = await output_of(shared, "agent_process.py", model.model_id, *plain, ENGINE_URL=engine)
        assert (output.count("offset="), output.count("failed=0")) == (2, 2)
        await seen.until(StepRecord, 2)
        assert seen.of(StepRecord)[-1].metrics["trainable_tokens"] > 0


async def test_supervised_examples_train_first_and_then_rewards(shared: Settings) -> None:
    model = await learner(shared, "sft-then-rl", groups_per_step=1)
    async with following(shared, model.model_id) as seen:
        lines = [line.split() for line in (await output_of(shared, "sft_then_rl.py", model.model_id)).splitlines()]
        jobs = {words[0]: words[1] for words in lines if words[0] in {"sft", "rl"}}
        assert set(jobs) == {"sft", "rl"}
        for job_id in jobs.values():
            document = await seen.until_job(job_id, lambda document: document.completed_at is not None, seconds=40)
            assert document.state is JobState.COMPLETED, document
