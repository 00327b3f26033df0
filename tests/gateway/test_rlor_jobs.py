"""RLOR jobs over HTTP, without a worker: answers, rejections, and the records in the log."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from tests.gateway.conftest import gateway_settings, running
from tests.gateway.lane_double import LaneDouble
from tests.gateway.rlor_calls import ACCOUNT, JOBS, create, dataset, keep_alive, one_shot, rl_line, state

from headrace.core.group_sets import read_groups
from headrace.core.kafka import client_options
from headrace.core.payloads import redeem
from headrace.core.reading import read_to_end
from headrace.core.settings import ProducerSettings, Settings
from headrace.core.store import open_store
from headrace.core.topic_admin import apply
from headrace.gateway.gate import Gate
from headrace.gateway.log_view import LogView
from headrace.gateway.rlor.job_status import job_status
from headrace.gateway.rlor.resources import rlor_model_id
from headrace.schemas.claim import GroupClaim
from headrace.schemas.codec import decode_group
from headrace.schemas.commands import COMMANDS, CancelJob, Command, CreateModel, DeleteModel, ResumeModel
from headrace.schemas.envelope import header_text, open_record
from headrace.schemas.jobs import JobState, TrainingJob
from headrace.schemas.rlor import RlorJob, rlor_job_key
from headrace.schemas.trajectory import TrajectoryGroup
from headrace.schemas.weights import WeightsRef


def another(settings: Settings) -> Settings:
    """Of a second gateway."""
    return settings.model_copy(update={"gateway": settings.gateway.model_copy(update={"instance": uuid.uuid4().hex})})


@pytest.fixture
async def lane(settings: Settings) -> AsyncIterator[LaneDouble]:
    async with Gate(another(settings)) as gate:
        yield LaneDouble(gate)


async def read_commands(settings: Settings) -> list[Command]:
    records = await read_to_end(client_options(settings.kafka, "test"), settings.topic_names.commands)
    records.sort(key=lambda record: record.timestamp)  # the order of one partition stays
    found = [open_record(record.value, header_text(record.headers), COMMANDS) for record in records]
    return [command for command in found if isinstance(command, Command)]


def prompt(group: TrajectoryGroup) -> object:
    return group.trajectories[0].messages_and_choices[0].content  # type: ignore[union-attr]


async def job_record(settings: Settings, job_id: str) -> RlorJob:
    async with LogView(settings) as view:
        fact = view.tables.facts[rlor_job_key("default", job_id)]
    assert isinstance(fact, RlorJob)
    return fact


async def submitted(settings: Settings) -> tuple[list[TrajectoryGroup], list[TrainingJob]]:
    options = client_options(settings.kafka, "test")
    groups, jobs = [], []
    for record in sorted(await read_to_end(options, settings.topic_names.trajectory_groups), key=lambda record: record.timestamp):
        headers = header_text(record.headers)
        if headers["ce_type"] == "headrace.training-job.v1":
            job = open_record(record.value, headers, (TrainingJob,))
            assert isinstance(job, TrainingJob)
            assert set(job.group_ids) <= {group.group_id for group in groups}, "groups come before their job"
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
        fact = await job_record(settings, "job-1")
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
        second_step = (await job_record(settings, "job-1")).step
        assert second_step is not None
        await lane.move(second_step.training_jobs[0], JobState.FAILED, error_message="the ranks were killed")
        failed = (await gateway.get(f"{JOBS}/job-1")).json()
        assert (failed["state"], failed["status"]) == ("JOB_STATE_FAILED", {"code": "INTERNAL", "message": "the ranks were killed"})
        assert failed["completedTime"].endswith("Z")
        rejected = await gateway.post(f"{JOBS}/job-1:executeTrainStep", json={**step, "outputModel": "v3"})
        assert (rejected.status_code, rejected.json()["code"]) == (400, 9)
        assert "JOB_STATE_FAILED: the ranks were killed" in rejected.json()["message"]

        resumed = await gateway.post(f"{JOBS}/job-1:resume")
        assert (resumed.status_code, resumed.json()["state"], resumed.json()["steps"]) == (200, "JOB_STATE_RUNNING", 2)
        listed = (await gateway.get(f"{JOBS}/job-1/checkpoints", params={"pageSize": 200})).json()
        assert [row["name"] for row in listed["checkpoints"]] == ["accounts/default/rlorTrainerJobs/job-1/checkpoints/job-1-v1"]
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
        assert (await state(other, "job-1")) == "DELETING"  # the client knows no DELETED
        assert (await other.get(JOBS)).json() == {"rlorTrainerJobs": [], "totalSize": 0}
        gone = await gateway.post(f"{JOBS}/job-1:cancel", json={})
        assert (gone.status_code, gone.json()["message"]) == (400, "cannot cancel job in state: JOB_STATE_DELETED")
        assert len((await gateway.get(f"{JOBS}/job-1/checkpoints")).json()["checkpoints"]) == 1

        recreated = await create(gateway, "job-1", keep_alive())
        assert (recreated.status_code, recreated.json()["state"], recreated.json()["steps"]) == (200, "JOB_STATE_PENDING", 0)
        commands = await read_commands(settings)
        assert [type(command) for command in commands] == [CreateModel, DeleteModel, CreateModel]
        assert {command.model_id for command in commands} == {model_id}


async def test_a_job_of_one_step_is_submitted_with_an_epoch_each_and_ends_completed(
    gateway: httpx.AsyncClient, settings: Settings, lane: LaneDouble
):
    lines = [rl_line(f"{n} + 1?", [0, n], tone=[1, 0.5]) for n in range(1, 41)]
    await dataset(gateway, "d1", *lines)
    await dataset(gateway, "d2")
    config = {"baseModel": "tiny", "epochs": 2, "outputModel": "accounts/default/models/out", "batchSize": 512, "maxContextLength": 256}
    config["batchSizeSamples"] = 16
    body = one_shot(
        trainingConfig=config,
        rewardWeights=["score=0.5", "tone"],
        evalAutoCarveout=True,
        rolloutDeploymentName="accounts/default/deployments/dep",
        nodeCount=2,
    )
    made = await create(gateway, "j1", body)
    assert (made.status_code, made.json()["state"], made.json()["steps"]) == (200, "JOB_STATE_PENDING", 1), made.text
    groups, (first, last) = await submitted(settings)
    fact = await job_record(settings, "j1")
    assert fact.step is not None
    assert fact.step.training_jobs == (first.job_id, last.job_id)
    assert first.evaluation is not None
    assert first.evaluation == last.evaluation
    carved = fact.step.evaluation_groups
    assert 1 <= carved <= 20
    assert fact.step.groups == len(first.group_ids) == 40 - carved
    assert (first.rollout_deployments, last.rollout_deployments, first.node_count) == ((), ("dep",), 2)
    assert not {*first.group_ids} & {*last.group_ids}
    kept_groups = read_groups(open_store(settings.store.url, settings.s3), first.evaluation)
    trained, kept = {prompt(group) for group in groups}, {prompt(group.group) for group in kept_groups}
    assert len(trained) == 40 - carved
    assert not trained & kept
    assert groups[0].trajectories[0].metrics == {"score": 0, "tone": 1}
    assert groups[0].trajectories[0].reward == 1
    assert first.config is not None
    assert (first.config.precalculate_logprobs, first.config.max_tokens_per_update) == (True, 512)
    assert first.config.max_trajectories_per_update == 16
    assert "batchSizeSamples" not in made.json()["status"]["message"]

    model_id = rlor_model_id("default", "j1")
    await lane.take_up(model_id)
    assert await state(gateway, "j1") == "PENDING"
    await lane.move(first.job_id, JobState.RUNNING)
    assert await state(gateway, "j1") == "RUNNING"
    await lane.train(first.job_id)
    half = (await gateway.get(f"{JOBS}/j1")).json()
    assert (half["state"], half["jobProgress"]["percent"], half["jobProgress"]["epoch"]) == ("JOB_STATE_RUNNING", 50, 1)
    await lane.train(last.job_id, evaluation={"reward": 0.5})
    done = (await gateway.get(f"{JOBS}/j1")).json()
    assert (done["state"], done["evaluation"], done["acceleratorSeconds"]) == ("JOB_STATE_COMPLETED", {"reward": 0.5}, {"CPU": "3"})
    assert done["completedTime"] >= done["createTime"]
    rejected = await gateway.post(f"{JOBS}/j1:executeTrainStep", json={"dataset": "d1", "outputModel": "more"})
    assert (rejected.status_code, "made without keepAlive" in rejected.json()["message"]) == (400, True)
    assert (await gateway.post(f"{JOBS}/j1:cancel", json={})).json()["message"] == "cannot cancel job in state: JOB_STATE_COMPLETED"
    assert (await gateway.post(f"{JOBS}/j1:resume", json={})).json()["state"] == "JOB_STATE_COMPLETED"

    differs = one_shot("d2", trainingConfig={"warmStartFrom": "out", "outputModel": "out2", "epochs": 1})
    answer = await create(gateway, "j2", differs)
    assert (answer.status_code, "trainingConfig.epochs: 1 differs from 2" in answer.json()["message"]) == (400, True)
    goes_on = one_shot(
        "d2",
        trainingConfig={"warmStartFrom": "accounts/default/models/out", "outputModel": "out2"},
        evaluationDataset="accounts/default/datasets/d1",
        rewardWeights=["score"],
    )
    warm = await create(gateway, "j2", goes_on)
    assert (warm.status_code, warm.json()["trainingConfig"]["batchSize"]) == (200, 512), warm.text
    create_model = (await read_commands(settings))[-1]
    assert isinstance(create_model, CreateModel)
    assert create_model.start_weights is not None
    assert create_model.start_weights.uri.endswith("/2")
    assert create_model.settings.base_model == "tiny"
    evaluation = (await submitted(settings))[1][-1].evaluation
    assert evaluation is not None
    assert evaluation.groups == 40
    waits = await create(gateway, "j3", one_shot("d2", trainingConfig={"warmStartFrom": "out2", "outputModel": "out3"}))
    assert (waits.status_code, waits.json()["code"]) == (400, 9)
    assert "accounts/default/models/out2 is not READY" in waits.json()["message"]


async def test_a_cancelled_step_shows_at_once_and_a_resumed_job_runs_it_again(
    gateway: httpx.AsyncClient, settings: Settings, lane: LaneDouble
):
    await dataset(gateway, "d1")
    assert (await create(gateway, "j1", one_shot())).status_code == 200
    assert (await gateway.post(f"{JOBS}/j1:cancel")).json() == {}
    assert await state(gateway, "j1") == "CANCELLING"
    ((first,),) = [(await submitted(settings))[1]]
    cancel = (await read_commands(settings))[-1]
    assert isinstance(cancel, CancelJob)
    assert cancel.job_id == first.job_id
    assert (await gateway.post(f"{JOBS}/j1:resume")).status_code == 400
    await lane.take_up(rlor_model_id("default", "j1"))
    await lane.move(first.job_id, JobState.CANCELLED)
    assert await state(gateway, "j1") == "CANCELLED"
    again = (await gateway.post(f"{JOBS}/j1:resume")).json()
    assert (again["state"], again["steps"]) == ("JOB_STATE_PENDING", 2)
    second = (await submitted(settings))[1][-1]
    assert second.job_id != first.job_id
    await lane.move(second.job_id, JobState.PAUSED)
    assert await state(gateway, "j1") == "PAUSED"
    assert (await gateway.post(f"{JOBS}/j1:resume")).json()["state"] == "JOB_STATE_PENDING"
    await lane.move(second.job_id, JobState.PENDING)
    await lane.train(second.job_id)
    assert await state(gateway, "j1") == "COMPLETED"
    await lane.take_up(rlor_model_id("default", "j1"), status="stopped", status_detail="the base model is missing")
    stopped = (await gateway.get(f"{JOBS}/j1")).json()
    assert (stopped["state"], stopped["status"]["message"]) == ("JOB_STATE_FAILED", "its model is stopped: the base model is missing")
    await gateway.post(f"{JOBS}/j1:resume")
    assert isinstance((await read_commands(settings))[-1], ResumeModel)


async def test_an_idle_job_expires_and_can_be_resumed(gateway: httpx.AsyncClient, settings: Settings, lane: LaneDouble):
    await dataset(gateway, "d1")
    await create(gateway, "brief", keep_alive(inactivityTimeout="0.000001s"))
    await create(gateway, "kept", keep_alive(inactivityTimeout="0.000001s", disableInactivityCleanup=True))
    assert await state(gateway, "brief") == "PENDING"
    for job in ("brief", "kept"):
        await lane.take_up(rlor_model_id("default", job))
    assert await state(gateway, "kept") == "RUNNING"
    expired = (await gateway.get(f"{JOBS}/brief")).json()
    assert (expired["state"], expired["status"]["code"]) == ("JOB_STATE_EXPIRED", "DEADLINE_EXCEEDED")
    step = await gateway.post(f"{JOBS}/brief:executeTrainStep", json={"dataset": "d1", "outputModel": "m"})
    assert (step.status_code, step.json()["code"], "JOB_STATE_EXPIRED" in step.json()["message"]) == (400, 9, True)
    await gateway.post(f"{JOBS}/brief:resume")
    async with LogView(settings) as view:
        tables = view.tables
        fact = tables.facts[rlor_job_key("default", "brief")]
        assert isinstance(fact, RlorJob)
        assert fact.resumed_at is not None
        then = job_status(tables, fact, keep_alive=True, inactivity=60, now=fact.resumed_at + timedelta(seconds=59))
        later = job_status(tables, fact, keep_alive=True, inactivity=60, now=fact.resumed_at + timedelta(seconds=61))
    assert (then.state, later.state) == ("RUNNING", "EXPIRED")


async def test_a_clients_own_retry_of_a_creation_makes_one_job(gateway: httpx.AsyncClient):
    repeat = {"x-stainless-retry-count": "1"}
    first = await gateway.post(JOBS, json=keep_alive())
    assert first.status_code == 200
    second = await gateway.post(JOBS, json=keep_alive(), headers=repeat)
    assert second.json()["name"] == first.json()["name"]
    assert (await gateway.post(JOBS, json=keep_alive(nodeCount=2), headers=repeat)).json()["name"] != first.json()["name"]
    await create(gateway, "j1", keep_alive())
    assert (await create(gateway, "j1", keep_alive(), **repeat)).status_code == 200
    assert (await create(gateway, "j1", keep_alive(nodeCount=2), **repeat)).status_code == 409


async def test_of_two_concurrent_creations_or_steps_of_one_job_one_is_rejected(
    gateway: httpx.AsyncClient, settings: Settings, lane: LaneDouble
):
    both = await asyncio.gather(create(gateway, "j1", keep_alive()), create(gateway, "j1", keep_alive()))
    assert sorted(answer.status_code for answer in both) == [200, 409]
    await dataset(gateway, "d1")
    await lane.take_up(rlor_model_id("default", "j1"))
    steps = [gateway.post(f"{JOBS}/j1:executeTrainStep", json={"dataset": "d1", "outputModel": f"m{n}"}) for n in range(2)]
    assert sorted(answer.status_code for answer in await asyncio.gather(*steps)) == [200, 400]
    assert len((await submitted(settings))[1]) == 1


async def test_many_groups_go_into_the_store_and_more_than_allowed_are_rejected(kafka: str, topic_prefix: str, tmp_path: Path):
    settings = gateway_settings(kafka, topic_prefix, tmp_path, max_groups=30)
    settings = settings.model_copy(update={"producer": ProducerSettings(inline_limit_bytes=1024)})
    await apply(settings)
    async with running(settings) as client:
        await dataset(client, "d1", *(rl_line(f"{n} " + "x" * 2000, [0, 1]) for n in range(16)))
        assert (await create(client, "j1", one_shot())).status_code == 200
        rejected = await create(client, "j2", one_shot(trainingConfig={"baseModel": "tiny", "epochs": 2}))
        assert (rejected.status_code, "30 at most (gateway.max_groups)" in rejected.json()["message"]) == (400, True)
        await client.delete(f"{ACCOUNT}/datasets/d1")
        gone = await create(client, "j3", one_shot())
        assert gone.status_code == 404
    records = await read_to_end(client_options(settings.kafka, "test"), settings.topic_names.trajectory_groups)
    kinds = [header_text(record.headers)["ce_type"] for record in records]
    assert kinds == ["headrace.group-claim.v1"] * 16 + ["headrace.training-job.v1"]
    claim = open_record(records[3].value, header_text(records[3].headers), (GroupClaim,))
    assert isinstance(claim, GroupClaim)
    group = decode_group(redeem(open_store(settings.store.url, settings.s3), claim), claim.content_type).group
    assert (group.group_id, group.job_id) == (claim.group_id, claim.job_id)


async def test_log_probabilities_of_a_forward_only_job_are_a_reference_of_another(
    gateway: httpx.AsyncClient, settings: Settings, lane: LaneDouble
):
    await dataset(gateway, "d1")
    await create(gateway, "ref", one_shot(forwardOnly=True))
    early = await create(gateway, "j1", one_shot(lossConfig={"klReferenceJob": "ref"}))
    assert (early.status_code, early.json()["code"]) == (400, 9)
    await lane.take_up(rlor_model_id("default", "ref"))
    (asked,) = (await submitted(settings))[1]
    assert asked.forward_only
    await lane.train(asked.job_id, logprobs=WeightsRef(uri="file:///store/logprobs/1", digest="0" * 64))
    assert (await gateway.get(f"{JOBS}/ref")).json()["logprobs"]["uri"] == "file:///store/logprobs/1"
    named = {"klReferenceJob": "accounts/default/rlorTrainerJobs/ref"}
    assert (await create(gateway, "j1", one_shot(lossConfig=named))).status_code == 200
    config = (await submitted(settings))[1][-1].config
    assert config is not None
    assert config.kl_ref_logprobs == "file:///store/logprobs/1"
