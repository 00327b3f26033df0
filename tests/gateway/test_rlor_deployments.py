"""Models, deployments, models on them and hot load over HTTP: the answers follow the reports of workers and engines."""

from collections.abc import AsyncIterator

import httpx
import pytest
from tests.gateway.engine_double import EngineDouble
from tests.gateway.lane_double import LaneDouble
from tests.gateway.rlor_calls import ACCOUNT, JOBS, create, dataset, keep_alive

from headrace.core.settings import Settings
from headrace.gateway.gate import Gate
from headrace.gateway.log_writer import sealed
from headrace.gateway.rlor.resources import rlor_model_id
from headrace.schemas.deployments import DeployedModel, DeploymentFact, HotLoad, deployment_key
from headrace.schemas.jobs import JobState
from headrace.schemas.rlor import RlorJob, rlor_job_key

DEPLOYMENTS, MODELS, DEPLOYED = f"{ACCOUNT}/deployments", f"{ACCOUNT}/models", f"{ACCOUNT}/deployedModels"
HOT_LOAD = "/hot_load/v1/models/hot_load"
HEADERS = {"fireworks-model": "accounts/default/models/tiny", "fireworks-deployment": "accounts/default/deployments/dep-1"}


@pytest.fixture
async def gate(settings: Settings) -> AsyncIterator[Gate]:
    """A second gateway's, by which tests write what others would."""
    other = settings.model_copy(update={"gateway": settings.gateway.model_copy(update={"instance": "double"})})
    async with Gate(other) as found:
        yield found


async def deploy(client: httpx.AsyncClient, deployment: str, **more: object) -> httpx.Response:
    body = {"baseModel": "accounts/fireworks/models/tiny", "enableHotLoad": True, "minReplicaCount": 0, "maxReplicaCount": 1, **more}
    return await client.post(DEPLOYMENTS, params={"deploymentId": deployment, "skipShapeValidation": True}, json=body)


async def begin_step(client: httpx.AsyncClient, gate: Gate, job: str, model: str) -> str:
    """Ask for a step; the id of its training job."""
    body = {"dataset": "accounts/default/datasets/d1", "outputModel": f"accounts/default/models/{model}"}
    asked = await client.post(f"{JOBS}/{job}:executeTrainStep", json=body)
    assert asked.status_code == 200, asked.text
    fact = (await gate.view.fresh()).facts[rlor_job_key("default", job)]
    assert isinstance(fact, RlorJob)
    assert fact.step is not None
    return fact.step.training_jobs[-1]


async def begin_job(client: httpx.AsyncClient, gate: Gate, job: str, **more: object) -> str:
    """A keep-alive job that waits for its first step, and the dataset `d1`; the incarnation of its model."""
    made = await create(client, job, keep_alive(**more))
    assert made.status_code == 200, made.text
    await dataset(client, "d1")
    return (await LaneDouble(gate).take_up(rlor_model_id("default", job))).incarnation


async def test_a_model_is_missing_then_uploading_then_ready_then_deleted(gateway: httpx.AsyncClient, gate: Gate):
    lane = LaneDouble(gate)
    await begin_job(gateway, gate, "job-1")
    training = await begin_step(gateway, gate, "job-1", "m1")
    waiting = await gateway.get(f"{MODELS}/m1")
    assert (waiting.status_code, waiting.json()["code"]) == (404, 5)
    assert "has not begun" in waiting.json()["message"]
    await lane.move(training, JobState.RUNNING)
    assert (await gateway.get(f"{MODELS}/m1")).json()["state"] == "UPLOADING"
    await lane.train(training)
    ready = (await gateway.get(f"{MODELS}/m1")).json()
    assert (ready["state"], ready["kind"], ready["status"]["code"]) == ("READY", "HF_PEFT_ADDON", "OK")
    assert ready["peftDetails"] == {"baseModel": "accounts/default/models/tiny", "r": 8, "targetModules": ["all-linear"]}
    assert (ready["fineTuningJob"], ready["policyVersion"]) == ("accounts/default/rlorTrainerJobs/job-1", 1)
    second = await begin_step(gateway, gate, "job-1", "m2")
    await lane.move(second, JobState.FAILED, error_message="no memory")
    failed = await gateway.get(f"{MODELS}/m2")
    assert (failed.status_code, "no memory" in failed.json()["message"]) == (404, True)
    listed = (await gateway.get(MODELS, params={"filter": 'kind="HF_PEFT_ADDON"', "readMask": "name,state"})).json()
    assert listed == {"models": [{"name": "accounts/default/models/m1", "state": "READY"}], "totalSize": 1}
    await gateway.delete(f"{JOBS}/job-1")
    assert (await gateway.get(f"{MODELS}/m1")).json()["state"] == "READY"
    assert (await gateway.delete(f"{MODELS}/m1")).json() == {}
    assert (await gateway.delete(f"{MODELS}/m1")).status_code == 404


async def test_base_models_of_the_catalogue_exist_under_any_account(gateway: httpx.AsyncClient):
    found = (await gateway.get("/v1/accounts/fireworks/models/tiny")).json()
    assert (found["kind"], found["state"], found["tunable"]) == ("HF_BASE_MODEL", "READY", True)
    assert (await gateway.get("/v1/accounts/fireworks/models/other")).status_code == 404


async def test_a_deployment_is_ready_when_one_of_its_engines_reports_it(gateway: httpx.AsyncClient, gate: Gate):
    engine = EngineDouble(gate, "e1", "dep-1")
    asked = {"hotLoadBucketType": "FW_HOSTED", "hotLoadTransitionType": "SYNC", "forTraining": True, "description": "d", "zz": 1}
    made = (await deploy(gateway, "dep-1", **asked, acceleratorType="NVIDIA_H100_80GB")).json()
    assert (made["name"], made["state"]) == ("accounts/default/deployments/dep-1", "CREATING")
    assert "headrace engine --base-model tiny --deployment dep-1" in made["status"]["message"]
    assert made["baseModel"] == "accounts/fireworks/models/tiny"
    assert {name: made[name] for name in asked if name != "zz"} == {name: asked[name] for name in asked if name != "zz"}
    assert (await deploy(gateway, "dep-1")).status_code == 409
    await engine.serves("tiny")
    ready = (await gateway.get(f"{DEPLOYMENTS}/dep-1")).json()
    assert (ready["state"], ready["replicaCount"], ready["replicaStats"]) == ("READY", 1, {"readyReplicaCount": 1})
    await engine.forgets("tiny")
    assert (await gateway.get(f"{DEPLOYMENTS}/dep-1")).json()["state"] == "CREATING"
    scaled = (await gateway.patch(f"{DEPLOYMENTS}/dep-1", json={"maxReplicaCount": 0, "minReplicaCount": 0})).json()
    assert (scaled["state"], scaled["maxReplicaCount"], scaled["hotLoadTransitionType"]) == ("READY", 0, "SYNC")
    assert (await gateway.patch(f"{DEPLOYMENTS}/dep-1:scale", json={"replicaCount": 2})).json()["minReplicaCount"] == 2
    listed = (await gateway.get(DEPLOYMENTS, params={"orderBy": "create_time desc"})).json()
    assert [one["name"] for one in listed["deployments"]] == [made["name"]]
    assert (await gateway.delete(f"{DEPLOYMENTS}/dep-1", params={"ignoreChecks": "true", "hard": "true"})).json() == {}
    assert (await gateway.get(f"{DEPLOYMENTS}/dep-1")).status_code == 404
    assert (await gateway.delete(f"{DEPLOYMENTS}/dep-1")).status_code == 404


async def test_a_deployment_of_another_account_can_be_neither_created_nor_named(gateway: httpx.AsyncClient, gate: Gate, settings: Settings):
    theirs = DeploymentFact(account="umbrella", id="dep-1", owner="eve", base_model="tiny", request={"baseModel": "tiny"})
    key = deployment_key("umbrella", "dep-1")
    await gate.writer.commit([sealed(theirs, topic=settings.topic_names.gateway, key=key)], is_in=lambda: key in gate.view.tables.facts)
    made = await deploy(gateway, "dep-1")
    assert (made.status_code, made.headers["x-should-retry"]) == (409, "false")
    for field in ("rolloutDeploymentName", "hotLoadDeploymentId"):
        assert (await create(gateway, "mine", keep_alive(**{field: "dep-1"}))).status_code == 404
    assert (await gateway.get(f"{DEPLOYMENTS}/dep-1")).status_code == 404


async def test_a_step_is_rejected_when_another_account_took_the_id_of_its_jobs_deployment(
    gateway: httpx.AsyncClient, gate: Gate, settings: Settings
):
    await begin_job(gateway, gate, "mine", rolloutDeploymentName="free")
    await begin_step(gateway, gate, "mine", "first")
    theirs = DeploymentFact(account="umbrella", id="free", owner="eve", base_model="tiny", request={"baseModel": "tiny"})
    key = deployment_key("umbrella", "free")
    await gate.writer.commit([sealed(theirs, topic=settings.topic_names.gateway, key=key)], is_in=lambda: key in gate.view.tables.facts)
    training = (await gate.view.fresh()).facts[rlor_job_key("default", "mine")].step.training_jobs[-1]  # type: ignore[attr-defined]
    await LaneDouble(gate).train(training)
    body = {"dataset": "accounts/default/datasets/d1", "outputModel": "accounts/default/models/second"}
    rejected = await gateway.post(f"{JOBS}/mine:executeTrainStep", json=body)
    assert (rejected.status_code, "deployments/free" in rejected.json()["message"]) == (400, True)


async def test_a_job_warns_of_deployments_that_do_not_exist_until_they_are_created(gateway: httpx.AsyncClient):
    for field in ("rolloutDeploymentName", "hotLoadDeploymentId"):
        made = await create(gateway, f"for-{field.lower()}", keep_alive(**{field: "later"}))
        warning = "accounts/default/deployments/later does not exist: no engine loads the job's versions until it is created"
        assert (made.status_code, warning in made.json()["status"]["message"]) == (200, True)
    assert (await deploy(gateway, "later")).status_code == 200
    for job in ("for-rolloutdeploymentname", "for-hotloaddeploymentid"):
        assert "does not exist" not in (await gateway.get(f"{JOBS}/{job}")).json()["status"]["message"]


async def test_a_deployment_has_a_bucket_of_its_own_or_its_trainers(gateway: httpx.AsyncClient, gate: Gate):
    trainer = "accounts/default/rlorTrainerJobs/own"
    assert (await create(gateway, "own", keep_alive(hotLoadDeploymentId="dep-2"))).status_code == 200
    await begin_job(gateway, gate, "free")
    wrong: list[tuple[dict[str, object], str]] = [
        ({"hotLoadTrainerJob": trainer}, "hotLoadDeploymentId"),
        ({"hotLoadTrainerJob": f"{trainer}-none"}, "does not exist"),
        ({"hotLoadTrainerJob": trainer, "hotLoadBucketUrl": "gs://b/rl-checkpoints/default/x"}, "not both"),
        ({"hotLoadBucketUrl": "gs://b/rl-checkpoints/other/x"}, "rl-checkpoints/default/"),
        ({"hotLoadTrainerJob": trainer, "enableHotLoad": False}, "enableHotLoad"),
        ({"baseModel": "gpt-9"}, "there are tiny"),
        ({"baseModel": ""}, "baseModel"),
        ({"minReplicaCount": 3}, "minReplicaCount"),
        ({"directRouteApiKeys": ["k"]}, "directRouteApiKeys"),
        ({"hotLoadTransitionType": "NOW"}, "hotLoadTransitionType"),
    ]
    for fields, message in wrong:
        rejected = await deploy(gateway, "dep-1", **fields)
        assert rejected.status_code in {400, 404}, fields
        assert message in rejected.json()["message"], rejected.json()
    assert (await deploy(gateway, "dep-1")).status_code == 200
    attached = await gateway.patch(
        f"{DEPLOYMENTS}/dep-1", params={"updateMask": "hot_load_trainer_job"}, json={"hotLoadTrainerJob": trainer.replace("own", "free")}
    )
    assert attached.json()["hotLoadTrainerJob"].endswith("/free")
    training = await begin_step(gateway, gate, "free", "m1")
    await LaneDouble(gate).train(training, identity="v1-aaaa")
    view = (await gate.view.fresh()).job(training)
    assert view is not None
    assert view.document is not None
    assert view.document.options.hot_load_deployment == "trainer-free"
    assert (await gateway.post(HOT_LOAD, headers=HEADERS, json={"identity": "v1-aaaa"})).json() == {}
    mixed = await create(gateway, "mixed", keep_alive(hotLoadDeploymentId="dep-1"))
    assert (mixed.status_code, "hotLoadTrainerJob" in mixed.json()["message"]) == (400, True)
    unset = await gateway.patch(f"{DEPLOYMENTS}/dep-1", params={"updateMask": "hotLoadTrainerJob"}, json={})
    assert "hotLoadTrainerJob" not in unset.json() or unset.json()["hotLoadTrainerJob"] == ""
    assert (await gateway.patch(f"{DEPLOYMENTS}/dep-1", params={"updateMask": "no_field"}, json={})).status_code == 400


async def test_a_model_is_loaded_on_a_deployment_and_unloaded_again(gateway: httpx.AsyncClient, gate: Gate):
    lane, engine, model_id = LaneDouble(gate), EngineDouble(gate, "e1", "dep-1"), rlor_model_id("default", "job-1")
    await deploy(gateway, "dep-1", enableHotReloadLatestAddon=True)
    incarnation = await begin_job(gateway, gate, "job-1")
    training = await begin_step(gateway, gate, "job-1", "m1")
    body = {"model": "accounts/default/models/m1", "deployment": "accounts/default/deployments/dep-1"}
    await lane.move(training, JobState.RUNNING)
    early = await gateway.post(DEPLOYED, params={"replaceMergedAddon": "true"}, json=body)
    assert (early.status_code, early.json()["code"]) == (400, 9)
    await lane.train(training)
    unsaid = await gateway.post(DEPLOYED, json=body)
    assert (unsaid.status_code, "replaceMergedAddon" in unsaid.json()["message"]) == (400, True)

    first = (await gateway.post(DEPLOYED, params={"replaceMergedAddon": "true"}, json=body)).json()
    assert {**body, "state": "DEPLOYING"}.items() <= first.items()
    request = next(fact for fact in (await gate.view.fresh()).facts.values() if isinstance(fact, DeployedModel))
    assert (request.deployment, request.published.model_id, request.published.policy_version) == ("dep-1", model_id, 1)
    path = f"{DEPLOYED}/{first['name'].rpartition('/')[2]}"
    await engine.fails(model_id, incarnation, 1, "no space")
    broken = (await gateway.get(path)).json()
    assert (broken["state"], broken["status"]) == ("DEPLOYING", {"code": "INTERNAL", "message": "no space"})
    await engine.serves(model_id, incarnation, 1)
    assert (await gateway.get(path)).json()["state"] == "DEPLOYED"
    refs = (await gateway.get(f"{MODELS}/m1")).json()["deployedModelRefs"]
    assert [(ref["name"], ref["state"]) for ref in refs] == [(first["name"], "DEPLOYED")]
    assert (await gateway.delete(f"{MODELS}/m1")).status_code == 400
    assert (await gateway.delete(f"{DEPLOYMENTS}/dep-1")).json()["code"] == 9

    await lane.train(await begin_step(gateway, gate, "job-1", "m2"))
    await gateway.post(DEPLOYED, params={"replaceMergedAddon": "true"}, json={**body, "model": "m2"})
    listed = (await gateway.get(DEPLOYED)).json()["deployedModels"]
    assert [(one["model"], one["state"]) for one in listed] == [("accounts/default/models/m2", "DEPLOYING")]
    path = f"{DEPLOYED}/{listed[0]['name'].rpartition('/')[2]}"
    await engine.serves(model_id, incarnation, 2)
    assert (await gateway.delete(path)).json() == {}
    assert (await gateway.get(path)).json()["state"] == "UNDEPLOYING"
    await engine.forgets(model_id)
    assert (await gateway.get(path)).status_code == 404
    assert (await gateway.delete(path)).status_code == 404


async def test_each_engine_shows_its_snapshot_and_the_requested_one(gateway: httpx.AsyncClient, gate: Gate):
    lane, model_id = LaneDouble(gate), rlor_model_id("default", "job-1")
    one, two = EngineDouble(gate, "e1", "dep-1"), EngineDouble(gate, "e2", "dep-1")
    await deploy(gateway, "dep-1")
    incarnation = await begin_job(gateway, gate, "job-1", hotLoadDeploymentId="dep-1")
    assert (await gateway.get(HOT_LOAD, headers=HEADERS)).json() == {"replicas": []}
    await one.serves("tiny")
    idle = (await gateway.get(HOT_LOAD, headers=HEADERS)).json()["replicas"]
    assert [(r["current_snapshot_identity"], r["readiness"], r["loading_state"]) for r in idle] == [("", True, {"stage": "idle"})]

    await lane.train(await begin_step(gateway, gate, "job-1", "m1"), identity="v1-aaaa")
    await lane.train(await begin_step(gateway, gate, "job-1", "m2"), identity="v2-bbbb")
    unknown = await gateway.post(HOT_LOAD, headers=HEADERS, json={"identity": "v9-zzzz"})
    assert (unknown.status_code, unknown.json()["code"]) == (404, 5)
    delta = {"previous_snapshot_identity": "", "compression_format": "arc_v2", "checksum_format": "alder32"}
    asked = {"identity": "v1-aaaa", "reset_prompt_cache": "new_session", "incremental_snapshot_metadata": delta}
    assert (await gateway.post("/v1/models/hot_load", headers=HEADERS, json=asked)).json() == {}
    request = next(fact for fact in (await gate.view.fresh()).facts.values() if isinstance(fact, HotLoad))
    assert (request.published.policy_version, request.reset_prompt_cache) == (1, "new_session")
    await two.serves("tiny")
    await one.serves(model_id, incarnation, 1)
    await two.fails(model_id, incarnation, 1, "no space")
    shown = (await gateway.get("/v1/models/hot_load", headers=HEADERS)).json()["replicas"]
    assert [(r["replica"], r["current_snapshot_identity"], r["loading_state"]["stage"]) for r in shown] == [
        ("e1", "v1-aaaa", "completed"),
        ("e2", "", "error"),
    ]
    assert shown[1]["loading_state"]["target_snapshot_identity"] == "v1-aaaa"
    assert shown[0]["loaded_adapters"] == [{"identity": "v1-aaaa", "status": "loaded"}]

    await gateway.post(HOT_LOAD, headers=HEADERS, json={"identity": "v2-bbbb", "reset_prompt_cache": True})
    waiting = (await gateway.get(HOT_LOAD, headers=HEADERS)).json()["replicas"][0]
    assert (waiting["current_snapshot_identity"], waiting["loading_state"]) == (
        "v1-aaaa",
        {"stage": "loading", "target_snapshot_identity": "v2-bbbb"},
    )
    back = await gateway.post(HOT_LOAD, headers=HEADERS, json={"identity": "v1-aaaa"})
    assert (back.status_code, "does not go back" in back.json()["message"]) == (409, True)
    assert (await gateway.post(f"{HOT_LOAD}/hint", headers=HEADERS, json={"files": []})).json() == {}
    assert (await gateway.delete(f"{DEPLOYMENTS}/dep-1/ledger")).json() == {}
    assert (await gateway.get(HOT_LOAD, headers=HEADERS)).json()["replicas"][0]["loading_state"] == {"stage": "idle"}


async def test_inference_knows_models_by_their_names_and_by_their_deployments(gateway: httpx.AsyncClient, gate: Gate):
    await deploy(gateway, "dep-1")
    await begin_job(gateway, gate, "job-1")
    training = await begin_step(gateway, gate, "job-1", "m1")

    async def asked(name: str) -> tuple[int, str]:
        answer = await gateway.post("/inference/v1/completions", json={"model": name, "prompt": [1, 2], "max_tokens": 4})
        return answer.status_code, answer.json()["error"]["message"]

    early = await asked("accounts/default/models/m1")
    assert (early[0], "has not begun" in early[1]) == (404, True)
    for name in ("accounts/other/models/m1", "accounts/default/models/none", "accounts/default/deployments/none", "accounts/default/m1"):
        assert (await asked(name))[0] == 404, name
    # Without an engine the answer is another one than for an unknown name.
    await LaneDouble(gate).train(training)
    for name in ("accounts/default/models/m1", "accounts/default/deployments/dep-1", "accounts/fireworks/models/tiny"):
        assert (await asked(name))[0] == 503, name


async def test_wrong_hot_loads_are_rejected_with_the_fault(gateway: httpx.AsyncClient):
    await deploy(gateway, "dep-1")
    await deploy(gateway, "dep-2", enableHotLoad=False)
    wrong: list[tuple[dict[str, object], dict[str, str], int, str]] = [
        ({"identity": "a", "more": 1}, HEADERS, 400, "Extra inputs are not permitted"),
        ({"identity": "a/b"}, HEADERS, 400, "identity"),
        ({}, HEADERS, 400, "identity"),
        ({"identity": "a", "reset_prompt_cache": "some"}, HEADERS, 400, "reset_prompt_cache"),
        ({"identity": "a"}, {}, 400, "fireworks-deployment"),
        ({"identity": "a"}, {"fireworks-deployment": "accounts/default/deployments/none"}, 404, "does not exist"),
        ({"identity": "a"}, {"fireworks-deployment": "accounts/other/deployments/dep-1"}, 404, "another account"),
        ({"identity": "a"}, {"fireworks-deployment": "accounts/default/deployments/dep-2"}, 400, "enableHotLoad"),
    ]
    for body, headers, status, message in wrong:
        for path in (HOT_LOAD, "/v1/models/hot_load"):
            rejected = await gateway.post(path, headers=headers, json=body)
            assert rejected.status_code == status, rejected.text
            assert message in rejected.json()["message"], rejected.text
