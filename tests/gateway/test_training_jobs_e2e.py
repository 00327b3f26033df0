"""Jobs over HTTP that a real worker trains: what the client reads until the end, and what is there then. One worker for all."""

import asyncio
import subprocess
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.consumers.conftest import tiny_model as tiny_model  # noqa: PLC0414 - a fixture, shared
from tests.gateway.conftest import running
from tests.gateway.job_bodies import faults, group, job, make_model, placeholder, trajectory
from tests.gateway.test_training_jobs_sft import example, lines, put
from tests.worker.conftest import WorkerProcess, settings_of

from headrace.core.settings import GatewaySettings, Settings
from headrace.core.topic_admin import apply

JOBS, MODELS = "/v1/preview/training-jobs", "/v1/preview/models"
LEARNER = {"config": {"adaptation": "full", "train": {"learning_rate": 1e-3}}}


@pytest.fixture(scope="module")
def served(kafka: str, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Settings]:
    """Topics with a worker."""
    folder = tmp_path_factory.mktemp("gateway-worker")
    found = settings_of(kafka, f"gw{uuid.uuid4().hex[:8]}.", folder, tiny_model)
    found = found.model_copy(update={"gateway": GatewaySettings(port=0, instance=uuid.uuid4().hex[:8])})
    asyncio.run(apply(found))
    worker = WorkerProcess(found, folder / "worker.log")
    yield found
    code = worker.stop()
    worker.close()
    assert code == 0, (folder / "worker.log").read_text()[-4000:]


@pytest.fixture
async def http(served: Settings) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway over them."""
    async with running(served) as client:
        yield client


async def train(
    http: httpx.AsyncClient, body: dict[str, Any] | None, path: str = JOBS, *, answer: httpx.Response | None = None
) -> list[dict[str, Any]]:
    """Submit (or follow what was submitted), and poll as the reference client does, behind the last event that is known; all events."""
    answer = answer or await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    events: list[dict[str, Any]] = []
    async with asyncio.timeout(120):
        while not events or events[-1]["type"] not in {"training_ended", "training_failed"}:
            query = {"after": events[-1]["id"]} if events else {}
            events += (await http.get(f"{JOBS}/{answer.json()['id']}/events", params=query)).json()["data"]
            await asyncio.sleep(0.05)
    return events


async def steps_of(http: httpx.AsyncClient, model: str) -> list[int]:
    listed = await http.get(f"{MODELS}/{model}/checkpoints", params={"order": "desc", "limit": 100})
    return [item["step"] for item in listed.json()["data"]]


def stored_weights(settings: Settings, model: str) -> list[int]:
    """Steps whose weights are in the store."""
    (folder,) = Path(settings.store.url.removeprefix("file://"), "models", model).glob("*/weights")
    return sorted(int(path.name[:8]) for path in folder.iterdir() if (path / "manifest.json").exists())


async def test_a_job_trains_a_step_and_its_checkpoint_is_there_when_it_has_ended(http: httpx.AsyncClient) -> None:
    model = await make_model(http, **LEARNER)
    events = await train(http, job(model, group(), group(1), config={"learning_rate": 1e-3}))
    assert (await steps_of(http, model)) == [1, 0]
    assert [event["type"] for event in events] == ["training_started", "gradient_step", "training_ended"]
    assert events[0]["data"]["num_sequences"] >= 1
    metrics = events[1]["data"]
    assert {name: float(value) for name, value in metrics.items()} == metrics
    assert {"loss", "policy_loss", "grad_norm", "entropy", "learning_rate", "tokens_per_second"} <= metrics.keys()
    assert (metrics["num_groups_submitted"], metrics["num_groups_trainable"], metrics["num_trajectories"]) == (2, 2, 4)
    assert events[2]["data"] == {}
    checkpoint = (await http.get(f"{MODELS}/{model}/checkpoints", params={"limit": 1, "order": "desc"})).json()["data"][0]
    assert checkpoint["metrics"]["loss"] == metrics["loss"]


async def test_jobs_with_nothing_to_train_on_end_well_and_count_as_steps(http: httpx.AsyncClient) -> None:
    """No groups; groups of exceptions only; rewards without variance. A warning says why."""
    model = await make_model(http, "nothing", **LEARNER)
    raised = {"trajectories": [], "exceptions": [{"type": "ValueError", "message": "boom", "traceback": ""}]}
    equal = {"trajectories": [trajectory(0.5, [9, 10, 1]), trajectory(0.5, [11, 12, 1])]}
    for groups, said in (
        ([], "the job trained nothing: it has no groups"),
        ([raised], "1 of 1 groups were rejected: no_trajectories 1"),
        ([equal], "the job trained nothing: the rewards of each of its 1 groups are equal, so that no advantage is left"),
    ):
        events = await train(http, job(model, *groups))
        assert [event["type"] for event in events] == ["warning", "training_ended"]
        assert said in events[0]["data"]["message"]
    assert (await steps_of(http, model)) == [3, 2, 1, 0]


async def test_a_client_learns_which_groups_and_trajectories_were_rejected_and_why(http: httpx.AsyncClient) -> None:
    model = await make_model(http, "rejects", **LEARNER)
    foreign = {"trajectories": [trajectory(1.0, [9, 10, 1]), trajectory(0.0, [10**6, 1]), trajectory(0.5, [11, 12, 1])]}
    lost = {"trajectories": [trajectory(1.0, [10**6, 1]), trajectory(0.0, [10**6, 2])]}
    answer = await http.post(JOBS, json=job(model, group(), foreign, lost))
    events = await train(http, None, answer=answer)
    assert [event["type"] for event in events] == ["training_started", "gradient_step", "warning", "training_ended"]
    data = events[2]["data"]
    assert (data["groups_rejected"], data["num_groups"]) == (1, 3)
    assert data["rejections"]["groups"] == {"token_out_of_vocabulary": 1}
    assert data["rejections"]["trajectories"] == {"token_out_of_vocabulary": 1}
    alone, whole = sorted(data["rejections"]["listed"], key=lambda entry: entry["group"])
    assert (alone["group"], alone["trajectory"], alone["whole_group"]) == (1, 1, False)
    assert (whole["group"], whole["whole_group"], whole["reason"]) == (2, True, "token_out_of_vocabulary")
    assert "group 1, trajectory 1: token_out_of_vocabulary: trajectories[1]" in data["message"]
    shown = (await http.get(f"{JOBS}/{answer.json()['id']}")).json()
    assert shown["rejections"] == data["rejections"]
    assert "1 of 3 groups were rejected: token_out_of_vocabulary 1" in shown["warnings"]


async def test_the_placeholder_body_with_its_values_put_right_makes_a_version(http: httpx.AsyncClient) -> None:
    model = await make_model(http, "placeholder", **LEARNER)
    body = placeholder()
    body["model_id"] = model
    body["experimental_config"] |= {
        "advantage_balance": 0.5,
        "kl_penalty_reference_step": None,
        "kl_ref_adapter_path": None,
        "learning_rate": 1e-5,
        "num_trajectories_learning_rate_multiplier_power": 0.5,
    }
    rollout = body["trajectory_groups"][0]["trajectories"][0]
    rollout |= {"initial_policy_version": 0, "final_policy_version": 0}
    rollout["tools"][0]["type"] = "function"
    events = await train(http, body)
    assert events[-1]["type"] == "training_ended"
    assert (await steps_of(http, model)) == [1, 0]


async def test_a_job_that_can_not_be_trained_says_why(http: httpx.AsyncClient, served: Settings) -> None:
    model = await make_model(http, "fails", **LEARNER)
    config = {"kl_penalty_coef": 0.1, "kl_ref_adapter_path": f"{served.store.url}/nowhere"}
    events = await train(http, job(model, group(), config=config))
    assert [event["type"] for event in events] == ["training_failed"]
    assert "nowhere" in events[0]["data"]["error_message"]
    assert (await steps_of(http, model)) == [0]


async def test_deleted_checkpoints_go_from_the_store_when_nothing_needs_them_and_the_model_goes_on(
    http: httpx.AsyncClient, served: Settings
) -> None:
    model = await make_model(http, "forgets", **LEARNER)
    for seed in range(4):  # the fourth step stores a snapshot
        assert (await train(http, job(model, group(seed))))[-1]["type"] == "training_ended"
    gone = await http.request("DELETE", f"{MODELS}/{model}/checkpoints", json={"steps": [0, 1, 2, 4, 9]})
    assert gone.json() == {"deleted_count": 4, "not_found_steps": [9]}
    assert await steps_of(http, model) == [3]
    async with asyncio.timeout(60):
        while True:  # the owner of the lane looks every few seconds
            if stored_weights(served, model) == [3, 4]:
                break
            await asyncio.sleep(0.1)
    refused = await http.post(JOBS, json=job(model, group(), config={"kl_penalty_coef": 0.1, "kl_penalty_reference_step": 1}))
    assert list(faults(refused)) == ["body.experimental_config.kl_penalty_reference_step"]
    assert (await train(http, job(model, group(5))))[-1]["type"] == "training_ended"
    assert await steps_of(http, model) == [5, 3]


async def test_a_supervised_job_trains_on_examples_from_the_store(http: httpx.AsyncClient, served: Settings) -> None:
    model = await make_model(http, "imitates", **LEARNER)
    uri = put(served, "examples.jsonl", lines(example("c d"), example("e"), example("c")))
    body = {"model_id": model, "training_data_url": uri, "config": {"batch_size": 2, "learning_rate": 1e-3}}
    events = await train(http, body, "/v1/preview/sft-training-jobs")
    assert [event["type"] for event in events] == ["training_started", "gradient_step", "training_ended"]
    assert events[1]["data"]["updates"] == 2
    assert await steps_of(http, model) == [1, 0]


async def test_the_readmes_example_trains_a_step(http: httpx.AsyncClient) -> None:
    script = (Path(__file__).parents[2] / "docs" / "snippets" / "training-job.sh").read_text()
    address = str(http.base_url).rstrip("/")
    assert "http://127.0.0.1:8100" in script
    script = script.replace("http://127.0.0.1:8100", address)
    async with asyncio.timeout(120):
        while True:  # the same key is the same job: it is asked again until a worker has trained it
            process = await asyncio.create_subprocess_exec("bash", "-euo", "pipefail", "-c", script, stdout=subprocess.PIPE)
            said = (await process.communicate())[0].decode()
            assert process.returncode == 0, said
            if "training_ended" in said:
                break
            await asyncio.sleep(0.2)
    assert "training_failed" not in said
    assert '"step":1' in said
