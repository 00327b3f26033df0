"""RLOR jobs over HTTP, without a worker: what is shown, what is refused, and what stands in the log."""

import uuid
from collections.abc import AsyncIterator

import httpx
import pytest
from tests.gateway.conftest import running
from tests.gateway.lane_double import LaneDouble
from tests.gateway.rlor_calls import ACCOUNT, JOBS, create, dataset, keep_alive, state

from headrace.core.kafka import client_options
from headrace.core.reading import read_to_end
from headrace.core.settings import Settings
from headrace.gateway.access import Pace
from headrace.gateway.gate import Gate
from headrace.gateway.log_view import LogView
from headrace.gateway.rlor.names import rlor_model_id
from headrace.schemas.codec import decode_group
from headrace.schemas.commands import COMMANDS, Command, CreateModel, DeleteModel
from headrace.schemas.envelope import header_text, open_record
from headrace.schemas.jobs import JobState, TrainingJob
from headrace.schemas.rlor import RlorJob, rlor_job_key
from headrace.schemas.trajectory import TrajectoryGroup


def another(settings: Settings) -> Settings:
    """Of a second gateway."""
    return settings.model_copy(update={"gateway": settings.gateway.model_copy(update={"instance": uuid.uuid4().hex})})


@pytest.fixture
async def lane(settings: Settings) -> AsyncIterator[LaneDouble]:
    async with Gate(another(settings), Pace(6000)) as gate:
        yield LaneDouble(gate)


async def commands_of(settings: Settings) -> list[Command]:
    records = await read_to_end(client_options(settings.kafka, "test"), settings.topic_names.commands)
    found = [open_record(record.value, header_text(record.headers), COMMANDS) for record in records]
    return [command for command in found if isinstance(command, Command)]


async def fact_of(settings: Settings, job_id: str) -> RlorJob:
    async with LogView(settings) as view:
        fact = view.tables.facts[rlor_job_key("default", job_id)]
    assert isinstance(fact, RlorJob)
    return fact


async def submitted(settings: Settings) -> tuple[list[TrajectoryGroup], list[TrainingJob]]:
    options = client_options(settings.kafka, "test")
    groups, jobs = [], []
    for record in await read_to_end(options, settings.topic_names.trajectory_groups):
        headers = header_text(record.headers)
        if headers["ce_type"] == "headrace.training-job.v1":
            job = open_record(record.value, headers, (TrainingJob,))
            assert isinstance(job, TrainingJob)
            assert set(job.group_ids) <= {group.group_id for group in groups}, "groups stand before their job"
            jobs.append(job)
        else:
            groups.append(decode_group(record.value, headers["content-type"]).group)
    return groups, jobs


async def test_a_keep_alive_job_lives_from_pending_through_its_steps_to_its_deletion(
    gateway: httpx.AsyncClient, settings: Settings, lane: LaneDouble
):
    made = await create(gateway, "job-1", keep_alive(inactivityTimeout="1800s", useReservation=True, name="mine", whatIsThis={"a": 1}))
    assert made.status_code == 200, made.text
    job = made.json()
    assert (job["name"], job["state"], job["createdBy"]) == ("accounts/default/rlorTrainerJobs/job-1", "JOB_STATE_PENDING", "local")
    assert (job["keepAlive"], job["inactivityTimeout"], job["trainingConfig"]["loraRank"]) == (True, "1800s", 8)
    assert (job["nodeCount"], job["acceleratorSeconds"], job["steps"]) == (1, {}, 0)
    assert job["createTime"].endswith("Z")
    assert "completedTime" not in job

    again = await create(gateway, "job-1", keep_alive())
    assert (again.status_code, again.json()["code"], again.headers["x-should-retry"]) == (409, 6, "false")
    await dataset(gateway, "d1")
    step = {"dataset": "accounts/default/datasets/d1", "outputModel": "accounts/default/models/v1"}
    early = await gateway.post(f"{JOBS}/job-1:executeTrainStep", json=step)
    assert (early.status_code, early.json()["code"]) == (400, 9)
    assert "JOB_STATE_PENDING" in early.json()["message"]

    async with running(another(settings)) as other:
        model_id = rlor_model_id("default", "job-1")
        await lane.take_up(model_id)
        idle = (await gateway.get(f"{JOBS}/job-1")).json()
        assert idle == (await other.get(f"{JOBS}/job-1")).json()
        assert idle["state"] == "JOB_STATE_RUNNING"
        assert idle["status"] == {"code": "OK", "message": "without effect here: useReservation, whatIsThis"}

        done = await gateway.post(f"{JOBS}/job-1:executeTrainStep", json=step)
        assert (done.status_code, done.json()) == (200, {})
        fact = await fact_of(settings, "job-1")
        assert fact.step is not None
        assert (fact.step.dataset, fact.step.output_model, fact.step.groups) == ("d1", "v1", 2)
        groups, jobs = await submitted(settings)
        assert [job.job_id for job in jobs] == list(fact.step.training_jobs)
        assert [[trajectory.reward for trajectory in group.trajectories] for group in groups] == [[0, 1], [1, 0]]
        assert all(group.allow_training_without_logprobs for group in groups)

        repeated = await gateway.post(f"{JOBS}/job-1:executeTrainStep", json=step, headers={"x-stainless-retry-count": "1"})
        assert repeated.json() == {}
        assert len((await submitted(settings))[1]) == 1
        busy = await gateway.post(f"{JOBS}/job-1:executeTrainStep", json={**step, "outputModel": "v2"})
        assert (busy.status_code, busy.json()["code"]) == (400, 9)
        assert "the step of v1 has not ended" in busy.json()["message"]

        await lane.train(jobs[0].job_id)
        trained = (await other.get(f"{JOBS}/job-1")).json()
        assert (trained["state"], trained["steps"], trained["acceleratorSeconds"]) == ("JOB_STATE_RUNNING", 1, {"CPU": "2"})
        assert trained["jobProgress"] == {"percent": 100, "epoch": 0, "totalInputRequests": 2, "totalProcessedRequests": 2}
        assert trained["metrics"] == {"loss": 0.5}
        taken = await gateway.post(f"{JOBS}/job-1:executeTrainStep", json=step)
        assert (taken.status_code, taken.json()["code"]) == (409, 6)
        assert (await gateway.post(f"{JOBS}/job-1:executeTrainStep", json={**step, "outputModel": "v2"})).status_code == 200
        second_step = (await fact_of(settings, "job-1")).step
        assert second_step is not None
        await lane.move(second_step.training_jobs[0], JobState.FAILED, error_message="the ranks were killed")
        failed = (await gateway.get(f"{JOBS}/job-1")).json()
        assert (failed["state"], failed["status"]) == ("JOB_STATE_FAILED", {"code": "INTERNAL", "message": "the ranks were killed"})
        assert failed["completedTime"].endswith("Z")
        refused = await gateway.post(f"{JOBS}/job-1:executeTrainStep", json={**step, "outputModel": "v3"})
        assert (refused.status_code, refused.json()["code"]) == (400, 9)
        assert "JOB_STATE_FAILED: the ranks were killed" in refused.json()["message"]

        resumed = await gateway.post(f"{JOBS}/job-1:resume")
        assert (resumed.status_code, resumed.json()["state"], resumed.json()["steps"]) == (200, "JOB_STATE_RUNNING", 2)
        listed = (await gateway.get(f"{JOBS}/job-1/checkpoints", params={"pageSize": 200})).json()
        assert [row["name"] for row in listed["checkpoints"]] == ["accounts/default/checkpoints/job-1-v1"]
        assert listed["checkpoints"][0]["checkpointType"] == "CHECKPOINT_TYPE_INFERENCE_LORA"
        assert listed["checkpoints"][0]["promotable"] is True
        promotion = {"output_model": "accounts/default/models/best", "trainer_job_id": job["name"], "async_promotion": True}
        promoted = await gateway.post(f"{ACCOUNT}/checkpoints/job-1-v1:promote", json=promotion)
        assert promoted.json() == {"model": {"name": "accounts/default/models/best", "state": "READY", "kind": "HF_PEFT_ADDON"}}
        assert (await gateway.post(f"{ACCOUNT}/checkpoints/job-1-v2:promote", json={**promotion, "output_model": "b"})).status_code == 404

        assert (await gateway.post(f"{JOBS}/job-1:cancel", json={})).json() == {}
        assert (await state(other, "job-1")) == "CANCELLED"
        assert (await gateway.post(f"{JOBS}/job-1:cancel", json={})).json() == {}
        assert (await gateway.post(f"{JOBS}/job-1:resume", json={})).json()["state"] == "JOB_STATE_RUNNING"

        assert (await gateway.delete(f"{JOBS}/job-1")).json() == {}
        assert (await gateway.delete(f"{JOBS}/job-1")).json() == {}
        assert (await state(other, "job-1")) == "DELETED"
        assert (await other.get(JOBS)).json() == {"rlorTrainerJobs": [], "totalSize": 0}
        gone = await gateway.post(f"{JOBS}/job-1:cancel", json={})
        assert (gone.status_code, gone.json()["message"]) == (400, "cannot cancel job in state: JOB_STATE_DELETED")
        assert len((await gateway.get(f"{JOBS}/job-1/checkpoints")).json()["checkpoints"]) == 1

        anew = await create(gateway, "job-1", keep_alive())
        assert (anew.status_code, anew.json()["state"], anew.json()["steps"]) == (200, "JOB_STATE_PENDING", 0)
        commands = await commands_of(settings)
        assert [type(command) for command in commands] == [CreateModel, DeleteModel, CreateModel]
        assert {command.model_id for command in commands} == {model_id}
