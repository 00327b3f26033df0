"""Job bodies that a real client of the hosted API sent, through Kafka, worker and a real model: each group ends, and the sum is exact."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiokafka import AIOKafkaProducer
from tests.worker.conftest import WorkerProcess, following, settings_of

from headrace.core.kafka import client_options
from headrace.core.models import create_model
from headrace.core.settings import BaseModelEntry, Settings
from headrace.core.topic_admin import apply
from headrace.demo.smollm2 import convert, fetch, model_folder
from headrace.schemas.envelope import seal
from headrace.schemas.events import GroupRejected, StepCompleted
from headrace.schemas.jobs import JobDocument, JobState, TrainingJob
from headrace.schemas.reasons import RejectionReason
from headrace.schemas.training import ModelSettings, TrainConfig

RECORDED = Path(__file__).parents[1] / "fixtures" / "art-client-traffic.jsonl"


def job_bodies() -> list[dict[str, Any]]:
    lines = [orjson.loads(line) for line in RECORDED.read_bytes().splitlines()]
    posts = [line for line in lines if line["method"] == "POST" and line["path"].endswith("/training-jobs") and line["status"] == 200]
    return [line["body"] for line in posts if "trajectory_groups" in line["body"]]


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_recorded_job_bodies_end_exactly(kafka: str, topic_prefix: str, tmp_path: Path) -> None:
    await asyncio.to_thread(fetch)
    await asyncio.to_thread(convert)
    settings = settings_of(kafka, topic_prefix, tmp_path, model_folder())
    settings = settings.model_copy(update={"base_models": {"smollm2": BaseModelEntry(path=str(model_folder()))}})
    await apply(settings)
    worker = WorkerProcess(settings, tmp_path / "worker.log")
    try:
        await _train_them(settings)
        assert worker.stop() == 0
    finally:
        worker.close()
        print((tmp_path / "worker.log").read_text()[-4000:])  # noqa: T201 - pytest shows it with a failure


async def _train_them(settings: Settings) -> None:
    model = await create_model(settings, project="tests", name="smollm2", model=ModelSettings(base_model="smollm2"))
    key = model.model_id.encode()
    bodies = job_bodies()
    assert len(bodies) >= 8
    sent = sum(len(body["trajectory_groups"]) for body in bodies)
    producer = AIOKafkaProducer(**client_options(settings.kafka, "test"))
    await producer.start()
    topic = settings.topic_names.trajectory_groups
    for j, body in enumerate(bodies):
        names = []
        for g, group in enumerate(body["trajectory_groups"]):
            names.append(f"job{j}-group{g}")
            value = orjson.dumps({**group, "job_id": f"job{j}", "group_id": names[-1]})
            await producer.send_and_wait(topic, value, key=key)
        config = body["experimental_config"] and TrainConfig.model_validate(body["experimental_config"])
        record, headers = seal(TrainingJob(job_id=f"job{j}", group_ids=tuple(names), config=config), source="test")
        await producer.send_and_wait(topic, record, key=key, headers=headers)
    await producer.stop()
    async with following(settings, model.model_id) as seen:
        steps = await seen.until(StepCompleted, len(bodies), seconds=400)
        trained = sum(step.groups for step in steps)
        rejected = await seen.until(GroupRejected, sent - trained)
        assert trained + len(rejected) == sent
        assert seen.dead_letters == []
        assert _ended(seen.of(JobDocument)) == {JobState.COMPLETED: len(bodies)}
    reasons = Counter(event.reason for event in rejected)
    assert set(reasons) == {
        RejectionReason.TOKEN_OUT_OF_VOCABULARY,
        RejectionReason.MISSING_LOGPROBS,
        RejectionReason.NO_TRAINABLE_TOKENS,
        RejectionReason.NO_TRAJECTORIES,
        RejectionReason.UNSUPPORTED_CONTENT,
    }
    assert trained >= 2


def _ended(documents: list[JobDocument]) -> Counter[JobState]:
    latest = {document.job_id: document.state for document in documents}
    return Counter(latest.values())
