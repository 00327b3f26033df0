"""A job comes in: what is written, when it is the same job, and that all of it is there for every gateway, now and after a start."""

import asyncio
import uuid
from pathlib import Path

import httpx
import pytest
from tests.gateway.conftest import gateway_settings, running
from tests.gateway.job_bodies import group, job, make_model

from headrace.core.kafka import client_options
from headrace.core.local import LocalBroker
from headrace.core.payloads import redeem
from headrace.core.reading import read_to_end
from headrace.core.settings import Settings
from headrace.core.store import open_store
from headrace.core.topic_admin import apply
from headrace.schemas.carried import CARRIED
from headrace.schemas.claim import GroupClaim
from headrace.schemas.codec import decode_group
from headrace.schemas.envelope import header_text, open_record
from headrace.schemas.jobs import JobDocument, JobState, TrainingJob
from headrace.schemas.topics import TRAJECTORY_GROUPS

JOBS = "/v1/preview/training-jobs"


async def in_the_log(settings: Settings, model_id: str | None = None) -> list[object]:
    """What stands in `trajectory-groups`, of all models or of one: groups decoded, jobs, claims."""
    found: list[object] = []
    for record in await read_to_end(client_options(settings.kafka, "test"), settings.topic_names.trajectory_groups):
        if model_id is not None and record.key != model_id.encode():
            continue
        headers = header_text(record.headers)
        if headers["content-type"] != "application/json":
            found.append(decode_group(record.value, headers["content-type"]))
        else:
            found.append(open_record(record.value, headers, CARRIED[TRAJECTORY_GROUPS]))
    return found


async def test_groups_stand_before_their_job_and_name_it_and_the_document_waits(gateway: httpx.AsyncClient, settings: Settings) -> None:
    model = await make_model(gateway)
    body = job(model, group(group_id="mine", job_id="another's"), group(1), config={"ppo": True, "allow_training_without_logprobs": True})
    job_id = (await gateway.post(JOBS, json=body)).json()["id"]
    *groups, record = await in_the_log(settings)
    assert isinstance(record, TrainingJob)
    assert record.config is not None
    assert (record.job_id, record.config.ppo, len(record.group_ids)) == (job_id, True, 2)
    assert [(g.group.group_id, g.group.job_id) for g in groups] == [(name, job_id) for name in record.group_ids]  # type: ignore[attr-defined]
    assert all(g.group.allow_training_without_logprobs for g in groups)  # type: ignore[attr-defined]
    (document,) = await read_to_end(client_options(settings.kafka, "test"), settings.topic_names.jobs)
    written = JobDocument.model_validate_json(document.value)
    assert (written.state, written.num_groups, written.model_id) == (JobState.PENDING, 2, model)
    shown = (await gateway.get(f"{JOBS}/{job_id}")).json()
    assert (shown["status"], shown["training_start"], shown["num_groups"]) == ("pending", None, 2)
    events = (await gateway.get(f"{JOBS}/{job_id}/events")).json()
    assert events == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


async def test_the_same_idempotency_key_is_the_same_job_and_writes_nothing(gateway: httpx.AsyncClient, settings: Settings) -> None:
    model = await make_model(gateway)
    headers = {"Idempotency-Key": "k1"}
    answers = await asyncio.gather(*(gateway.post(JOBS, json=job(model, group()), headers=headers) for _ in range(3)))
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert len(await in_the_log(settings)) == 2
    other = await gateway.post(JOBS, json=job(model, group(1)), headers=headers)
    assert (other.status_code, other.headers["x-should-retry"]) == (409, "false")
    assert "Idempotency-Key" in other.json()["detail"]


async def test_a_clients_own_retry_is_the_job_that_it_retries_and_a_second_request_is_a_second_job(
    gateway: httpx.AsyncClient, settings: Settings
) -> None:
    """The answer to the first was lost: its client sends the same bytes again, and says that it does."""
    model = await make_model(gateway)
    first = (await gateway.post(JOBS, json=job(model, group()))).json()["id"]
    again = await gateway.post(JOBS, json=job(model, group()), headers={"x-stainless-retry-count": "1"})
    assert again.json()["id"] == first
    assert len(await in_the_log(settings)) == 2
    assert (await gateway.post(JOBS, json=job(model, group()), headers={"x-stainless-retry-count": "0"})).json()["id"] != first


async def test_two_gateways_agree_and_one_that_starts_anew_has_all(kafka: str, topic_prefix: str, tmp_path: Path) -> None:
    settings = gateway_settings(kafka, topic_prefix, tmp_path)
    await apply(settings)
    other = settings.model_copy(update={"gateway": settings.gateway.model_copy(update={"instance": "other"})})
    async with running(settings) as one, running(other) as two:
        model = await make_model(one, "agent")
        assert await make_model(two, "agent") == model
        job_id = (await two.post(JOBS, json=job(model, group(), config={"later": 1}), headers={"Idempotency-Key": "k"})).json()["id"]
        assert (await one.post(JOBS, json=job(model, group(), config={"later": 1}), headers={"Idempotency-Key": "k"})).json()[
            "id"
        ] == job_id
        told = [(await http.get(f"{JOBS}/{job_id}{path}")).json() for http in (one, two) for path in ("", "/events")]
        assert told[:2] == told[2:]
    async with running(settings) as anew:
        assert [(await anew.get(f"{JOBS}/{job_id}{path}")).json() for path in ("", "/events")] == told[:2]
        assert (await anew.get(f"/v1/preview/models/{model}/checkpoints")).json()["data"][0]["step"] == 0


async def test_a_large_group_is_a_claim_on_the_store(kafka: str, topic_prefix: str, tmp_path: Path) -> None:
    settings = gateway_settings(kafka, topic_prefix, tmp_path)
    settings = settings.model_copy(update={"producer": settings.producer.model_copy(update={"inline_limit_bytes": 4096})})
    await apply(settings)
    async with running(settings) as http:
        answer = await http.post(JOBS, json=job(await make_model(http), group(), group(1, logs=["x" * 5000])))
        assert answer.status_code == 200
    small, large, record = await in_the_log(settings)
    assert isinstance(large, GroupClaim)
    assert isinstance(record, TrainingJob)
    inside = decode_group(redeem(open_store(settings.store.url, settings.s3), large), large.content_type).group
    assert (inside.group_id, inside.job_id, inside.logs) == (record.group_ids[1], record.job_id, ["x" * 5000])
    assert small.group.group_id == record.group_ids[0]  # type: ignore[attr-defined]


@pytest.mark.timeout(120)
async def test_without_kafka_it_is_503_and_nothing_half_written(tmp_path: Path) -> None:
    with LocalBroker(tmp_path / "broker") as broker:
        settings = gateway_settings(broker.bootstrap_servers, f"t{uuid.uuid4().hex[:8]}.", tmp_path, kafka_timeout_seconds=1)
        await apply(settings)
        async with running(settings) as http:
            model = await make_model(http)
            broker.stop()
            answers = [await http.post(JOBS, json=job(model, group())), await http.get(f"/v1/preview/models/{model}/checkpoints")]
            assert [answer.status_code for answer in answers] == [503, 503]
            assert all(int(answer.headers["retry-after"]) > 0 for answer in answers)
            broker.start()
            assert await in_the_log(settings) == []


async def test_captured_calls_of_the_model_go_to_the_log_as_arrays_and_others_do_not_train(
    gateway: httpx.AsyncClient, settings: Settings
) -> None:
    model = await make_model(gateway)

    def call(second: int, name: str, prompt: list[int], ids: list[int]) -> dict[str, object]:
        message = {"role": "assistant", "content": "a"}
        choice = {"index": 0, "finish_reason": "stop", "message": message, "prompt_token_ids": prompt, "token_ids": ids}
        choice |= {"compact_logprobs": [-0.5] * len(ids)}
        request = {"model": name, "messages": [{"role": "user", "content": "q"}]}
        return {"start_time": f"2026-01-01T00:00:0{second}Z", "request": request, "response": {"choices": [choice]}}

    calls = [call(2, f"{model}@0", [2, 9, 10, 3], [11, 1]), call(0, model, [2, 9], [10]), call(1, "org/judge", [2, 4], [5])]
    captured = {"trajectories": [{"exchanges": {"chat_completions": calls}, "reward": 1.0}, {"exchanges": {"chat_completions": calls[:1]}}]}
    assert (await gateway.post(JOBS, json=job(model, captured))).status_code == 200
    written, _record = await in_the_log(settings)
    first, second = written.group.trajectories  # type: ignore[attr-defined]
    assert (first.exchanges, first.additional_histories, first.reward, second.reward) == (None, [], 1.0, 0.0)
    assert [turn.token_ids.tolist() for turn in written.turns] == [[10], [11, 1], [11, 1]]  # type: ignore[attr-defined]
    assert (second.initial_policy_version, second.final_policy_version) == (0, 0)
    never = call(0, f"{model}@7", [2], [3])
    refused = await gateway.post(JOBS, json=job(model, {"trajectories": [{"exchanges": {"chat_completions": [never]}, "reward": 1}]}))
    assert "version 7 was never published" in refused.text
