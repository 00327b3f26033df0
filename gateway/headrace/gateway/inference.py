"""Inference on the same base URL: a request goes to an engine that serves the version which its model name means.

Guarantees: a name without a version is the newest version that was published before the request came, or a later one: the request waits
until an engine serves it (`gateway.inference_wait_seconds`), and is answered 503 if none does. So a client that reads that a job is
completed never samples from the version before. `@latest-served` is the newest version that an engine serves now, without that wait;
`:stepN` is that version or an error, never another. The version that answered is in the answer (`model`, `policy_version`) and in the
header `x-headrace-policy-version`. Where log-probabilities are asked for, token ids come with them. If an engine does not answer, the next
one is tried; without one the answer is 503 with a reason. Nothing is recorded unless `x-headrace-trajectory` asks. Limitations: a stream
that has begun is not retried.
"""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

from headrace.core.errors import HeadraceError
from headrace.core.kafka import KafkaUnavailableError
from headrace.core.model_names import AmbiguousModelError, pick_model
from headrace.core.model_views import ModelView
from headrace.core.models import UnknownModelError, model_id_of
from headrace.core.outages import said
from headrace.gateway.access import Caller, KnownCaller
from headrace.gateway.body_limit import Body, takes
from headrace.gateway.exchanges import HEADER, assembled, check_name, exchange_of, keep
from headrace.gateway.gate import Gate, OpenGate
from headrace.gateway.passed_on import PassedOn, read_passed_on
from headrace.gateway.problems import ProblemError
from headrace.gateway.rlor.models import named_version
from headrace.gateway.serving import (
    MODEL_ID,
    Served,
    UnknownNameError,
    Wanted,
    engines_of,
    load_failures,
    newest_version,
    parse_name,
    without_latest_served,
)
from headrace.gateway.tables import is_model
from headrace.gateway.training_jobs.events import is_deleted

router = APIRouter(tags=["inference"])

VERSION_HEADER = "x-headrace-policy-version"
_FRESH_SECONDS = 1.0
"""Engines answer while Kafka is away: the gateway then uses what it knows."""
_ENGINE_WAIT_SECONDS = 5.0
"""The longest wait for an engine of a model that no engine serves: an engine needs about a second to take up a new model."""
_busy: Counter[str] = Counter()
"""Requests under way, by engine id: of this process, so of its one event loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A request that is good enough to be passed on."""

    path: str
    body: PassedOn
    name: str
    wanted: Wanted
    model: ModelView
    kept: tuple[str, dict[str, Any]] | None
    """The trajectory that the exchange is kept for, and the request; None: it is not kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reply:
    """An engine's answer that has begun. Leave its context when it was read: the engine has one request less then."""

    upstream: httpx.Response
    engine_id: str
    version: int

    async def __aenter__(self) -> httpx.Response:
        return self.upstream

    async def __aexit__(self, *_: object) -> None:
        _busy[self.engine_id] -= 1
        await self.upstream.aclose()


@router.post("/v1/chat/completions")
@router.post("/v1/chat/completions/", include_in_schema=False)
@router.post("/inference/v1/chat/completions", include_in_schema=False)
@takes(Body.INFERENCE)
async def chat_completions(request: Request, gate: OpenGate, caller: KnownCaller) -> Response:
    """OpenAI chat completions, answered by a rollout engine of the model."""
    return await _pass_on(request, gate, caller, "chat/completions")


@router.post("/v1/completions")
@router.post("/inference/v1/completions", include_in_schema=False)
@takes(Body.INFERENCE)
async def completions(request: Request, gate: OpenGate, caller: KnownCaller) -> Response:
    """OpenAI completions, answered by a rollout engine of the model."""
    return await _pass_on(request, gate, caller, "completions")


async def _pass_on(request: Request, gate: Gate, caller: Caller, path: str) -> Response:
    with suppress(KafkaUnavailableError):  # an engine may answer all the same
        await gate.view.fresh(_FRESH_SECONDS)
    asked = await _read(gate, caller, request, path)
    tried: list[str] = []
    for served in await _candidates(gate, asked):
        try:
            reply = await _send(gate, served, asked)
        except httpx.HTTPError as error:
            tried.append(f"{served.engine_id} at {served.base_url}: {type(error).__name__}")
            continue
        if reply.upstream.status_code == 404 or reply.upstream.status_code >= 500:
            # It has let that version go, or ends, or failed: another may do better.
            async with reply:
                await reply.upstream.aread()
            tried.append(f"{served.engine_id} at {served.base_url}: {reply.upstream.status_code} {_said(reply.upstream)}")
            continue
        return await _answer(gate, caller, asked, reply)
    raise ProblemError(503, _nobody(gate, asked, tried))


async def _read(gate: Gate, caller: Caller, request: Request, path: str) -> _Asked:
    # Without the ids nothing can be trained on.
    body = await asyncio.to_thread(read_passed_on, await request.body(), chat=path == "chat/completions")
    wanted, model = find_model(gate, caller, body.model)
    kept = None
    if (trajectory := request.headers.get(HEADER)) is not None:
        kept = (check_name(trajectory), await asyncio.to_thread(body.parsed))
    return _Asked(path=path, body=body, name=body.model, wanted=wanted, model=model, kept=kept)


def find_model(gate: Gate, caller: Caller, name: str) -> tuple[Wanted, ModelView]:
    """The model that a name means.

    Raises:
        ProblemError: 404, for unknown names and for what the caller does not see.
    """
    if name.startswith("accounts/"):
        bare, latest_served = without_latest_served(name)
        found = named_version(gate.view.tables, caller, bare, frozenset(gate.settings.base_models))
        version = None if latest_served else found.version
        wanted = Wanted(
            account=caller.account, project=None, name=None, model_id=found.view.model_id, version=version, latest_served=latest_served
        )
        return wanted, found.view
    try:
        wanted = parse_name(_whole_name(gate, caller, name), caller.account)
    except (UnknownNameError, AmbiguousModelError) as error:
        raise ProblemError(404, str(error)) from None
    model_id = wanted.model_id or model_id_of(wanted.account, str(wanted.project), str(wanted.name))
    model = gate.view.tables.model(model_id)
    if model is None or not is_model(model) or not caller.sees(model.account, model.project):
        raise ProblemError(404, f"there is no model {name[:200]!r}: create it first (POST /v1/preview/models)")
    newest = newest_version(gate.view.tables, model)
    if wanted.version is not None and wanted.version > newest:
        raise ProblemError(404, f"model {name[:200]!r}: its newest version is {newest}")
    if wanted.version is not None and is_deleted(gate.view.tables, model, wanted.version):
        raise ProblemError(404, f"model {name[:200]!r}: this checkpoint was deleted; the name without :stepN is the newest version")
    return wanted, model


def _whole_name(gate: Gate, caller: Caller, name: str) -> str:
    """`project/name` and `name`, perhaps with a version behind, with what is missing in front; all else as it is."""
    short = re.match(r"[^/:@]+(/[^/:@]+)?(?=[:@]|$)", name)
    if short is None or name.startswith("wandb-artifact:") or MODEL_ID.match(name):
        return name
    if short[1] is not None:
        return f"{caller.account}/{name}"
    seen = (model for model in gate.view.tables.models() if is_model(model) and caller.sees(model.account, model.project))
    try:
        model = pick_model(seen, short[0], account=caller.account)
    except AmbiguousModelError:
        raise
    except UnknownModelError:
        return name
    return f"{model.account}/{model.project}/{name}"


async def _candidates(gate: Gate, asked: _Asked) -> list[Served]:
    """Engines to try, best first. Waits for an engine that serves the wanted version; empty: none did in time."""
    tables, version = gate.view.tables, asked.wanted.version
    goal = 0 if asked.wanted.latest_served else newest_version(tables, asked.model) if version is None else version
    wait = gate.settings.gateway.inference_wait_seconds

    def found() -> list[Served]:
        return engines_of(tables, asked.model, _busy, at_least=goal)

    if not await gate.view.until(lambda: bool(found() or engines_of(tables, asked.model, _busy)), min(wait, _ENGINE_WAIT_SECONDS)):
        return []
    await gate.view.until(lambda: bool(found()), wait)
    # Of engines with a later version, the nearest are likeliest to hold this one still.
    return found() if version is None else sorted(found(), key=lambda served: served.version)


def _name_at(asked: _Asked, served: Served) -> str:
    """What the engine calls the version that is wanted of it."""
    if asked.wanted.version in {None, served.version}:
        return served.served_as
    return f"{asked.model.model_id}@{asked.wanted.version}"


async def _send(gate: Gate, served: Served, asked: _Asked) -> _Reply:
    body = asked.body.named(_name_at(asked, served))
    request = gate.http.build_request("POST", f"{served.base_url}/{asked.path}", content=body, headers={"content-type": "application/json"})
    _busy[served.engine_id] += 1
    try:
        upstream = await gate.http.send(request, stream=True)
    except BaseException:
        _busy[served.engine_id] -= 1
        raise
    version = served.version if asked.wanted.version is None else asked.wanted.version
    return _Reply(upstream=upstream, engine_id=served.engine_id, version=version)


async def _answer(gate: Gate, caller: Caller, asked: _Asked, reply: _Reply) -> Response:
    upstream, version = reply.upstream, reply.version
    headers = {VERSION_HEADER: str(version)}
    for name in ("retry-after", "x-request-id"):
        if name in upstream.headers:
            headers[name] = upstream.headers[name]
    if upstream.headers.get("content-type", "").startswith("text/event-stream"):
        return StreamingResponse(_stream(gate, caller, asked, reply), media_type="text/event-stream", headers=headers)
    async with reply:
        content = await upstream.aread()
    if upstream.status_code != 200:
        return Response(content, upstream.status_code, headers, media_type="application/json")
    answer = _marked(asked, orjson.loads(content), version)
    await _keep(gate, caller, asked, answer, version)
    return Response(orjson.dumps(answer), 200, headers, media_type="application/json")


async def _stream(gate: Gate, caller: Caller, asked: _Asked, reply: _Reply) -> AsyncIterator[bytes]:
    """The engine's events, each marked with the version, as they come."""
    chunks: list[dict[str, Any]] = []
    async with reply:
        try:
            async for line in reply.upstream.aiter_lines():
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    if asked.kept is not None:
                        await _keep(gate, caller, asked, assembled(chunks), reply.version)
                    yield b"data: [DONE]\n\n"
                elif line.startswith("data:"):
                    chunk = _marked(asked, orjson.loads(data), reply.version)
                    if asked.kept is not None:
                        chunks.append(chunk)
                    yield b"data: " + orjson.dumps(chunk) + b"\n\n"
        except (httpx.HTTPError, orjson.JSONDecodeError, HeadraceError) as error:
            # The status is sent already: an event says it.
            message = f"the answer broke off: {said(error)}"
            yield b"data: " + orjson.dumps({"error": {"message": message, "type": "server_error", "code": 502}}) + b"\n\n"


async def _keep(gate: Gate, caller: Caller, asked: _Asked, answer: dict[str, Any], version: int) -> None:
    if asked.kept is not None:
        trajectory, request = asked.kept
        await keep(gate.store, caller, exchange_of(trajectory, asked.model, version, request, answer))


def _marked(asked: _Asked, answer: dict[str, Any], version: int) -> dict[str, Any]:
    if "error" in answer:
        return answer
    model = asked.name
    if asked.wanted.name is not None:
        model = f"wandb-artifact:///{asked.wanted.account}/{asked.wanted.project}/{asked.wanted.name}:step{version}"
    return answer | {"model": model, "policy_version": version}


def _said(upstream: httpx.Response) -> str:
    try:
        return str(orjson.loads(upstream.content)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return f"status {upstream.status_code}"


def _nobody(gate: Gate, asked: _Asked, tried: list[str]) -> str:
    """Why no engine answered, and what to do."""
    if tried:
        return f"no engine of {asked.name} answers: {'; '.join(tried)}"
    tables = gate.view.tables
    serving = engines_of(tables, asked.model, _busy)
    if not serving:
        return (
            f"no engine serves {asked.name}: start one (`headrace engine --base-model {asked.model.settings.base_model}`), or wait until "
            "it has acknowledged a version"
        )
    goal = newest_version(tables, asked.model) if asked.wanted.version is None else asked.wanted.version
    failures = load_failures(tables, asked.model, goal)
    why = f" ({'; '.join(failures)})" if failures else ""
    return (
        f"version {goal} of {asked.name} is published, and no engine has served it within "
        f"{gate.settings.gateway.inference_wait_seconds:g} s{why}; the newest version that an engine serves is {serving[0].version}: "
        "try again, or ask for the name with @latest-served"
    )
