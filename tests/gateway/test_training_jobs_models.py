"""Models and their checkpoints without a worker: made, found, told apart, deleted."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import cramjam
import httpx
import pytest
from tests.gateway.conftest import gateway_settings, running
from tests.gateway.job_bodies import faults, group, job, make_model

from headrace.core.settings import Settings
from headrace.core.topic_admin import apply
from headrace.gateway.tokens import create_token

MODELS, JOBS = "/v1/preview/models", "/v1/preview/training-jobs"
AGENT = {"project": "tests", "name": "agent", "base_model": "tiny"}


async def test_a_model_is_there_when_the_answer_is_and_asking_again_finds_it(gateway: httpx.AsyncClient) -> None:
    made = (await gateway.post(MODELS, json={"entity": None, **AGENT, "return_existing": True})).json()
    expected = {"entity": "default", "project": "tests", "name": "agent", "base_model": "tiny", "run_id": None}
    assert {key: made[key] for key in expected} == expected
    again = await asyncio.gather(*(gateway.post(MODELS, json={**AGENT, "return_existing": True}) for _ in range(4)))
    assert [answer.json() for answer in again] == [made] * 4
    assert (await gateway.post(MODELS, json=AGENT)).status_code == 409
    other = await gateway.post(MODELS, json={**AGENT, "config": {"seed": 5}})
    assert (other.status_code, "return_existing" in other.json()["detail"], "seed" in other.json()["detail"]) == (409, True, True)
    assert (await gateway.post(MODELS, json={**AGENT, "config": {"seed": 5}, "return_existing": True})).json() == made


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"base_model": "huge"}, "body.base_model", "there are tiny"),
    ({"name": ""}, "body.name", "1 to 128"),
    ({"name": "a/b"}, "body.name", "one of / : @"),
    ({"project": " x"}, "body.project", "without blanks"),
    ({"config": {"adaptation": "some"}}, "body.config.adaptation", "'lora' or 'full'"),
    ({"config": {"lora": {"r": 0}}}, "body.config.lora.r", "greater than or equal to 1"),
    ({"name": None}, "body.name", "valid string"),
    ({"config": {"lorra": {"r": 8}}}, "body.config.lorra", "no such setting"),
    ({"config": {"start_weights": {"uri": "file:///w", "digest": "0"}}}, "body.config.start_weights", "no such setting"),
    ({"config": {"train": {"learning_rte": 1e-3}}}, "body.config.train.learning_rte", "no such setting"),
    ({"config": {"lora": {"rank": 8}}}, "body.config.lora.rank", "no such setting"),
]


@pytest.mark.parametrize(("fields", "place", "message"), REFUSED)
async def test_what_no_model_can_be_made_of_is_refused_with_its_place(
    gateway: httpx.AsyncClient, fields: dict[str, Any], place: str, message: str
) -> None:
    found = faults(await gateway.post(MODELS, json={**AGENT, **fields}))
    assert list(found) == [place]
    assert message in found[place]


@pytest.mark.parametrize("path", [JOBS, "/v1/preview/sft-training-jobs"])
async def test_a_model_id_that_is_no_uuid_is_422_with_its_place_in_body_and_path(gateway: httpx.AsyncClient, path: str) -> None:
    body = job("my-agent", group()) if path == JOBS else {"model_id": "my-agent", "training_data_url": "x"}
    answer = await gateway.post(path, json=body)
    assert (answer.status_code, [sorted(item) for item in answer.json()["detail"]]) == (422, [["loc", "msg", "type"]])
    assert "valid UUID" in faults(answer)["body.model_id"]
    assert "valid UUID" in faults(await gateway.get(f"{MODELS}/my-agent/checkpoints"))["path.model_id"]
    assert (await gateway.get(f"{MODELS}/{uuid.uuid4()}/checkpoints")).status_code == 404


async def test_without_return_existing_one_of_several_that_make_a_model_has_it_and_the_others_are_told(settings: Settings) -> None:
    async with running(settings) as first, running(settings) as second:
        for n in range(3):
            body = {**AGENT, "name": f"agent-{n}", "return_existing": False}
            answers = await asyncio.gather(*(http.post(MODELS, json=body) for http in (first, second, first, second)))
            assert sorted(answer.status_code for answer in answers) == [200, 409, 409, 409], [answer.text for answer in answers]
            both = await asyncio.gather(*(http.post(MODELS, json={**body, "return_existing": True}) for http in (first, second)))
            made = next(answer.json() for answer in answers if answer.status_code == 200)
            assert [answer.json() for answer in both] == [made, made]


async def test_a_fresh_model_has_its_base_as_step_0_and_the_cursor_is_exclusive(gateway: httpx.AsyncClient) -> None:
    model = await make_model(gateway)
    listed = (await gateway.get(f"{MODELS}/{model}/checkpoints", params={"limit": 1, "order": "desc"})).json()
    (first,) = listed["data"]
    assert (first["step"], first["metrics"], listed["has_more"], listed["last_id"]) == (0, {}, False, first["id"])
    behind = (await gateway.get(f"{MODELS}/{model}/checkpoints", params={"after": first["id"]})).json()
    assert (behind["data"], behind["first_id"], behind["has_more"]) == ([], None, False)
    assert faults(await gateway.get(f"{MODELS}/{model}/checkpoints", params={"after": "x"})).keys() == {"query.after"}
    assert faults(await gateway.get(f"{MODELS}/{model}/checkpoints", params={"limit": 101})).keys() == {"query.limit"}


async def test_a_deleted_checkpoint_is_listed_no_more(gateway: httpx.AsyncClient) -> None:
    model = await make_model(gateway)
    gone = await gateway.request("DELETE", f"{MODELS}/{model}/checkpoints", json={"steps": [0, 3]})
    assert gone.json() == {"deleted_count": 1, "not_found_steps": [3]}
    assert (await gateway.get(f"{MODELS}/{model}/checkpoints")).json()["data"] == []
    again = await gateway.request("DELETE", f"{MODELS}/{model}/checkpoints", json={"steps": [0]})
    assert again.json() == {"deleted_count": 0, "not_found_steps": [0]}


async def test_a_deleted_model_is_gone_for_all_that_names_it_and_can_be_made_anew(gateway: httpx.AsyncClient) -> None:
    model = await make_model(gateway, "agent")
    gone = await gateway.delete(f"{MODELS}/{model}", headers={"content-type": "application/json"})
    assert gone.json() == {"model_id": model, "deleted_checkpoints": 1, "deleted_run": False}
    answers = [
        await gateway.delete(f"{MODELS}/{model}"),
        await gateway.get(f"{MODELS}/{model}/checkpoints"),
        await gateway.post("/v1/preview/training-jobs", json=job(model, group())),
        await gateway.post(f"{MODELS}/{model}/log", json={"trajectory_groups": [], "split": "val"}),
    ]
    assert [answer.status_code for answer in answers] == [404] * 4
    assert all(model in answer.json()["detail"] for answer in answers)
    assert await make_model(gateway, "agent", config={"seed": 5}) == model


async def test_logged_groups_are_kept_as_they_were_sent(gateway: httpx.AsyncClient, tmp_path: Path) -> None:
    model = await make_model(gateway)
    groups = [
        group(metadata={"a\nb": "c"}),
        {"trajectories": [], "exceptions": [{"type": "ValueError", "message": "boom", "traceback": ""}]},
    ]
    answer = await gateway.post(f"{MODELS}/{model}/log", json={"model_id": model, "trajectory_groups": groups, "split": "val"})
    assert (answer.json()["groups"], answer.json()["trajectories"]) == (2, 2)
    (stored,) = (tmp_path / "store" / "logged" / model).iterdir()
    lines = bytes(cramjam.zstd.decompress(stored.read_bytes())).splitlines()
    assert [httpx.Response(200, content=line).json() for line in lines] == groups
    bad = await gateway.post(f"{MODELS}/{model}/log", json={"trajectory_groups": [{"trajectories": [{"reward": "x"}]}], "split": "val"})
    assert list(faults(bad)) == ["body.trajectory_groups.0.trajectories.0.reward"]
    assert list(faults(await gateway.post(f"{MODELS}/{model}/log", json={"trajectory_groups": []}))) == ["body.split"]


@pytest.fixture
async def two_accounts(kafka: str, topic_prefix: str, tmp_path: Path) -> AsyncIterator[tuple[httpx.AsyncClient, dict[str, Settings]]]:
    """A gateway with keys of two accounts, one of them for one project only."""
    tokens = tmp_path / "tokens"
    keys = {
        "acme": create_token(tokens, account="acme", owner="ada")[1],
        "red": create_token(tokens, account="acme", owner="bob", projects=["red"])[1],
        "other": create_token(tokens, account="other", owner="eve")[1],
    }
    settings = gateway_settings(kafka, topic_prefix, tmp_path, tokens_file=tokens)
    await apply(settings)
    async with running(settings) as http:
        yield http, {name: {"Authorization": f"Bearer {key}"} for name, key in keys.items()}  # type: ignore[misc]


async def test_what_belongs_to_others_is_not_there(two_accounts: tuple[httpx.AsyncClient, dict[str, Any]]) -> None:
    http, keys = two_accounts
    made = await http.post(MODELS, json=AGENT, headers=keys["acme"])
    model = made.json()["id"]
    assert made.json()["entity"] == "acme"
    created = await http.post("/v1/preview/training-jobs", json=job(model, group()), headers=keys["acme"])
    job_id = created.json()["id"]
    for key in ("other", "red"):
        answers = [
            await http.post(MODELS, json={**AGENT, "entity": "acme"}, headers=keys[key]),
            await http.get(f"{MODELS}/{model}/checkpoints", headers=keys[key]),
            await http.post("/v1/preview/training-jobs", json=job(model, group()), headers=keys[key]),
            await http.get(f"/v1/preview/training-jobs/{job_id}", headers=keys[key]),
            await http.get(f"/v1/preview/training-jobs/{job_id}/events", headers=keys[key]),
            await http.delete(f"{MODELS}/{model}", headers=keys[key]),
        ]
        assert [answer.status_code for answer in answers] == [404] * 6
    assert (await http.get(f"/v1/preview/training-jobs/{job_id}")).status_code == 401
    assert (await http.post(MODELS, json={**AGENT, "project": "red"}, headers=keys["red"])).status_code == 200
