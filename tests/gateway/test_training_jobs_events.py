"""What a job's client reads while its owner continues: only the end of the list grows, and the end comes when the checkpoint is there."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from tests.gateway.job_bodies import group, job, make_model
from tests.gateway.lane_double import LaneDouble
from tests.gateway.test_training_jobs_submit import JOBS

from headrace.core.jobs import ask
from headrace.core.settings import Settings
from headrace.gateway.gate import Gate
from headrace.schemas.jobs import JobState


@pytest.fixture
async def lane(settings: Settings) -> AsyncIterator[LaneDouble]:
    """Who writes as a worker would."""
    other = settings.model_copy(update={"gateway": settings.gateway.model_copy(update={"instance": "lane"})})
    async with Gate(other) as gate:
        yield LaneDouble(gate)


async def events_of(http: httpx.AsyncClient, job_id: str, **query: str | int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await http.get(f"{JOBS}/{job_id}/events", params=query)).json()["data"]
    return found


async def submitted(http: httpx.AsyncClient, model: str, **config: object) -> str:
    answer = await http.post(JOBS, json=job(model, group(), config=config))
    assert answer.status_code == 200, answer.text
    found: str = answer.json()["id"]
    return found


async def test_the_list_only_grows_at_its_end_and_ends_when_the_checkpoint_is_listed(gateway: httpx.AsyncClient, lane: LaneDouble) -> None:
    model = await make_model(gateway)
    await lane.take_up(model)
    job_id = await submitted(gateway, model, unheard_of=1)
    before = await events_of(gateway, job_id)
    await lane.move(job_id, JobState.RUNNING)
    assert (await gateway.get(f"{JOBS}/{job_id}")).json()["status"] == "running"
    assert await events_of(gateway, job_id) == before, "how many sequences the step has is not known yet"
    await lane.move(job_id, JobState.COMPLETED, step=1, num_sequences=2, metrics={"loss": 0.5})
    assert await events_of(gateway, job_id) == before, "the ledger does not list the step yet"
    await lane.train(job_id, num_sequences=2)
    after = await events_of(gateway, job_id)
    assert [event["type"] for event in after] == ["warning", "training_started", "gradient_step", "training_ended"]
    assert after[:1] == before
    assert after[1]["data"] == {"num_sequences": 2}
    assert await events_of(gateway, job_id, after=after[0]["id"], limit=2) == after[1:3]
    assert len({event["id"] for event in after}) == 4


async def test_a_job_that_failed_or_was_cancelled_ends_with_its_message(
    gateway: httpx.AsyncClient, lane: LaneDouble, settings: Settings
) -> None:
    model = await make_model(gateway)
    failed, cancelled = await submitted(gateway, model), await submitted(gateway, model)
    await lane.move(failed, JobState.FAILED, error_message="the step failed")
    (event,) = await events_of(gateway, failed)
    assert (event["type"], event["data"]) == ("training_failed", {"error_message": "the step failed"})
    await ask(settings, "cancel", cancelled)
    assert (await gateway.get(f"{JOBS}/{cancelled}")).json()["status"] == "cancelling"
    assert await events_of(gateway, cancelled) == [], "its step may still be committed"
    await lane.move(cancelled, JobState.CANCELLED)
    assert [event["type"] for event in await events_of(gateway, cancelled)] == ["training_failed"]
    assert (await gateway.get(f"{JOBS}/{cancelled}")).json()["status"] == "cancelled"


async def test_a_retry_of_a_job_that_has_ended_is_a_new_one(gateway: httpx.AsyncClient, lane: LaneDouble) -> None:
    model = await make_model(gateway)
    first = await submitted(gateway, model)
    await lane.move(first, JobState.FAILED, error_message="x")
    again = await gateway.post(JOBS, json=job(model, group(), config={}), headers={"x-stainless-retry-count": "1"})
    assert again.json()["id"] != first


async def test_a_model_that_is_stopped_takes_no_job_and_says_why(gateway: httpx.AsyncClient, lane: LaneDouble) -> None:
    model = await make_model(gateway)
    await lane.take_up(model, status="stopped", status_detail="its base model is away")
    answer = await gateway.post(JOBS, json=job(model, group()))
    assert answer.status_code == 409
    assert "its base model is away" in answer.json()["detail"]
    assert "headrace models resume" in answer.json()["detail"]


async def test_a_deleted_checkpoint_can_not_be_asked_for_by_name(gateway: httpx.AsyncClient, lane: LaneDouble) -> None:
    model = await make_model(gateway, "agent")
    await lane.take_up(model)
    await lane.train(await submitted(gateway, model))
    await gateway.request("DELETE", f"/v1/preview/models/{model}/checkpoints", json={"steps": [0]})
    body = {"model": "wandb-artifact:///default/tests/agent:step0", "messages": [{"role": "user", "content": "a"}]}
    answer = await gateway.post("/v1/chat/completions", json=body)
    assert (answer.status_code, "was deleted" in answer.json()["error"]["message"]) == (404, True)
