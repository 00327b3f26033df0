"""Supervised jobs come in: where their data may lie, what a line must be, and what is written."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.gateway.conftest import gateway_settings, running
from tests.gateway.job_bodies import faults, make_model
from tests.gateway.rlor_calls import ACCOUNT, rl_line
from tests.gateway.test_training_jobs_submit import in_the_log

from headrace.core.payloads import redeem
from headrace.core.settings import Settings
from headrace.core.store import open_store
from headrace.core.topic_admin import apply
from headrace.schemas.claim import GroupClaim
from headrace.schemas.codec import decode_group
from headrace.schemas.jobs import TrainingJob

SFT = "/v1/preview/sft-training-jobs"
URL = "body.training_data_url"


def example(answer: str = "c", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a b"}, {"role": "assistant", "content": answer}], **fields}


def put(settings: Settings, name: str, text: str) -> str:
    """Put a file into the store, as its owner would; its URI."""
    store = open_store(settings.store.url, settings.s3)
    store.put_bytes_if_absent(name, text.encode())
    return store.uri(name)


def lines(*examples: object) -> str:
    return "".join(json.dumps(item) + "\n" for item in examples)


async def test_examples_are_claims_of_purpose_sft_before_their_job(gateway: httpx.AsyncClient, settings: Settings) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    uri = put(settings, "mine/train.jsonl", lines(*(example(f"c{i}", tools=[tool]) for i in range(70))))
    config = {"batch_size": 2, "learning_rate": [1e-5, 2e-5], "metric_logging": True}
    body = {"model_id": await make_model(gateway), "training_data_url": uri, "config": config}
    answer = await gateway.post(SFT, json=body)
    *claims, record = await in_the_log(settings)
    assert isinstance(record, TrainingJob)
    assert record.sft is not None
    assert (record.job_id, record.kind, record.sft.batch_size, record.sft.learning_rate) == (answer.json()["id"], "sft", 2, (1e-5, 2e-5))
    store = open_store(settings.store.url, settings.s3)
    groups = [decode_group(redeem(store, claim), claim.content_type).group for claim in claims if isinstance(claim, GroupClaim)]
    assert [(len(found.trajectories), found.purpose, found.job_id) for found in groups] == [
        (64, "sft", record.job_id),
        (6, "sft", record.job_id),
    ]
    answers = [trajectory.messages_and_choices[1].content for found in groups for trajectory in found.trajectories]  # type: ignore[union-attr]
    assert answers == [f"c{i}" for i in range(70)]
    assert groups[0].trajectories[0].tools is not None
    events = (await gateway.get(f"/v1/preview/training-jobs/{record.job_id}/events")).json()["data"]
    assert events == []


async def test_an_uploaded_dataset_is_named_by_its_id(gateway: httpx.AsyncClient, settings: Settings) -> None:
    model = await make_model(gateway)
    for name, kind, content in (
        ("talks", "CHAT", lines(*(example(f"c{i}") for i in range(3))).encode()),
        ("games", "RL", rl_line("a", [0, 1])),
    ):
        made = await gateway.post(f"{ACCOUNT}/datasets", json={"datasetId": name, "dataset": {"format": kind, "userUploaded": {}}})
        assert made.status_code == 200, made.text
        uploaded = await gateway.post(f"{ACCOUNT}/datasets/{name}:upload", files={"file": ("data.jsonl", content)})
        assert uploaded.status_code == 200, uploaded.text
    for named in ("talks", "accounts/default/datasets/talks"):
        assert (await gateway.post(SFT, json={"model_id": model, "training_data_url": named})).status_code == 200, named
    assert "format RL" in faults(await gateway.post(SFT, json={"model_id": model, "training_data_url": "games"}))[URL]
    *_claims, record = await in_the_log(settings)
    assert isinstance(record, TrainingJob)
    assert (record.kind, len(record.group_ids)) == ("sft", 1)


async def test_lines_that_are_no_examples_are_all_told_by_their_number(gateway: httpx.AsyncClient, settings: Settings) -> None:
    text = (
        lines(example(), {"messages": []}, {"messages": [{"role": "user", "content": "x"}]})
        + "\n{\n"
        + lines({"messages": [{"role": "r"}]})
    )
    body = {"model_id": await make_model(gateway), "training_data_url": put(settings, "bad.jsonl", text)}
    found = faults(await gateway.post(SFT, json=body))
    assert set(found) == {f"{URL}.2.messages", f"{URL}.3", f"{URL}.5", f"{URL}.6.messages.0.role"}
    assert all(message.startswith(f"line {place.split('.')[2]}: ") for place, message in found.items())
    assert await in_the_log(settings) == []


async def test_data_that_is_nowhere_or_elsewhere_is_refused(gateway: httpx.AsyncClient, settings: Settings) -> None:
    model = await make_model(gateway)
    cases = {
        "file:///etc/passwd": "not in this object store",
        f"{settings.store.url}/../x": "no object key",
        f"{settings.store.url}/nowhere.jsonl": "does not exist",
        "https://example.com/x.jsonl": "not in this object store",
        "no-such-dataset": "does not exist",
        "wandb-artifact:///e/p/a:v0": "gateway.training_data",
        put(settings, "empty.jsonl", "\n\n"): "no line",
    }
    for url, message in cases.items():
        found = faults(await gateway.post(SFT, json={"model_id": model, "training_data_url": url}))
        assert list(found) == [URL], url
        assert message in found[URL], found[URL]


@pytest.mark.parametrize(
    ("config", "place"),
    [({"batch_size": 0}, "batch_size"), ({"learning_rate": [1e-5, -1]}, "learning_rate.1"), ({"epochs": "many"}, "epochs")],
)
async def test_a_config_without_sense_is_refused(gateway: httpx.AsyncClient, config: dict[str, Any], place: str) -> None:
    found = faults(await gateway.post(SFT, json={"model_id": await make_model(gateway), "training_data_url": "x", "config": config}))
    assert f"body.config.{place}" in found


async def test_a_mapped_artefact_is_read_where_it_lies_and_a_repeat_is_the_same_job(kafka: str, topic_prefix: str, tmp_path: Path) -> None:
    settings = gateway_settings(kafka, topic_prefix, tmp_path)
    uri = put(settings, "artefact.jsonl", lines(example()))
    settings = gateway_settings(kafka, topic_prefix, tmp_path, training_data={"wandb-artifact:///e/p/a:v0": uri})
    await apply(settings)
    async with running(settings) as http:
        body = {"model_id": await make_model(http), "training_data_url": "wandb-artifact:///e/p/a:v0", "config": {"learning_rate": 1e-5}}
        first = await http.post(SFT, json=body)
        again = await http.post(SFT, json=body, headers={"x-stainless-retry-count": "2"})
        other = await http.post(SFT, json={**body, "config": {"learning_rate": 2e-5}}, headers={"x-stainless-retry-count": "2"})
    assert first.json() == again.json() != other.json()


async def test_only_the_last_turn_of_each_example_trains_where_the_job_says_so(gateway: httpx.AsyncClient, settings: Settings) -> None:
    two_turns = {"messages": [*example("c")["messages"], *example("d")["messages"]]}
    body = {"model_id": await make_model(gateway), "config": {"assistant_turns": "last", "metric_logging": {"enabled": True}}}
    good = put(settings, "mine/last.jsonl", lines(two_turns))
    assert (await gateway.post(SFT, json=body | {"training_data_url": good})).status_code == 200
    claim, record = await in_the_log(settings)
    assert isinstance(claim, GroupClaim)
    assert isinstance(record, TrainingJob)
    assert record.sft is not None
    assert record.sft.assistant_turns == "last"
    stored = decode_group(redeem(open_store(settings.store.url, settings.s3), claim), claim.content_type)
    (trajectory,) = stored.group.trajectories
    assert [(item.model_extra or {}).get("weight") for item in trajectory.messages_and_choices] == [None, 0, None, None]
    ends_otherwise = put(settings, "mine/other.jsonl", lines(two_turns, {"messages": [*example()["messages"], two_turns["messages"][0]]}))
    refused = faults(await gateway.post(SFT, json=body | {"training_data_url": ends_otherwise}))
    assert refused == {f"{URL}.2.messages": "line 2: assistant_turns is 'last', but the last message is not the assistant's"}
    assert "body.config.assistant_turns" in faults(
        await gateway.post(SFT, json=body | {"training_data_url": good, "config": {"assistant_turns": "first"}})
    )
