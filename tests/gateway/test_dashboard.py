"""The dashboard's own endpoints: who sees what, what the log and the store no longer have, what a stream says."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import pytest_asyncio
from tests.browser.seeded import AGENT, OTHER, STEPS, Seeded, seed
from tests.gateway.conftest import gateway_settings, running

from headrace.core.settings import Settings
from headrace.core.topic_admin import apply
from headrace.gateway.dashboard import data
from headrace.gateway.gate import Gate
from headrace.gateway.tokens import create_token, revoke_token
from headrace.schemas.jobs import JobState

pytestmark = pytest.mark.asyncio(loop_scope="module")
ASKED = {"X-Headrace-Dashboard": "1"}
GROUP = f"/dashboard/api/models/{AGENT}/steps/{STEPS}/trajectory?group=greeting"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def seeded(kafka: str, tmp_path_factory: pytest.TempPathFactory) -> Seeded:
    folder = tmp_path_factory.mktemp("dashboard-api")
    settings = gateway_settings(kafka, f"{folder.name}.", folder)
    await apply(settings)
    return await seed(settings, folder)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(seeded: Seeded) -> AsyncIterator[httpx.AsyncClient]:
    async with running(seeded.settings) as client:
        yield client


@asynccontextmanager
async def guarded(seeded: Seeded, file: Path, token: str) -> AsyncIterator[httpx.AsyncClient]:
    changed = seeded.settings.gateway.model_copy(update={"tokens_file": file, "instance": file.parent.name})
    async with running(seeded.settings.model_copy(update={"gateway": changed}), headers={"X-Api-Key": token}) as client:
        yield client


async def test_pages_and_their_files_run_nothing_but_their_own_scripts(http: httpx.AsyncClient):
    for path in ("/", "/trajectory", "/dashboard/static/dashboard.js", "/dashboard/static/style.css"):
        found = await http.get(path)
        assert found.status_code == 200
        policy = found.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy
    assert (await http.get("/dashboard/static/..%2fdata.py")).status_code == 404


@pytest.mark.parametrize("path", ["", "/steps", "/steps/1", "/curves/loss", "/steps/1/trajectory?group=greeting"])
async def test_what_is_of_another_account_or_nowhere_is_404(http: httpx.AsyncClient, path: str):
    for model in (OTHER, "nowhere"):
        found = await http.get(f"/dashboard/api/models/{model}{path}")
        assert (found.status_code, "no model" in found.json()["detail"]) == (404, True)


async def test_a_step_or_group_or_trajectory_that_is_not_there_is_404_with_a_sentence(http: httpx.AsyncClient):
    for path, said in (
        (f"/dashboard/api/models/{AGENT}/steps/9999", "no step 9999"),
        (f"/dashboard/api/models/{AGENT}/steps/{STEPS}/trajectory?group=other", "did not train on group other"),
        (f"{GROUP}&trajectory=7", "did not train on trajectory 7"),
    ):
        found = await http.get(path)
        assert (found.status_code, said in found.json()["detail"]) == (404, True)


async def test_with_tokens_data_needs_one_and_covers_its_projects_only(seeded: Seeded, tmp_path: Path):
    file = tmp_path / "tokens"
    _, mine = create_token(file, account="default", owner="a")
    _, theirs = create_token(file, account="rival", owner="b")
    _, elsewhere = create_token(file, account="default", owner="c", projects=["another"])
    async with guarded(seeded, file, mine) as client:
        assert (await client.get("/")).status_code == 200
        seen = {token: await _models(client, token) for token in (mine, theirs, elsewhere)}
        refused = await client.get("/dashboard/api/overview", headers={"X-Api-Key": "no"})
        cancel = await client.post("/dashboard/api/jobs/job-waits/cancel", headers={**ASKED, "X-Api-Key": theirs})
    assert seen == {mine: [AGENT], theirs: [OTHER], elsewhere: []}
    assert (refused.status_code, cancel.status_code) == (401, 404)


async def test_a_job_is_cancelled_by_a_command_and_only_with_the_pages_header(http: httpx.AsyncClient, seeded: Seeded):
    await seeded.job("to-cancel", JobState.PENDING)
    await seeded.job("ended", JobState.COMPLETED)
    path = "/dashboard/api/jobs/{}/cancel"
    assert (await http.post(path.format("to-cancel"))).status_code == 403
    first, again = [await http.post(path.format("to-cancel"), headers=ASKED) for _ in range(2)]
    assert (first.status_code, again.status_code) == (200, 200)
    assert first.json() == again.json()
    assert (first.json()["state"], first.json()["can_cancel"]) == ("JOB_STATE_CANCELLING", False)
    assert (await http.post(path.format("ended"), headers=ASKED)).status_code == 409
    assert (await http.post(path.format("nowhere"), headers=ASKED)).status_code == 404


async def test_without_a_tokenizer_tokens_are_ids_and_the_page_says_so(http: httpx.AsyncClient):
    found = (await http.get(GROUP)).json()
    assert found["sequences"][0]["texts"] is None
    assert "Tokens are shown as ids" in found["notes"][0]
    assert found["histories"][0]["messages"][-1]["span"] == {"sequence": 0, "start": 7, "stop": 12}


async def test_without_its_report_a_step_is_told_from_the_log(http: httpx.AsyncClient, seeded: Seeded):
    folder = next((seeded.scratch / "store").rglob(f"reports/{STEPS - 1}-*"))
    shutil.rmtree(folder)
    path = f"/dashboard/api/models/{AGENT}/steps/{STEPS - 1}"
    step = (await http.get(path)).json()
    assert [group["group_id"] for group in step["groups"]] == list(seeded.groups)
    assert "is gone" in step["problem"]
    found = (await http.get(f"{path}/trajectory?group=greeting")).json()
    assert found["histories"][0]["messages"][-1]["text"] == "the secret is cat"
    assert found["sequences"] == []
    assert any("worker.report_rows" in note for note in found["notes"])


async def test_a_stream_names_what_changed_and_only_to_who_sees_it(http: httpx.AsyncClient, seeded: Seeded, tmp_path: Path):
    file = tmp_path / "tokens"
    _, theirs = create_token(file, account="rival", owner="b")
    async with guarded(seeded, file, theirs) as rival, _stream(http) as mine, _stream(rival) as other:
        assert [await anext(mine), await anext(other)] == [("hello", {"account": "default"}), ("hello", {"account": "rival"})]
        await seeded.step()
        assert await anext(mine) == ("change", {"models": [AGENT], "all": False})
        await seeded.touch_other()
        assert await anext(other) == ("change", {"models": [OTHER], "all": False})


async def test_a_stream_ends_when_its_key_is_revoked(seeded: Seeded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(data, "BEAT_SECONDS", 0.05)
    stored, token = create_token(tmp_path / "tokens", account="default", owner="a")
    async with guarded(seeded, tmp_path / "tokens", token) as client, _stream(client) as events:
        await anext(events)
        revoke_token(tmp_path / "tokens", stored.id)
        async with asyncio.timeout(20):
            assert [event async for event in events] == []


async def test_a_gateway_that_ends_waits_for_no_stream(seeded: Seeded):
    settings: Settings = seeded.settings
    settings = settings.model_copy(update={"gateway": settings.gateway.model_copy(update={"instance": "ends"})})
    async with httpx.AsyncClient(trust_env=False, timeout=30) as onlooker:
        async with asyncio.timeout(30), running(settings) as client:
            stream = await onlooker.send(onlooker.build_request("GET", f"{client.base_url}/dashboard/api/stream"), stream=True)
        assert b"hello" in await stream.aread()


async def test_more_changes_than_are_remembered_are_told_as_all(http: httpx.AsyncClient, seeded: Seeded):
    gate: Gate = http.gate  # type: ignore[attr-defined]
    async with _stream(http) as events:
        await anext(events)
        gate.view.tables.changed += 100_000
        await seeded.job("wakes", JobState.PENDING)
        assert await anext(events) == ("change", {"models": [], "all": True})


async def _models(client: httpx.AsyncClient, token: str) -> list[str]:
    found = await client.get("/dashboard/api/overview", headers={"X-Api-Key": token})
    return [model["id"] for model in found.json()["models"]]


@asynccontextmanager
async def _stream(client: httpx.AsyncClient) -> AsyncIterator[AsyncIterator[tuple[str, Any]]]:
    async with client.stream("GET", "/dashboard/api/stream") as response:
        assert response.headers["content-type"].startswith("text/event-stream")

        async def events() -> AsyncIterator[tuple[str, Any]]:
            name = ""
            async for line in response.aiter_lines():
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    yield name, orjson.loads(line.removeprefix("data: "))

        yield events()
