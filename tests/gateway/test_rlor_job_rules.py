"""Rejections of RLOR jobs, each with its status and a helpful message; and the settings that follow from accepted fields."""

from pathlib import Path

import httpx
import orjson
import pytest
from tests.gateway.conftest import gateway_settings, running
from tests.gateway.rlor_calls import JOBS, create, dataset, keep_alive, one_shot, rl_line

from headrace.core.settings import BaseModelEntry, Settings
from headrace.core.topic_admin import apply
from headrace.gateway.log_view import LogView
from headrace.gateway.rlor.resources import rlor_model_id
from headrace.gateway.tokens import SecretBox, SecretBoxError, create_token
from headrace.schemas.rlor import RlorJob, rlor_job_key
from headrace.schemas.training import ModelSettings

S3_SECRET = '{"aws_access_key_id": "hush", "aws_secret_access_key": "hush-hush"}'  # noqa: S105 - not a real one
KEY = "a random text of more than thirty-two characters"


def training(**config: object) -> dict[str, object]:
    return keep_alive(trainingConfig={"baseModel": "tiny", **config})


def loss(method: str, **more: object) -> dict[str, object]:
    return keep_alive(lossConfig={"method": method, **more})


WRONG: list[tuple[dict[str, object], int, str]] = [
    ({}, 400, "exactly one says what to begin with"),
    ({"keepAlive": True, "trainingConfig": {"baseModel": "tiny", "warmStartFrom": "m"}}, 400, "both are given"),
    ({"trainingConfig": {"baseModel": "tiny"}}, 400, "dataset: a job of one step needs one"),
    ({"trainingConfig": {"baseModel": "tiny"}, "dataset": ""}, 400, "dataset: a job of one step needs one"),
    (one_shot("none"), 404, "accounts/default/datasets/none does not exist"),
    (one_shot(dataset="accounts/other/datasets/d1"), 404, "another account"),
    (one_shot(dataset="accounts/default/models/d1"), 400, "dataset: 'accounts/default/models/d1' is no name of this kind"),
    (keep_alive(trainingConfig={"baseModel": "llama"}), 400, "trainingConfig.baseModel: base_model: 'llama' is not in the catalogue"),
    (training(loraRank=5), 400, "trainingConfig.loraRank: 5 is not possible: 4, 8, 16 or 32; 0 trains all parameters"),
    (training(loraRank=64), 400, "trainingConfig.loraRank: 64 is not possible"),
    (training(maxContextLength=1000), 400, "trainingConfig.maxContextLength: Input should be a multiple of 16"),
    (training(epochs=11), 400, "trainingConfig.epochs"),
    (training(epochs=-1), 400, "trainingConfig.epochs"),
    (training(learningRate=-1), 400, "trainingConfig.learningRate"),
    (training(learningRate="fast"), 400, "trainingConfig.learningRate"),
    (training(gradientAccumulationSteps=2), 400, "trainingConfig.gradientAccumulationSteps"),
    (training(region="MARS_1"), 400, "trainingConfig.region: 'MARS_1' is no region"),
    (training(jinjaTemplate="{{ x }}"), 501, "trainingConfig.jinjaTemplate"),
    (training(loraDropout=0.1), 501, "trainingConfig.loraDropout"),
    (training(lrScheduler={"cosine": {}}), 501, "trainingConfig.lrScheduler.cosine"),
    (training(lrScheduler={}), 400, "exactly one of constant, linear and cosine"),
    (training(warmStartFrom="m", baseModel=""), 404, "accounts/default/models/m does not exist"),
    (loss("DAPO", klBeta=0.1), 400, "loss_config.kl_beta must be 0 or unset for method DAPO"),
    (loss("GSPO_TOKEN", klBeta=0.1), 400, "loss_config.kl_beta must be 0 or unset for method GSPO_TOKEN"),
    (loss("GRPO", klBeta=-1), 400, "lossConfig.klBeta"),
    (loss("DPO", dpo={"beta": 0.1}), 501, "lossConfig.method"),
    (loss("DPO", dpo={"beta": 0.5}), 400, "lossConfig.dpo.beta"),
    (loss("ORPO"), 501, "lossConfig.method"),
    (loss("PPO"), 400, "lossConfig.method"),
    (keep_alive(evalAutoCarveout=True, evaluationDataset="d2"), 400, "evalAutoCarveout and evaluationDataset exclude each other"),
    (one_shot(hotLoadDeploymentId="dep"), 400, "hotLoadDeploymentId: only with keepAlive or serviceMode"),
    (keep_alive(hotLoadDeploymentId="a/b"), 400, "hotLoadDeploymentId"),
    (keep_alive(rewardWeights=["a=b"]), 400, "rewardWeights[0]: 'a=b': a metric's name is needed, or name=weight"),
    (keep_alive(rewardWeights=["a", "a=2"]), 400, "rewardWeights[1]: 'a=2': the metric 'a' is there twice"),
    (keep_alive(rewardWeights=["a=inf"]), 400, "a finite weight"),
    (keep_alive(rewardWeights="score"), 400, "rewardWeights"),
    (keep_alive(usePurpose="flight"), 400, "usePurpose"),
    (keep_alive(purpose="PURPOSE_FLIGHT"), 400, "purpose"),
    (keep_alive(displayName="x" * 64), 400, "displayName"),
    (keep_alive(nodeCount=-1), 400, "nodeCount"),
    (keep_alive(nodeCount=1e30), 400, "nodeCount"),
    (keep_alive(managedBy="x" * 300_000), 413, "data belongs into a dataset"),
    (keep_alive(inactivityTimeout="1 hour"), 400, 'inactivityTimeout: a duration is a number of seconds with "s" after it'),
    (keep_alive(inactivityTimeout="10801s"), 400, "inactivityTimeout"),
    (keep_alive(azureBlobStorageConfig={"tenantId": "t"}), 501, "azureBlobStorageConfig"),
    (keep_alive(awsS3Config={"iamRoleArn": "arn:aws:iam::123456789012:role/r"}), 501, "awsS3Config.iamRoleArn"),
    (keep_alive(awsS3Config={"iamRoleArn": "role"}), 400, "awsS3Config.iamRoleArn"),
    (keep_alive(awsS3Config={"credentialsSecret": "accounts/default/secrets/hush"}), 400, "keeps no secrets by name"),
    (keep_alive(awsS3Config={"credentialsSecret": S3_SECRET}), 400, "awsS3Config.credentialsSecret: this gateway takes no keys"),
    (keep_alive(wandbConfig={"enabled": True, "apiKey": "hush"}), 400, "wandbConfig.apiKey: this gateway takes no keys"),
    ({"serviceMode": True, "trainingConfig": {"baseModel": "tiny", "loraRank": 8}}, 400, "trainingConfig.loraRank: 8 with serviceMode"),
    ({"serviceMode": True, "keepAlive": True, "trainingConfig": {"baseModel": "tiny"}}, 400, "serviceMode and keepAlive"),
    ({"serviceMode": True, "dataset": "d1", "trainingConfig": {"baseModel": "tiny"}}, 400, "dataset: a job with serviceMode has none"),
    ({"serviceMode": True, "trainingConfig": {"warmStartFrom": "m"}}, 400, "trainingConfig.warmStartFrom"),
    ({"serviceMode": True, "dataset": "", "trainingConfig": {"baseModel": "tiny", "loraRank": 0}}, 501, "serviceMode is not built yet"),
    (one_shot(trainingConfig={"baseModel": "tiny", "outputModel": "Not_An_Id"}), 400, "trainingConfig.outputModel"),
    (one_shot(trainingConfig={"baseModel": "tiny", "outputModel": "tiny"}), 409, "accounts/default/models/tiny exists"),
    (one_shot(lossConfig={"klReferenceJob": "missing"}), 404, "rlorTrainerJobs/missing does not exist"),
]


async def test_each_wrong_request_has_its_status_and_a_helpful_message(gateway: httpx.AsyncClient, settings: Settings):
    await dataset(gateway, "d1")
    for body, status, message in WRONG:
        answer = await create(gateway, "j1", body)
        assert (answer.status_code, message in answer.json()["message"]) == (status, True), (body, answer.text)
        assert answer.json().keys() == {"code", "message", "details"}
        assert "hush" not in answer.text
        if status in {409, 501}:
            assert answer.headers["x-should-retry"] == "false"
    for params, status, message in (
        ({"rlorTrainerJobId": "a b"}, 400, "rlorTrainerJobId"),
        ({"rlorTrainerJobId": "a\n"}, 400, "rlorTrainerJobId"),
        ({"trainingShape": "accounts/a/trainingShapes/s"}, 501, "trainingShape"),
        ({"deploymentId": "other"}, 400, "deploymentId='other' differs from hotLoadDeploymentId='dep'"),
    ):
        answer = await gateway.post(JOBS, params=params, json=keep_alive(hotLoadDeploymentId="dep"))
        assert (answer.status_code, message in answer.json()["message"]) == (status, True), answer.text
    for content in (b"{", b"[]", b'"text"', b"\xff"):
        assert (await gateway.post(JOBS, content=content)).status_code == 400
    assert (await gateway.get(JOBS)).json()["totalSize"] == 0
    async with LogView(settings) as view:
        assert not [*view.tables.models()]
    for method, path in (
        ("GET", "/missing"),
        ("DELETE", "/missing"),
        ("POST", "/missing:cancel"),
        ("POST", "/missing:resume"),
        ("GET", "/missing/checkpoints"),
        ("GET", "/a%20b%2Fc:d%3Fe"),
        ("POST", "/a%20b:c%3Fe:cancel"),
    ):
        gone = await gateway.request(method, JOBS + path)
        assert (gone.status_code, gone.json()["code"]) == (404, 5), path
    step = await gateway.post(f"{JOBS}/missing:executeTrainStep", json={"dataset": "d1", "outputModel": "m"})
    assert step.status_code == 404
    for body in ({}, {"dataset": "d1"}, {"outputModel": "m"}, {"dataset": "", "output_model": "m"}):
        assert (await gateway.post(f"{JOBS}/missing:executeTrainStep", json=body)).status_code == 400


LINES: list[tuple[list[bytes], list[str], str]] = [
    ([rl_line("a", [0, 1], tone=[1, 0])], [], "sample 1: which metric is the reward? There are score, tone: name some in rewardWeights"),
    ([rl_line("a", [0, 1])], ["tone"], "line 1 sample 1: the metric 'tone' of the reward is missing; there are score"),
    ([rl_line("a", [0, 1e308])], ["score=1e10"], "line 1 sample 2: the reward, the weighted sum of score, is not finite"),
]


async def test_missing_rewards_are_rejected_with_their_line(gateway: httpx.AsyncClient):
    for index, (lines, weights, message) in enumerate(LINES):
        await dataset(gateway, f"d{index}", *lines)
        answer = await create(gateway, "j1", one_shot(f"d{index}", rewardWeights=weights))
        assert (answer.status_code, message in answer.json()["message"]) == (400, True), answer.text


async def test_settings_of_the_model_follow_from_the_fields_and_defaults_from_the_catalogue(gateway: httpx.AsyncClient, settings: Settings):
    config = {
        "base_model": "accounts/fireworks/models/tiny",
        "learning_rate": 2e-4,
        "max_context_length": 1024,
        "lora_rank": 16,
        "lora_alpha": 16,
        "lora_target_modules": ["q_proj"],
        "batch_size": 4096,
        "learning_rate_warmup_steps": 3,
        "optimizer_weight_decay": 0.01,
        "accelerator_type": "NVIDIA_H100_80GB",
        "region": "EU_ICELAND_DEV_1",
    }
    body = {"keep_alive": True, "training_config": config, "loss_config": {"method": "GSPO_TOKEN"}}
    shown = (await create(gateway, "snake", body)).json()
    assert shown["trainingConfig"]["learningRate"] == 2e-4
    assert shown["status"]["message"] == "no worker of group default has read the command yet"
    async with LogView(settings) as view:
        found = view.tables.model(rlor_model_id("default", "snake"))
        assert found is not None
        made: ModelSettings = found.settings
        fact = view.tables.facts[rlor_job_key("default", "snake")]
        assert isinstance(fact, RlorJob)
    many = await create(gateway, "many", keep_alive(**{f"key{n}": n for n in range(100)}))
    assert many.status_code == 200
    assert fact.without_effect == ("trainingConfig.acceleratorType", "trainingConfig.region")
    assert (made.base_model, made.adaptation, made.max_sequence_tokens) == ("tiny", "lora", 1024)
    assert (made.lora.r, made.lora.alpha, made.lora.target_modules) == (16, 16, ("q_proj",))
    assert (made.optimizer.warmup_updates, made.optimizer.weight_decay) == (3, 0.01)
    assert (made.train.importance_sampling_level, made.train.epsilon, made.train.epsilon_high) == ("sequence", 0.0003, 0.0004)
    assert (made.train.learning_rate, made.train.packed_sequence_length) == (2e-4, 1024)

    zeros = {"learningRate": 0, "maxContextLength": 0, "epochs": 0, "batchSize": 0, "batchSizeSamples": 0, "loraAlpha": 0.0}
    config = {"baseModel": "tiny", **zeros, "gradientAccumulationSteps": 0, "optimizerWeightDecay": 0}
    unset = await create(gateway, "zeros", keep_alive(trainingConfig=config, nodeCount=0, inactivityTimeout="0s", trainerReplicaCount=0))
    left_out = await create(gateway, "zeros-left-out", keep_alive(trainingConfig={"baseModel": "tiny"}))
    shown = [{key: value for key, value in answer.json().items() if key not in {"name", "createTime"}} for answer in (unset, left_out)]
    assert unset.status_code == 200
    assert orjson.loads(orjson.dumps(shown[0]).replace(b"zeros", b"x")) == orjson.loads(
        orjson.dumps(shown[1]).replace(b"zeros-left-out", b"x")
    )

    for lora_rank, adaptation in ((0, "full"), (None, "lora")):
        await create(gateway, f"rank-{lora_rank}", keep_alive(trainingConfig={"baseModel": "tiny", "loraRank": lora_rank}))
        async with LogView(settings) as view:
            found = view.tables.model(rlor_model_id("default", f"rank-{lora_rank}"))
        assert found is not None
        assert found.settings.adaptation == adaptation
    assert (await gateway.get(f"{JOBS}/rank-None")).json()["trainingConfig"]["loraRank"] == 8


async def test_keys_in_a_request_are_stored_encrypted_and_never_shown(kafka: str, topic_prefix: str, tmp_path: Path):
    settings = gateway_settings(kafka, topic_prefix, tmp_path, secrets_key=KEY)
    await apply(settings)
    wandb = {"enabled": True, "apiKey": "hush-hush", "project": "p", "entity": "e"}
    body = keep_alive(wandbConfig=wandb, awsS3Config={"credentialsSecret": S3_SECRET})
    async with running(settings) as client:
        made = await create(client, "j1", body)
        shown = await client.get(f"{JOBS}/j1")
    for answer in (made, shown):
        assert answer.json()["wandbConfig"] == {"enabled": True, "project": "p", "entity": "e", "runId": "", "url": ""}
        assert "hush" not in answer.text
    async with LogView(settings) as view:
        fact = view.tables.facts[rlor_job_key("default", "j1")]
    assert isinstance(fact, RlorJob)
    text = fact.model_dump_json()
    assert "hush" not in text
    assert settings.gateway.secrets_key is not None
    box = SecretBox(settings.gateway.secrets_key)
    assert box.open("wandbConfig.apiKey", fact.secrets["wandbConfig.apiKey"]) == "hush-hush"
    assert box.open("", fact.secrets["awsS3Config.credentialsSecret"]) == S3_SECRET
    for other in (None, type(settings.gateway.secrets_key)(KEY + "!")):
        with pytest.raises(SecretBoxError, match=r"wandbConfig\.apiKey: it was encrypted with another"):
            SecretBox(other).open("wandbConfig.apiKey", fact.secrets["wandbConfig.apiKey"])
    with pytest.raises(SecretBoxError, match="32 characters"):
        SecretBox(type(settings.gateway.secrets_key)("short"))


async def test_other_accounts_jobs_are_404_and_a_key_has_one_account(kafka: str, topic_prefix: str, tmp_path: Path):
    tokens = tmp_path / "tokens"
    keys = {account: create_token(tokens, account=account, owner=f"{account}@example.org")[1] for account in ("default", "other")}
    settings = gateway_settings(kafka, topic_prefix, tmp_path, tokens_file=tokens)
    settings = settings.model_copy(update={"base_models": {"tiny": BaseModelEntry(path=str(tmp_path), trainable=("full",))}})
    await apply(settings)
    async with running(settings) as client:
        mine, theirs = ({"X-Api-Key": keys["default"]}, {"Authorization": f"Bearer {keys['other']}"})
        body = keep_alive(trainingConfig={"baseModel": "tiny"})
        made = await create(client, "j1", body, **mine)
        assert (made.json()["createdBy"], made.json()["trainingConfig"]["loraRank"]) == ("default@example.org", 0)
        assert (await create(client, "j2", training(loraRank=8), **mine)).status_code == 400  # the catalogue allows full training only
        assert (await create(client, "j2", body)).status_code == 401
        for method, path in (("GET", "/j1"), ("DELETE", "/j1"), ("POST", "/j1:cancel"), ("GET", "")):
            assert (await client.request(method, JOBS + path, headers=theirs)).status_code == 404
        accounts = (await client.get("/v1/accounts", params={"pageSize": 2}, headers=theirs)).json()
        assert accounts["accounts"] == [{"name": "accounts/other"}]
