"""Which engine a request goes to, and what of the answer comes back. The engines here are stand-ins that say what they were asked;
`test_conformance` and the engine's own tests have real ones."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson
import pytest
import uvicorn
from aiokafka import AIOKafkaProducer
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from tests.gateway.conftest import running
from tests.gateway.lane_double import LaneDouble

from headrace.core.kafka import client_options
from headrace.core.models import create_model
from headrace.core.settings import Settings
from headrace.schemas.base import Record
from headrace.schemas.envelope import seal
from headrace.schemas.training import ModelSettings
from headrace.schemas.weights import EngineAlive, WeightsApplied, WeightsFailed, WeightsPublished, alive_key

NAME = "wandb-artifact:///default/tests/agent"
DIGEST = "0" * 64


@dataclass
class StandInEngine:
    """Answers with the name that it was asked for, and remembers each request."""

    base_url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    holds: set[str] | None = None
    """Names that it serves; None: all."""

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        self.asked.append(body)
        if self.holds is not None and body["model"] not in self.holds:
            return JSONResponse({"error": {"message": f"no {body['model']} here"}}, 404)
        if not body.get("stream"):
            return JSONResponse({"model": body["model"], "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}}]})

        async def events() -> AsyncIterator[bytes]:
            for piece in ("he", "llo"):
                logprobs = {"content": [{"token": f"token_id:{len(piece)}", "logprob": -0.5}]}
                chunk = {"model": body["model"], "choices": [{"index": 0, "delta": {"content": piece}, "logprobs": logprobs}]}
                yield b"data: " + orjson.dumps(chunk) + b"\n\n"
            yield b"data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")


@asynccontextmanager
async def stand_in() -> AsyncIterator[StandInEngine]:
    engine = StandInEngine()
    app = Starlette(routes=[Route("/v1/chat/completions", engine.chat, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, lifespan="off", log_config=None))
    listener = server.config.bind_socket()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    engine.base_url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    try:
        yield engine
    finally:
        server.should_exit = True
        await serving


async def say(settings: Settings, topic: str, key: str, *records: Record) -> None:
    async with AIOKafkaProducer(**client_options(settings.kafka, "test")) as producer:
        for record in records:
            value, headers = seal(record, source="test")
            await producer.send_and_wait(topic, value, key=key.encode(), headers=headers)


def ack(engine: StandInEngine, engine_id: str, model_id: str, version: int) -> WeightsApplied:
    return WeightsApplied(
        engine_id=engine_id,
        model_id=model_id,
        incarnation="",
        policy_version=version,
        digest=DIGEST,
        base_url=engine.base_url,
        seconds=0.1,
    )


@pytest.fixture
async def model_id(settings: Settings) -> str:
    return (await create_model(settings, project="tests", name="agent", model=ModelSettings(base_model="tiny"))).model_id


def chat(**more: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": [{"role": "user", "content": "hello"}], **more}


async def test_without_an_engine_it_is_503_with_what_to_do(settings: Settings, model_id: str) -> None:
    quick = settings.model_copy(update={"gateway": settings.gateway.model_copy(update={"inference_wait_seconds": 0})})
    async with running(quick) as http:
        answer = await http.post("/v1/chat/completions", json=chat())
    assert answer.status_code == 503
    assert "headrace engine --base-model tiny" in answer.json()["error"]["message"]
    assert answer.headers["retry-after"]


async def test_names_that_mean_no_model_are_404_in_the_clients_shape(gateway: httpx.AsyncClient, model_id: str) -> None:
    for name in ("gpt-4", "wandb-artifact:///default/tests/nobody", f"{NAME}:step7", f"{NAME}:best", f"{model_id}@9", "a/b/c/d"):
        answer = await gateway.post("/v1/chat/completions", json=chat() | {"model": name})
        assert answer.status_code == 404, name
        assert answer.json()["error"]["message"]
    assert (await gateway.post("/v1/chat/completions", content=b"{")).status_code == 400
    assert (await gateway.post("/v1/chat/completions", json=[1])).status_code == 400
    assert (await gateway.post("/v1/chat/completions", json={"messages": []})).status_code == 400


async def test_the_served_version_is_in_the_answer_and_ids_come_with_log_probabilities(
    settings: Settings, gateway: httpx.AsyncClient, model_id: str
) -> None:
    async with stand_in() as engine:
        await say(settings, settings.topic_names.weight_acks, "e1", ack(engine, "e1", model_id, 0))
        for path in ("/v1/chat/completions", "/v1/chat/completions/"):
            answer = await gateway.post(path, json=chat(logprobs=True))
            assert answer.status_code == 200, answer.text
            assert (answer.json()["model"], answer.json()["policy_version"]) == (f"{NAME}:step0", 0)
        for short in (NAME.rpartition("/")[2], NAME.partition("///")[2].partition("/")[2]):
            answer = await gateway.post("/v1/chat/completions", json=chat(logprobs=True) | {"model": short})
            assert (short, answer.status_code) == (short, 200), answer.text
            assert answer.headers["x-headrace-policy-version"] == "0"
        assert {sent["model"] for sent in engine.asked} == {f"{model_id}@0"}
        assert all(sent["return_token_ids"] and sent["return_tokens_as_token_ids"] for sent in engine.asked)
        kept = await gateway.get("/v1/headrace/trajectories/t1/exchanges")
        assert kept.json()["data"] == []


def version(model_id: str, number: int, incarnation: str) -> WeightsPublished:
    return WeightsPublished(
        model_id=model_id,
        incarnation=incarnation,
        policy_version=number,
        base_model="tiny",
        format="full",
        uri="file:///w",
        digest=DIGEST,
        files=(),
    )


async def publish(gateway: httpx.AsyncClient, settings: Settings, model_id: str, number: int) -> str:
    """A version of a model that its owner has taken up; its incarnation."""
    state = await LaneDouble(gateway.gate).take_up(model_id)  # type: ignore[attr-defined]
    await say(settings, settings.topic_names.weights, model_id, version(model_id, number, state.incarnation))
    return state.incarnation


async def test_a_version_of_an_incarnation_that_no_owner_confirmed_counts_as_not_published(
    settings: Settings, gateway: httpx.AsyncClient, model_id: str
) -> None:
    async with stand_in() as engine:
        await say(settings, settings.topic_names.weight_acks, "e1", ack(engine, "e1", model_id, 0))
        await say(settings, settings.topic_names.weights, model_id, version(model_id, 1, ""))
        assert (await gateway.post("/v1/chat/completions", json=chat())).json()["policy_version"] == 0


async def test_a_name_without_a_version_waits_until_an_engine_serves_the_version_that_is_published(
    settings: Settings, gateway: httpx.AsyncClient, model_id: str
) -> None:
    async with stand_in() as old, stand_in() as new:
        await say(settings, settings.topic_names.weight_acks, "e1", ack(old, "e1", model_id, 0))
        assert (await gateway.post("/v1/chat/completions", json=chat())).json()["policy_version"] == 0
        await publish(gateway, settings, model_id, 1)
        waiting = asyncio.create_task(gateway.post("/v1/chat/completions", json=chat()))
        # Meanwhile the older version is there for a request that says that it will do, in each form of a name.
        for name in (f"{NAME}@latest-served", f"{NAME}:latest-served", f"{model_id}@latest-served"):
            served = await gateway.post("/v1/chat/completions", json=chat() | {"model": name})
            assert (served.status_code, served.json()["policy_version"]) == (200, 0), name
        await say(settings, settings.topic_names.weight_acks, "e2", ack(new, "e2", model_id, 1))
        answer = await waiting
        assert (answer.status_code, answer.json()["policy_version"], len(new.asked)) == (200, 1, 1)
        named = await gateway.post("/v1/chat/completions", json=chat() | {"model": f"{NAME}:step0"})
        assert named.json()["policy_version"] == 0
        assert old.asked[-1]["model"] == f"{model_id}@0"
        both = await gateway.post("/v1/chat/completions", json=chat() | {"model": f"{NAME}:step1@latest-served"})
        assert (both.status_code, "leave one of them out" in both.json()["error"]["message"]) == (404, True)


async def test_a_published_version_that_no_engine_loads_in_time_is_503_with_both_versions_and_the_engines_reason(
    settings: Settings, model_id: str
) -> None:
    quick = settings.model_copy(update={"gateway": settings.gateway.model_copy(update={"inference_wait_seconds": 0.1})})
    async with stand_in() as engine, running(quick) as http:
        incarnation = await publish(http, settings, model_id, 5)
        failed = WeightsFailed(
            engine_id=f"e1:{model_id}",
            model_id=model_id,
            incarnation=incarnation,
            policy_version=5,
            digest=DIGEST,
            error="no space left on device",
            serving=4,
            base_url=engine.base_url,
        )
        await say(settings, settings.topic_names.weight_acks, failed.engine_id, failed)
        answer = await http.post("/v1/chat/completions", json=chat())
        assert (answer.status_code, engine.asked) == (503, [])
        assert answer.headers["retry-after"]
        message = answer.json()["error"]["message"]
        for part in ("version 5", "engine e1 failed: no space left on device", "serves is 4", "@latest-served"):
            assert part in message
        older = await http.post("/v1/chat/completions", json=chat() | {"model": f"{NAME}@latest-served"})
        assert (older.status_code, older.json()["policy_version"]) == (200, 4)


async def test_an_engine_that_could_not_take_the_newest_version_answers_with_the_one_before(
    settings: Settings, gateway: httpx.AsyncClient, model_id: str
) -> None:
    async with stand_in() as engine:
        failed = WeightsFailed(
            engine_id="e1",
            model_id=model_id,
            incarnation="",
            policy_version=5,
            digest=DIGEST,
            error="no space",
            serving=4,
            base_url=engine.base_url,
        )
        await say(settings, settings.topic_names.weight_acks, "e1", failed)
        answer = await gateway.post("/v1/chat/completions", json=chat())
        assert (answer.status_code, answer.json()["policy_version"]) == (200, 4)
        assert engine.asked[-1]["model"] == f"{model_id}@4"


async def test_an_engine_that_is_gone_is_passed_over(settings: Settings, gateway: httpx.AsyncClient, model_id: str) -> None:
    async with stand_in() as gone:
        pass
    async with stand_in() as alive, stand_in() as empty:
        empty.holds = set()
        acks = (ack(gone, "a", model_id, 0), ack(empty, "b", model_id, 0), ack(alive, "c", model_id, 0))
        for one in acks:
            await say(settings, settings.topic_names.weight_acks, one.engine_id, one)
        answer = await gateway.post("/v1/chat/completions", json=chat())
        assert answer.status_code == 200
        assert (len(empty.asked), len(alive.asked)) == (1, 1)
        alive.holds = set()
        refused = await gateway.post("/v1/chat/completions", json=chat())
        assert refused.status_code == 503
        assert "a at" in refused.json()["error"]["message"]


async def lived(settings: Settings, engine_id: str, seconds_ago: float) -> None:
    """The last word of an engine."""
    value, headers = seal(EngineAlive(engine_id=engine_id, every_seconds=10), source="test")
    at = int((time.time() - seconds_ago) * 1000)
    async with AIOKafkaProducer(**client_options(settings.kafka, "test")) as producer:
        topic, key = settings.topic_names.weight_acks, alive_key(engine_id).encode()
        await producer.send_and_wait(topic, value, key=key, headers=headers, timestamp_ms=at)


async def test_an_engine_that_fell_silent_is_neither_asked_nor_counted_until_it_speaks_again(settings: Settings, model_id: str) -> None:
    acks = settings.topic_names.weight_acks
    async with stand_in() as killed, stand_in() as lives, stand_in() as of_old:
        for engine, name in ((killed, "killed"), (lives, "lives"), (of_old, "of-old")):
            said = ack(engine, f"{name}:{model_id}", model_id, 0).model_copy(update={"deployment": "dep"})
            await say(settings, acks, said.engine_id, said)
        await lived(settings, "killed", 3600)
        await lived(settings, "lives", 5)  # the third never said that it would
        async with running(settings) as http:
            deployments = "/v1/accounts/default/deployments"
            made = await http.post(deployments, params={"deploymentId": "dep"}, json={"baseModel": "tiny"})
            assert made.json()["replicaCount"] == 2
            for _ in range(4):
                assert (await http.post("/v1/chat/completions", json=chat())).status_code == 200
            assert (len(killed.asked), len(lives.asked) + len(of_old.asked)) == (0, 4)
            await lived(settings, "killed", 0)
            assert (await http.get(f"{deployments}/dep")).json()["replicaCount"] == 3
            # A record without a value: it has ended in order.
            async with AIOKafkaProducer(**client_options(settings.kafka, "test")) as producer:
                for key in (f"lives:{model_id}", f"of-old:{model_id}", alive_key("lives")):
                    await producer.send_and_wait(acks, None, key=key.encode())
        await lived(settings, "killed", 3600)
        async with running(settings) as http:
            assert (await http.get(f"{deployments}/dep")).json()["replicaCount"] == 0
            assert (await http.post("/v1/chat/completions", json=chat())).status_code == 200, "where there is no other it is tried"
            assert len(killed.asked) == 1


async def test_an_engine_whose_clock_is_ahead_falls_silent_all_the_same(settings: Settings, model_id: str) -> None:
    quick = settings.gateway.model_copy(update={"engine_silence_seconds": 1})
    async with stand_in() as ahead, stand_in() as other:
        for engine, name in ((ahead, "ahead"), (other, "other")):
            said = ack(engine, f"{name}:{model_id}", model_id, 0)
            await say(settings, settings.topic_names.weight_acks, said.engine_id, said)
        await lived(settings, "ahead", -3600)  # before the gateway starts, which has nothing else to go by
        async with running(settings.model_copy(update={"gateway": quick})) as http:
            await asyncio.sleep(1.5)
            for _ in range(3):
                assert (await http.post("/v1/chat/completions", json=chat())).status_code == 200
    assert (len(ahead.asked), len(other.asked)) == (0, 3)


async def test_a_stream_comes_through_marked_and_is_kept_only_when_asked(
    settings: Settings, gateway: httpx.AsyncClient, model_id: str
) -> None:
    async with stand_in() as engine:
        await say(settings, settings.topic_names.weight_acks, "e1", ack(engine, "e1", model_id, 0))
        for asked in ({}, {"x-headrace-trajectory": "t1", "Authorization": "Bearer hr_secret"}):
            async with gateway.stream("POST", "/v1/chat/completions", json=chat(stream=True, logprobs=True), headers=asked) as answer:
                lines = [line async for line in answer.aiter_lines() if line]
            assert lines[-1] == "data: [DONE]"
            chunks = [orjson.loads(line.removeprefix("data: ")) for line in lines[:-1]]
            assert [chunk["policy_version"] for chunk in chunks] == [0, 0]
        (kept,) = (await gateway.get("/v1/headrace/trajectories/t1/exchanges")).json()["data"]
        (choice,) = kept["response"]["choices"]
        assert choice["message"] == {"role": "assistant", "content": "hello"}
        assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["token_id:2", "token_id:3"]
        assert kept["request"]["messages"] == chat()["messages"]
        assert "hr_secret" not in orjson.dumps(kept).decode()
        assert (await gateway.get("/v1/headrace/trajectories/..%2F..%2Fx/exchanges")).status_code in {400, 404}
