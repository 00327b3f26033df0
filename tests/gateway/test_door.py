"""The door: what is asked for before a body is read, how much is read, and what a body costs everybody else."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from tests.gateway.conftest import gateway_settings, running
from tests.gateway.job_bodies import faults, make_model

from headrace.core.model_views import ModelView
from headrace.core.settings import Settings
from headrace.core.topic_admin import apply
from headrace.gateway.access import Caller
from headrace.gateway.app import create_app
from headrace.gateway.body_limit import PLAIN_BYTES, Budget
from headrace.gateway.exchanges import exchange_of, keep
from headrace.gateway.passed_on import read_passed_on
from headrace.gateway.problems import ProblemError, UnprocessableError
from headrace.gateway.serving import UnknownNameError, parse_name
from headrace.gateway.tokens import create_token
from headrace.gateway.training_jobs.body import split
from headrace.schemas.base import utc_now
from headrace.schemas.training import ModelSettings

JOBS = "/v1/preview/training-jobs"
OPEN = {"/", "/trajectory", "/openapi.json", "/v1/health", "/v1/system-check"}
SIGNED = "/v1/accounts/{account}/datasets/{dataset}/uploads/{name}"


def routes_in(routes: Any) -> Iterator[tuple[str, str]]:
    """(method, path) of every route."""
    for route in routes:
        if hasattr(route, "original_router"):
            yield from routes_in(route.original_router.routes)
        elif getattr(route, "methods", None):
            yield from ((method, route.path) for method in sorted(route.methods))


async def answer_without_body(http: httpx.AsyncClient, method: str, path: str, *headers: str) -> bytes:
    """The head of the answer to a request whose body is said to come, and never does."""
    reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
    said = ["Host: localhost", "Content-Type: application/json", "Content-Length: 1000", *headers]
    writer.write(f"{method} {path} HTTP/1.1\r\n".encode() + "".join(f"{line}\r\n" for line in said).encode() + b"\r\n")
    try:
        return await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
    finally:
        writer.close()


@pytest.fixture
async def tokens(kafka: str, topic_prefix: str, tmp_path: Path) -> Settings:
    found = gateway_settings(kafka, topic_prefix, tmp_path, tokens_file=tmp_path / "tokens")
    create_token(tmp_path / "tokens", account="acme", owner="ada")
    await apply(found)
    return found


def key_for(settings: Settings, **said: Any) -> dict[str, str]:
    file = settings.gateway.tokens_file
    assert file is not None
    _, token = create_token(file, **{"account": "acme", "owner": "ada", **said})
    return {"X-Api-Key": token}


async def test_every_route_asks_for_the_key_before_it_reads_the_body(tokens: Settings) -> None:
    routes = list(routes_in(create_app(tokens).routes))
    assert len(routes) > 60
    async with running(tokens) as http:
        for method, path in routes:
            if path in OPEN or path.startswith("/dashboard/static"):
                continue
            head = await answer_without_body(http, method, re.sub(r"\{[^}]*\}", "x", path))
            wanted = b"404" if path == SIGNED else b"401"  # the address is the key, and there is no such dataset
            if path == SIGNED:
                head = await answer_without_body(http, method, f"{re.sub(r'{[^}]*}', 'x', path)}?size=1&expires=1&signature=x")
            assert head.split(b" ")[1] == wanted, (method, path, head)
            assert b"x-content-type-options: nosniff" in head.lower(), (method, path)


async def test_only_the_two_upload_routes_take_large_files(tokens: Settings) -> None:
    key = key_for(tokens)
    large = b" " * (PLAIN_BYTES + 1)
    async with running(tokens, headers=key) as http:
        for path in ("/v1/accounts/uploads/datasets", "/v1/accounts/acme/datasets", "/v1/preview/models", "/v1/accounts/acme/deployments"):
            assert (await http.post(path, content=large, headers={"content-type": "application/json"})).status_code == 413, path
        made = await http.post("/v1/accounts/acme/datasets", json={"datasetId": "d", "dataset": {"format": "CHAT"}})
        assert made.status_code == 200, made.text
        said = {"messages": [{"role": "user", "content": "x" * PLAIN_BYTES}, {"role": "assistant", "content": "y"}]}
        files = {"file": ("d.jsonl", orjson.dumps(said))}
        assert (await http.post("/v1/accounts/acme/datasets/d:upload", files=files)).status_code == 200


async def test_what_bodies_hold_together_has_a_budget(kafka: str, topic_prefix: str, tmp_path: Path) -> None:
    settings = gateway_settings(kafka, topic_prefix, tmp_path, held_body_bytes=200_000)
    await apply(settings)
    async with running(settings) as http:
        too_large = await http.post(JOBS, content=b" " * 150_000)  # by itself: to try again is of no use
        assert (too_large.status_code, "retry-after" in too_large.headers) == (413, False)
        _, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
        writer.write(f"POST {JOBS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 90000\r\n\r\n".encode())
        async with asyncio.timeout(120):
            while (refused := await http.post(JOBS, content=b" " * 80_000)).status_code != 429:  # noqa: ASYNC110 - until the first is there
                await asyncio.sleep(0.01)
        assert int(refused.headers["retry-after"]) > 0
        assert "held_body_bytes" in refused.text
        writer.close()
        async with asyncio.timeout(120):
            while (await http.post(JOBS, content=b" " * 80_000)).status_code != 422:  # noqa: ASYNC110 - until it is seen that it has gone
                await asyncio.sleep(0.01)


def test_one_account_has_half_of_the_budget_at_most() -> None:
    budget = Budget(100)
    budget.take("a", 50)
    with pytest.raises(ProblemError):
        budget.take("a", 1)
    budget.take("b", 50)
    with pytest.raises(ProblemError):
        budget.take("c", 1)
    budget.give_back("a", 50)
    budget.take("c", 50)


def seconds_for(body: bytes) -> float:
    """Processor time to split a body: the least of three."""
    found = []
    for _ in range(3):
        began = time.process_time()
        with pytest.raises(UnprocessableError):
            split(body, 5000)
        found.append(time.process_time() - began)
    return min(found)


@pytest.mark.parametrize("unit", [b'"', b'\\"', b'"\\', b"[NaN,", b'{"a":', b'"a",', b"-", b"{},", b"[],", b"0,"])
def test_time_to_split_a_body_grows_with_its_length(unit: bytes) -> None:
    begin = b'{"model_id":"m","trajectory_groups":[NaN,"'
    small, large = (seconds_for(begin + unit * count) for count in (25_000, 200_000))
    assert large < 24 * small + 0.05  # of 8 times the length; 64 times where it is quadratic


def test_a_list_of_a_million_groups_is_counted_and_not_kept() -> None:
    body = b'{"model_id":"m","trajectory_groups":[' + b",".join([b"{}"] * 1_000_000) + b"]}"
    with pytest.raises(UnprocessableError, match="max_groups"):
        split(body, 5000)


async def test_health_is_answered_while_a_large_body_is_read_and_one_that_takes_too_much_memory_is_refused_alone(
    kafka: str, topic_prefix: str, tmp_path: Path
) -> None:
    settings = gateway_settings(kafka, topic_prefix, tmp_path, reader_memory_bytes=256 * 1024 * 1024)
    await apply(settings)
    async with running(settings) as http:
        model = await make_model(http)
        begin = f'{{"model_id":"{model}","trajectory_groups":[{{"trajectories":[],"metadata":{{"a":['.encode()
        content = begin + b",".join([b"[]"] * 3_000_000) + b"]}}]}"
        job = asyncio.create_task(http.post(JOBS, content=content, timeout=120))
        answered = 0
        while not job.done():
            assert (await http.get("/v1/health")).status_code == 200
            answered += not job.done()
        refused = await job
        assert (refused.status_code, "reader_memory_bytes" in refused.text) == (413, True), refused.text[:500]
        assert answered > 3
        again = await http.post(JOBS, content=b'{"model_id":"m","trajectory_groups":[5],"x":"' + b" " * 100_000 + b'"}')
        assert "body.trajectory_groups.0" in faults(again)


NESTED = b"[" * 5000 + b"]" * 5000


@pytest.fixture
async def http(tokens: Settings) -> AsyncIterator[httpx.AsyncClient]:
    async with running(tokens, headers=key_for(tokens)) as client:
        yield client


async def test_nested_bodies_lone_surrogates_and_odd_numbers_are_4xx(http: httpx.AsyncClient) -> None:
    routes = [(method, re.sub(r"\{[^}]*\}", "acme", path)) for method, path in routes_in(create_app(http.gate.settings).routes)]  # type: ignore[attr-defined]
    deep = b'{"config":' + b'{"a":' * 150 + b"1" + b"}" * 150 + b',"model_id":"x","training_data_url":"x"}'
    for content in (NESTED, deep, b'{"model":"\\ud800","messages":[],"x":"\\ud800"}', b'{"\\udc00":1}', b"\xff", b'{"model":NaN}'):
        for method, path in routes:
            if method in {"POST", "PUT", "PATCH", "DELETE"}:
                answer = await http.request(method, path, content=content, headers={"content-type": "application/json"})
                assert answer.status_code < 500, (method, path, content[:50], answer.text)
    odd = {"x-stainless-retry-count": b"\xb2", "Idempotency-Key": b"\xff", "x-headrace-trajectory": b"\xff"}
    for path in (JOBS, "/v1/chat/completions", "/v1/preview/sft-training-jobs"):
        body = {"model_id": "x", "model": "x", "training_data_url": "x", "trajectory_groups": []}
        answer = await http.post(path, content=orjson.dumps(body), headers={"content-type": "application/json", **odd})
        assert answer.status_code < 500, answer.text
    for path in ("/v1/accounts/%ff%00/datasets", "/v1/headrace/trajectories/%00/exchanges", f"/v1/preview/models/{'9' * 5000}"):
        assert 400 <= (await http.get(path)).status_code < 500, path


@pytest.mark.parametrize("name", ["8e3e1861-0000-4000-8000-000000000000@²", "a/b/c:step" + "9" * 5000, "a/b/c:step²", "\x00"])
def test_versions_that_are_no_numbers_are_refused(name: str) -> None:
    with pytest.raises(UnknownNameError):
        parse_name(name, "acme")


async def test_lists_refuse_orders_filters_and_masks_without_an_end(http: httpx.AsyncClient) -> None:
    for asked in (
        {"orderBy": ",".join(["name"] * 5000)},
        {"readMask": ",".join(["name"] * 5000)},
        {"filter": " AND ".join(["name=a"] * 300)},
    ):
        refused = await http.get("/v1/accounts/acme/datasets", params=asked)
        assert (refused.status_code, next(iter(asked)) in refused.text) == (400, True), refused.text[:300]


async def test_a_head_that_does_not_come_is_not_waited_for(settings: Settings) -> None:
    async with running(settings, head_seconds=0.2) as http:
        for beginning in (b"", b"GET /v1/health HTTP/1.1\r\nHost: localhost\r\n"):
            reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
            writer.write(beginning)
            assert await asyncio.wait_for(reader.read(), 20) == b""  # to its end: it is closed
            writer.close()


async def test_pages_and_health_need_no_key_though_a_request_for_them_has_a_body(settings: Settings, tmp_path: Path) -> None:
    create_token(tmp_path / "door-tokens", account="acme", owner="ada")
    keyed = settings.model_copy(update={"gateway": settings.gateway.model_copy(update={"tokens_file": tmp_path / "door-tokens"})})
    async with running(keyed) as http:
        for path in ("/", "/v1/health", "/dashboard/static/access.js"):
            for body in (b"", b"{}" * 1000):
                answer = await http.request("GET", path, content=body)
                assert answer.status_code == 200, (path, body[:2])
        assert (await http.get("/v1/accounts")).status_code == 401


async def test_every_answer_says_nosniff(gateway: httpx.AsyncClient) -> None:
    for path in ("/", "/v1/health", "/nothing", "/openapi.json", "/dashboard/static/access.js", "/dashboard/static/nothing"):
        assert (await gateway.get(path)).headers["x-content-type-options"] == "nosniff", path
    reader, writer = await asyncio.open_connection(gateway.base_url.host, gateway.base_url.port)
    writer.write(b"what is this\r\n\r\n")
    said = await asyncio.wait_for(reader.read(), 20)
    assert said.startswith(b"HTTP/1.1 400")
    assert b"X-Content-Type-Options: nosniff" in said
    writer.close()


async def test_a_host_or_origin_that_is_none_is_foreign(gateway: httpx.AsyncClient) -> None:
    for headers in ({"Host": "["}, {"Host": "[::1"}, {"Origin": "http://["}, {"Origin": "\x7f"}, {"Host": ""}):
        assert (await gateway.get("/v1/headrace/trajectories/t/exchanges", headers=headers)).status_code in {400, 403}, headers


def test_what_goes_on_to_an_engine_is_the_clients_text_with_another_model() -> None:
    body = b' {"messages":[{"role":"user","content":"\xc3\xa4 {"}],\n"model" : "m\\u00e4" , "logprobs":true,"return_token_ids":false}'
    read = read_passed_on(body, chat=True)
    assert read.model == "mä"
    assert read.named("other@3") == (
        b' {"return_tokens_as_token_ids":true,"messages":[{"role":"user","content":"\xc3\xa4 {"}],\n"model" : "other@3" , "logprobs":true,'
        b'"return_token_ids":false}'
    )
    assert read_passed_on(body, chat=False).parsed() == orjson.loads(body)
    assert read_passed_on(b'{"model":"a","logprobs":null}', chat=True).named("b") == b'{"model":"b","logprobs":null}'
    for wrong in (b"", b"[]", b"{}", b'{"model":5}', b'{"model":""}', b'{"model":"\\ud800"}', b'{"model":"a"', NESTED, b'{"model":"\xff"}'):
        with pytest.raises(ProblemError):
            read_passed_on(wrong, chat=True)
    with pytest.raises(ProblemError, match="values"):
        read_passed_on(b'{"model":"a","x":[' + b"[]," * 600_000 + b"1]}", chat=True).parsed()


async def test_kept_exchanges_are_seen_with_keys_of_their_project(tokens: Settings) -> None:
    model = ModelView(
        model_id="m",
        account="acme",
        project="red",
        name="n",
        status="active",
        status_detail=None,
        settings=ModelSettings(base_model="tiny"),
        worker_group="",
        created_at=utc_now(),
        state=None,
    )
    async with running(tokens) as http:
        await keep(http.gate.store, Caller("acme", "ada"), exchange_of("t", model, 1, {}, {}))  # type: ignore[attr-defined]
        seen = []
        for said in ({}, {"projects": ["red"]}, {"projects": ["blue"]}, {"account": "umbrella"}):
            answer = await http.get("/v1/headrace/trajectories/t/exchanges", headers=key_for(tokens, **said))
            seen.append(len(answer.json()["data"]))
    assert seen == [1, 1, 0, 0]
