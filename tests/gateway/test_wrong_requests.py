"""Wrong requests of every kind: the right status, and a message that says what to do. In both APIs and in inference."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import orjson
import pytest
from tests.gateway.conftest import gateway_settings, running

from headrace.core.topic_admin import apply
from headrace.gateway.tokens import create_token

PREVIEW = "/v1/preview"
RLOR = "/v1/accounts/acme"
NO_MODEL = "8e3e1861-0000-4000-8000-000000000000"
GROUP = {"trajectories": [{"messages_and_choices": [{"role": "user", "content": "a"}], "reward": 1.0}]}


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """A request, and what is answered. `MODEL` in path, body or said is the id of a model of acme's."""

    name: str
    method: str = "POST"
    path: str
    body: Any = None
    raw: bytes | None = None
    headers: dict[str, str] | None = None
    status: int
    says: str
    """Part of the message."""


WRONG = [
    Wrong(name="no key", path=f"{PREVIEW}/models", body={}, headers={"X-Api-Key": ""}, status=401, says="Authorization: Bearer"),
    Wrong(name="a wrong key", path=f"{RLOR}/rlorTrainerJobs", body={}, headers={"X-Api-Key": "hr_1_2"}, status=401, says="revoked"),
    Wrong(name="no JSON", path=f"{PREVIEW}/training-jobs", raw=b"{", status=422, says="JSON"),
    Wrong(name="an array", path=f"{PREVIEW}/training-jobs", body=[1], status=422, says="object"),
    Wrong(name="no fields", path=f"{PREVIEW}/training-jobs", body={}, status=422, says="model_id"),
    Wrong(
        name="model unknown",
        path=f"{PREVIEW}/training-jobs",
        body={"model_id": NO_MODEL, "trajectory_groups": []},
        status=404,
        says="model",
    ),
    Wrong(
        name="a reward that is text",
        path=f"{PREVIEW}/training-jobs",
        body={"model_id": "MODEL", "trajectory_groups": [{"trajectories": [{"reward": "good"}]}]},
        status=422,
        says="reward",
    ),
    Wrong(
        name="NaN",
        path=f"{PREVIEW}/training-jobs",
        raw=b'{"model_id": "MODEL", "trajectory_groups": [{"trajectories": [{"reward": NaN}]}]}',
        status=422,
        says="NaN",
    ),
    Wrong(
        name="an option out of its range",
        path=f"{PREVIEW}/training-jobs",
        body={"model_id": "MODEL", "trajectory_groups": [GROUP], "experimental_config": {"learning_rate": -1}},
        status=422,
        says="learning_rate",
    ),
    Wrong(
        name="options that exclude each other",
        path=f"{PREVIEW}/training-jobs",
        body={"model_id": "MODEL", "trajectory_groups": [], "experimental_config": {"ppo": True, "loss_fn": "cispo"}},
        status=422,
        says="contradicts",
    ),
    Wrong(
        name="a base model that is not there",
        path=f"{PREVIEW}/models",
        body={"project": "p", "name": "n", "base_model": "gpt"},
        status=422,
        says="tiny",
    ),
    Wrong(
        name="a model that is there",
        path=f"{PREVIEW}/models",
        body={"project": "p", "name": "agent", "base_model": "tiny"},
        status=409,
        says="return_existing",
    ),
    Wrong(
        name="another account's entity",
        path=f"{PREVIEW}/models",
        body={"entity": "umbrella", "project": "p", "name": "n", "base_model": "tiny"},
        status=404,
        says="umbrella",
    ),
    Wrong(name="an order that is none", method="GET", path=f"{PREVIEW}/models/MODEL/checkpoints?order=up", status=422, says="asc"),
    Wrong(name="a limit that is none", method="GET", path=f"{PREVIEW}/models/MODEL/checkpoints?limit=1000", status=422, says="100"),
    Wrong(name="a job unknown", method="GET", path=f"{PREVIEW}/training-jobs/{NO_MODEL}/events", status=404, says="job"),
    Wrong(
        name="steps that are text",
        method="DELETE",
        path=f"{PREVIEW}/models/MODEL/checkpoints",
        body={"steps": "all"},
        status=422,
        says="steps",
    ),
    Wrong(
        name="data from nowhere",
        path=f"{PREVIEW}/sft-training-jobs",
        body={"model_id": "MODEL", "training_data_url": "wandb-artifact:///e/p/a:v0"},
        status=422,
        says="training_data",
    ),
    Wrong(name="a method that is none", method="PUT", path=f"{PREVIEW}/training-jobs", status=405, says=""),
    Wrong(name="a path that is none", method="GET", path="/v2/anything", status=404, says=""),
    Wrong(name="no model to talk to", path="/v1/chat/completions", body={"messages": []}, status=400, says="wandb-artifact"),
    Wrong(
        name="a name that is no model's",
        path="/v1/chat/completions",
        body={"model": "gpt-4", "messages": []},
        status=404,
        says="wandb-artifact",
    ),
    Wrong(name="another account", path="/v1/accounts/umbrella/rlorTrainerJobs", body={}, status=404, says="umbrella"),
    Wrong(name="no base model", path=f"{RLOR}/rlorTrainerJobs", body={"dataset": f"{RLOR[4:]}/datasets/d"}, status=400, says="baseModel"),
    Wrong(
        name="both beginnings",
        path=f"{RLOR}/rlorTrainerJobs",
        body={"keepAlive": True, "trainingConfig": {"baseModel": "tiny", "warmStartFrom": "accounts/acme/models/m"}},
        status=400,
        says="warmStartFrom",
    ),
    Wrong(
        name="KL with DAPO",
        path=f"{RLOR}/rlorTrainerJobs",
        body={"keepAlive": True, "trainingConfig": {"baseModel": "tiny"}, "lossConfig": {"method": "DAPO", "klBeta": 0.1}},
        status=400,
        says="kl_beta",
    ),
    Wrong(
        name="a rank that is no power of two",
        path=f"{RLOR}/rlorTrainerJobs",
        body={"keepAlive": True, "trainingConfig": {"baseModel": "tiny", "loraRank": 12}},
        status=400,
        says="loraRank",
    ),
    Wrong(
        name="a method that is not built",
        path=f"{RLOR}/rlorTrainerJobs",
        body={"keepAlive": True, "trainingConfig": {"baseModel": "tiny"}, "lossConfig": {"method": "DPO"}},
        status=501,
        says="DPO",
    ),
    Wrong(
        name="service mode",
        path=f"{RLOR}/rlorTrainerJobs",
        body={"serviceMode": True, "trainingConfig": {"baseModel": "tiny", "loraRank": 0}},
        status=501,
        says="serviceMode",
    ),
    Wrong(
        name="a key that can't be kept",
        path=f"{RLOR}/rlorTrainerJobs",
        body={
            "keepAlive": True,
            "trainingConfig": {"baseModel": "tiny"},
            "wandbConfig": {"enabled": True, "apiKey": "SECRET", "project": "p"},
        },
        status=400,
        says="secrets_key",
    ),
    Wrong(name="deleting what is not there", method="DELETE", path=f"{RLOR}/rlorTrainerJobs/nobody", status=404, says="nobody"),
    Wrong(
        name="a step of a job that is not there",
        path=f"{RLOR}/rlorTrainerJobs/nobody:executeTrainStep",
        body={"dataset": "d", "outputModel": "m"},
        status=404,
        says="nobody",
    ),
    Wrong(name="a filter that is none", method="GET", path=f"{RLOR}/rlorTrainerJobs?filter=state%3D", status=400, says="filter"),
    Wrong(name="a dataset that is not there", method="GET", path=f"{RLOR}/datasets/nobody", status=404, says="nobody"),
]


@pytest.fixture
async def http(kafka: str, topic_prefix: str, tmp_path: Any) -> AsyncIterator[httpx.AsyncClient]:
    _stored, token = create_token(tmp_path / "tokens", account="acme", owner="ada")
    settings = gateway_settings(kafka, topic_prefix, tmp_path, tokens_file=tmp_path / "tokens")
    await apply(settings)
    async with running(settings, headers={"X-Api-Key": token}) as client:
        yield client


async def test_each_wrong_request_has_its_status_and_a_message_that_says_what_to_do(http: httpx.AsyncClient) -> None:
    made = await http.post(f"{PREVIEW}/models", json={"project": "p", "name": "agent", "base_model": "tiny"})
    assert made.status_code == 200, made.text
    model_id = made.json()["id"]
    wrong: list[str] = []
    for case in WRONG:
        content = case.raw if case.raw is not None else None if case.body is None else orjson.dumps(case.body)
        answer = await http.request(
            case.method,
            case.path.replace("MODEL", model_id),
            content=content and content.replace(b"MODEL", model_id.encode()),
            headers={"content-type": "application/json", **(case.headers or {})},
        )
        if answer.status_code != case.status or case.says not in answer.text or "SECRET" in answer.text:
            wrong.append(f"{case.name}: {answer.status_code} {answer.text[:300]}")
        else:
            assert_shape(case, answer)
    assert not wrong, "\n".join(wrong)
    health = await http.get("/v1/health")
    assert health.status_code == 200


def assert_shape(case: Wrong, answer: httpx.Response) -> None:
    """Each API tells its errors in its own way."""
    body = answer.json()
    if case.path.startswith("/v1/accounts"):
        assert set(body) == {"code", "message", "details"}, case.name
    elif case.path.startswith("/v1/chat"):
        assert set(body) == {"error"}, case.name
    else:
        assert set(body) == {"detail"}, case.name
        if answer.status_code == 422:
            assert all(set(fault) == {"loc", "msg", "type"} for fault in body["detail"]), case.name
    if answer.status_code in {409, 501}:
        assert answer.headers["x-should-retry"] == "false", case.name


async def test_half_of_a_surrogate_pair_is_a_fault_of_its_field(http: httpx.AsyncClient) -> None:
    half, headers = "x\ud800", {"Content-Type": "application/json"}
    model = {"project": "p", "name": "n", "base_model": "tiny"}
    for path, body, status, field in (
        (f"{PREVIEW}/models", {**model, "project": half}, 422, "project"),
        (f"{PREVIEW}/models", {**model, "name": half}, 422, "name"),
        (f"{RLOR}/datasets", {"datasetId": "d", "dataset": {"externalUrl": f"s3://b/{half}"}}, 400, "externalUrl"),
    ):
        answer = await http.post(path, content=json.dumps(body), headers=headers)
        assert (answer.status_code, field in answer.text) == (status, True), answer.text
