"""What a gateway answers is the same before and after somebody has written anything at all into the topics, and after a start again."""

import uuid
from pathlib import Path
from typing import Any

import httpx
from tests.gateway.conftest import gateway_settings, running
from tests.gateway.lane_double import LaneDouble
from tests.gateway.rlor_calls import ACCOUNT, JOBS, create, dataset, keep_alive
from tests.poison import write_poison

from headrace.core.lanes import lane_of
from headrace.core.topic_admin import apply
from headrace.gateway.gate import Gate
from headrace.gateway.rlor.resources import rlor_model_id
from headrace.schemas import topics
from headrace.schemas.deployments import deployment_key
from headrace.schemas.rlor import RlorJob, rlor_job_key
from headrace.schemas.topics import lane_key

MODEL = rlor_model_id("default", "plain")
ASKED = (
    "/dashboard/api/overview",
    f"/dashboard/api/models/{MODEL}",
    f"/dashboard/api/models/{MODEL}/steps",
    f"/dashboard/api/models/{MODEL}/steps/1",
    f"/dashboard/api/models/{MODEL}/curves/loss",
    JOBS,
    f"{JOBS}/plain",
    f"{ACCOUNT}/datasets",
    f"{ACCOUNT}/datasets/d1",
    f"{ACCOUNT}/models",
    f"{ACCOUNT}/deployments",
    f"{ACCOUNT}/deployedModels",
    "/",
)


async def answers(client: httpx.AsyncClient) -> dict[str, tuple[int, Any]]:
    found = {path: await client.get(path) for path in ASKED}
    return {path: (answer.status_code, answer.text) for path, answer in found.items()}


async def test_all_answers_are_what_they_were_before(kafka: str, topic_prefix: str, tmp_path: Path) -> None:
    settings = gateway_settings(kafka, topic_prefix, tmp_path)
    await apply(settings)
    async with running(settings) as client:
        gate: Gate = client.gate  # type: ignore[attr-defined]
        await dataset(client, "d1")
        await create(client, "plain", keep_alive())
        await create(client, "waiting", keep_alive())
        deployment = {"baseModel": "accounts/fireworks/models/tiny"}
        made = await client.post(f"{ACCOUNT}/deployments", params={"deploymentId": "dep-1"}, json=deployment)
        assert made.status_code == 200, made.text
        lane = LaneDouble(gate)
        await lane.take_up(MODEL)
        stepped = await client.post(f"{JOBS}/plain:executeTrainStep", json={"dataset": "d1", "outputModel": "plain-1"})
        assert stepped.status_code == 200, stepped.text
        fact = (await gate.view.fresh()).facts[rlor_job_key("default", "plain")]
        assert isinstance(fact, RlorJob)
        assert fact.step is not None
        (job_id,) = fact.step.training_jobs
        await lane.train(job_id)
        before = await answers(client)
        assert [status for status, _ in before.values()] == [200] * len(ASKED)
        keys = [MODEL, job_id, lane_key(lane_of(MODEL, 2)), rlor_job_key("default", "plain"), deployment_key("default", "dep-1")]
        await write_poison(settings, keys, but=[topics.TRAJECTORY_GROUPS, topics.DEAD_LETTERS])
        assert await answers(client) == before
        assert (await create(client, "after", keep_alive())).status_code == 200
        assert (await client.delete(f"{JOBS}/after")).status_code == 200
        before = await answers(client)
    settings = settings.model_copy(update={"gateway": settings.gateway.model_copy(update={"instance": uuid.uuid4().hex[:8]})})
    async with running(settings) as client:
        assert await answers(client) == before
