"""Requests for one thing at several gateways in the same moment: one succeeds, the others are rejected."""

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
from tests.gateway.conftest import running
from tests.gateway.lane_double import LaneDouble
from tests.gateway.rlor_calls import ACCOUNT, JOBS, create, dataset, keep_alive, one_shot, rl_line, state
from tests.gateway.test_rlor_jobs import submitted

from headrace.core.settings import Settings
from headrace.gateway.log_writer import OvertakenError, Turn, sealed
from headrace.gateway.rlor.resources import rlor_model_id
from headrace.gateway.tokens import create_token
from headrace.schemas.rlor import ModelAlias, model_alias_key

ROUNDS = 5


@pytest.fixture
async def gateways(settings: Settings) -> AsyncIterator[list[httpx.AsyncClient]]:
    """Three gateways over the same topics."""
    async with AsyncExitStack() as stack:
        found = []
        for name in "abc":
            own = settings.gateway.model_copy(update={"instance": name})
            found.append(await stack.enter_async_context(running(settings.model_copy(update={"gateway": own}))))
        yield found


def codes(answers: list[httpx.Response]) -> list[int]:
    return sorted(answer.status_code for answer in answers)


async def test_of_concurrent_creations_with_one_id_one_creates_the_job_and_its_step(settings: Settings, gateways: list[httpx.AsyncClient]):
    await dataset(gateways[0], "d1")
    for n in range(ROUNDS):
        bodies = [one_shot(displayName=f"by {k}") for k in range(len(gateways))]
        answers = await asyncio.gather(*(create(http, f"job-{n}", body) for http, body in zip(gateways, bodies, strict=True)))
        assert codes(answers) == [200, 409, 409], [answer.text for answer in answers]
        made = next(answer.json() for answer in answers if answer.status_code == 200)
        assert all(answer.json()["code"] == 6 for answer in answers if answer.status_code == 409)
        for http in gateways:
            assert (await http.get(f"{JOBS}/job-{n}")).json()["displayName"] == made["displayName"]
    _groups, jobs = await submitted(settings)
    assert len(jobs) == ROUNDS  # no step of the rejected ones trains


async def test_of_concurrent_requests_for_one_name_one_gets_it(settings: Settings, gateways: list[httpx.AsyncClient]):
    for n in range(ROUNDS):
        body = {"datasetId": f"d-{n}", "dataset": {"format": "RL", "userUploaded": {}}}
        answers = await asyncio.gather(*(http.post(f"{ACCOUNT}/datasets", json=body) for http in gateways))
        assert codes(answers) == [200, 409, 409], [answer.text for answer in answers]
        asked = {"baseModel": "tiny"}
        ids = {"deploymentId": f"dep-{n}"}
        answers = await asyncio.gather(*(http.post(f"{ACCOUNT}/deployments", params=ids, json=asked) for http in gateways))
        assert codes(answers) == [200, 409, 409], [answer.text for answer in answers]
    await dataset(gateways[0], "d1")
    # Of two jobs, one output model.
    bodies = [one_shot(trainingConfig={"baseModel": "tiny", "outputModel": "out"}) for _ in gateways]
    answers = await asyncio.gather(*(create(http, f"j{k}", body) for k, (http, body) in enumerate(zip(gateways, bodies, strict=True))))
    assert codes(answers) == [200, 409, 409], [answer.text for answer in answers]
    assert all("models/out exists" in answer.json()["message"] for answer in answers if answer.status_code == 409)


async def test_of_concurrent_steps_of_one_job_one_trains(settings: Settings, gateways: list[httpx.AsyncClient]):
    await dataset(gateways[0], "d1")
    assert (await create(gateways[0], "keep", keep_alive())).status_code == 200
    await LaneDouble(gateways[0].gate).take_up(rlor_model_id("default", "keep"))  # type: ignore[attr-defined]
    assert await state(gateways[0], "keep") == "RUNNING"
    bodies = [{"dataset": "d1", "outputModel": f"out-{k}"} for k in range(len(gateways))]
    calls = [http.post(f"{JOBS}/keep:executeTrainStep", json=body) for http, body in zip(gateways, bodies, strict=True)]
    answers = await asyncio.gather(*calls)
    assert [answer.status_code for answer in answers].count(200) == 1, [answer.text for answer in answers]
    for answer in answers:
        if answer.status_code == 409:  # its basis had changed; a repeat gets the reason
            assert (answer.json()["code"], answer.headers["x-should-retry"]) == (10, "true")
        elif answer.status_code != 200:
            assert "has not ended" in answer.json()["message"]
    _groups, jobs = await submitted(settings)
    assert len(jobs) == 1


async def test_of_changes_based_on_one_state_one_is_written(settings: Settings, gateways: list[httpx.AsyncClient]):
    """The interleaving itself: all have looked before any writes, and one that was fenced while it held the turn looks again."""
    gates: list[Any] = [http.gate for http in gateways]  # type: ignore[attr-defined]
    topic = settings.topic_names.gateway
    for n in range(ROUNDS):
        key = model_alias_key("acc", f"m{n}")

        def claim(gate: Any, k: int, name: str = f"m{n}", key: str = key) -> Any:
            alias = ModelAlias(account="acc", id=name, job=f"job-{k}", model_id="m", owner="o")
            facts = gate.view.tables.facts
            turn = Turn(of="acc", still=lambda: key not in facts)
            return gate.writer.commit([sealed(alias, topic=topic, key=key)], is_in=lambda: facts.get(key) == alias, turn=turn)

        done = await asyncio.gather(*(claim(gate, k) for k, gate in enumerate(gates)), return_exceptions=True)
        assert [type(result) for result in done if result is not None] == [OvertakenError] * 2, done
        winner = done.index(None)
        for gate in gates:
            fact = (await gate.view.fresh()).facts[key]
            assert (isinstance(fact, ModelAlias) and fact.job) == f"job-{winner}"


async def test_one_account_gets_a_deployments_id_also_with_concurrent_requests(settings: Settings, tmp_path: Any):
    keys = [{"X-Api-Key": create_token(tmp_path / "tokens", account=account, owner="o")[1]} for account in ("left", "right")]
    async with AsyncExitStack() as stack:
        https = []
        for name in "ab":
            own = settings.gateway.model_copy(update={"instance": name, "tokens_file": tmp_path / "tokens"})
            https.append(await stack.enter_async_context(running(settings.model_copy(update={"gateway": own}))))
        answers = await asyncio.gather(
            *(
                http.post(f"/v1/accounts/{account}/deployments", params={"deploymentId": "dep"}, json={"baseModel": "tiny"}, headers=key)
                for http, account, key in zip(https, ("left", "right"), keys, strict=True)
            )
        )
        assert codes(answers) == [200, 409], [answer.text for answer in answers]


def between_look_and_write(http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, do: Callable[[], Awaitable[object]]) -> None:
    """Have something happen once, when a change has just been found to be still right."""
    writer = http.gate.writer  # type: ignore[attr-defined]
    look = writer._look_again

    async def look_and_do(*args: Any) -> None:
        await look(*args)
        monkeypatch.setattr(writer, "_look_again", look)
        await do()

    monkeypatch.setattr(writer, "_look_again", look_and_do)


async def test_a_deployment_that_is_deleted_during_a_change_does_not_come_back(
    gateways: list[httpx.AsyncClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, _ = gateways
    deployment = f"{ACCOUNT}/deployments/dep"
    made = await one.post(f"{ACCOUNT}/deployments", params={"deploymentId": "dep"}, json={"baseModel": "tiny"})
    assert made.status_code == 200, made.text
    between_look_and_write(one, monkeypatch, lambda: other.delete(deployment))
    answer = await one.patch(deployment, json={"displayName": "x"})
    assert (answer.status_code, answer.json().get("code")) == (409, 10), answer.text
    assert [(await http.get(deployment)).status_code for http in gateways] == [404] * 3


async def test_an_upload_during_which_its_dataset_is_deleted_and_created_again_is_in_neither(
    gateways: list[httpx.AsyncClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, _ = gateways
    body = {"datasetId": "d1", "dataset": {"format": "RL", "userUploaded": {}}}
    place, files = f"{ACCOUNT}/datasets/d1", {"file": ("data.jsonl", rl_line("2 + 2?", [0, 1]))}

    async def again() -> None:
        assert (await other.delete(place)).status_code == 200
        assert (await other.post(f"{ACCOUNT}/datasets", json=body)).status_code == 200

    assert (await one.post(f"{ACCOUNT}/datasets", json=body)).status_code == 200
    between_look_and_write(one, monkeypatch, again)
    answer = await one.post(f"{place}:upload", files=files)
    assert (answer.status_code, "created again" in answer.text) == (404, True), answer.text
    assert [(await http.get(place)).json()["state"] for http in gateways] == ["UPLOADING"] * 3
    # The other way round: what comes in while it is deleted goes as well.
    between_look_and_write(one, monkeypatch, lambda: other.post(f"{place}:upload", files=files))
    assert (await one.delete(place)).status_code == 200
    tables = await other.gate.view.fresh()  # type: ignore[attr-defined]
    assert not [key for key in tables.facts if key.startswith(("dataset/", "dataset-file/"))]


async def test_gateways_that_fence_each_other_leave_no_traceback_behind(
    gateways: list[httpx.AsyncClient], caplog: pytest.LogCaptureFixture
) -> None:
    for n in range(ROUNDS):
        body = {"datasetId": f"d-{n}", "dataset": {"format": "RL", "userUploaded": {}}}
        answers = await asyncio.gather(*(http.post(f"{ACCOUNT}/datasets", json=body) for http in gateways))
        assert codes(answers) == [200, 409, 409], [answer.text for answer in answers]
    gc.collect()
    await asyncio.sleep(0)
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []
