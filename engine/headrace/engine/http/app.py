"""The routes: `/v1/chat/completions`, `/v1/completions`, `/v1/models`, `/health`, `/version`.

Guarantees: nothing of a request is done before all of it was checked; the version that sampled an answer stands in it and in the header
`x-headrace-policy-version`; a client that goes away frees its rows, and disturbs no one; a page that a browser has open can't call, also
where it leads a name of its own to this machine. Limitations: access control (the engine is an inner part: let it listen where only the
gateway and your agents reach it), and a bound on what the base model's chat template takes.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from importlib.metadata import version

import orjson
from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from headrace.core.http_server import host_of, is_foreign_page, is_loopback
from headrace.engine.http.answers import ChatAnswer, CompletionAnswer, Readers
from headrace.engine.http.errors import ApiError, error_body, install_errors
from headrace.engine.http.requests import ChatRequest, read_chat, read_completion
from headrace.engine.sampling.batching import Batcher, SampleJob, SamplingError
from headrace.engine.sampling.policy_engine import PolicyEngine
from headrace.engine.sampling.sampled_row import RowPiece
from headrace.engine.serving.served_model import Policy
from headrace.engine.serving.served_models import ServedModels
from headrace.trainer.chat_text import ChatText

MAX_BODY_BYTES = 16 * 1024 * 1024
VERSION_HEADER = "x-headrace-policy-version"

Answer = ChatAnswer | CompletionAnswer


def engine_app(
    engine: PolicyEngine, batcher: Batcher, served: ServedModels, *, only_local: bool = False, names: Collection[str] = ()
) -> FastAPI:
    """The application.

    Args:
        engine: For its tokenizer.
        batcher: Takes the requests.
        served: What there is to sample from.
        only_local: It listens on loopback: the process that calls knows it as this machine.
        names: Host names under which it is known, next to `localhost` and addresses.
    """

    async def check_page(http: Request) -> None:
        host, origin = http.headers.get("host", ""), http.headers.get("origin")
        if only_local and not is_loopback(host_of(host)):
            raise ApiError(f"this engine answers to localhost only, not to Host {host[:100]!r}", status=403, code="foreign_host")
        if is_foreign_page(host, origin, names):
            raise ApiError(f"no page of {str(origin)[:100]!r} may call this engine", status=403, code="foreign_origin")

    app = FastAPI(title="Headrace engine", openapi_url=None, docs_url=None, redoc_url=None, dependencies=[Depends(check_page)])
    install_errors(app)
    readers = Readers(engine.tokenizer)

    @app.post("/v1/chat/completions")
    async def chat(http: Request) -> Response:
        request = read_chat(await _body(http))
        async with AsyncExitStack() as held:
            policy = await held.enter_async_context(served.policy(request.model))
            prompt = await asyncio.to_thread(_chat_prompt, engine, request, policy)
            kept = await asyncio.to_thread(readers.kept_ids, request)
            job = SampleJob(policy.weights, request.rows(prompt, engine.facts), partial(engine.text_of, kept=kept))
            answer = ChatAnswer(request, policy, prompt, lambda ids: engine.text_of(ids, special=True), readers)
            return await _answered(http, batcher, job, answer, policy, stream=bool(request.stream), held=held)

    @app.post("/v1/completions")
    async def completions(http: Request) -> Response:
        request = read_completion(await _body(http))
        async with AsyncExitStack() as held:
            policy = await held.enter_async_context(served.policy(request.model))
            prompts = [await asyncio.to_thread(_prompt, engine, prompt) for prompt in request.prompts]
            rows = [row for prompt in prompts for row in request.rows(prompt, engine.facts)]
            job = SampleJob(policy.weights, rows, engine.text_of)
            answer = CompletionAnswer(request, policy, prompts, lambda ids: engine.text_of(ids, special=True))
            return await _answered(http, batcher, job, answer, policy, stream=bool(request.stream), held=held)

    @app.get("/v1/models")
    async def models() -> Response:
        base = {"id": served.base_model, "object": "model", "created": 0, "owned_by": "headrace", "policy_version": 0}
        offers = [
            {
                "id": offer.name,
                "object": "model",
                "created": int(offer.created_at),
                "owned_by": "headrace",
                "parent": served.base_model,
                "model_id": offer.model_id,
                "policy_version": offer.version,
            }
            for offer in served.offers()
        ]
        return JSONResponse({"object": "list", "data": [base, *offers]})

    @app.get("/health")
    async def health() -> Response:
        ready = served.ready
        return JSONResponse({"status": "ok" if ready else "reading the models"}, 200 if ready else 503)

    @app.get("/version")
    async def version_of() -> Response:
        return JSONResponse({"version": version("headrace")})

    return app


async def _body(http: Request) -> bytes:
    """The body, within its bound."""
    chunks: list[bytes] = []
    size = 0
    async for chunk in http.stream():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise ApiError(f"the body has more than {MAX_BODY_BYTES} bytes: send less", status=413, code="body_too_large")
        chunks.append(chunk)
    return b"".join(chunks)


def _chat_prompt(engine: PolicyEngine, request: ChatRequest, policy: Policy) -> list[int]:
    switches = {**policy.switches, **(request.chat_template_kwargs or {})}
    return ChatText(engine.tokenizer, switches).prompt(request.messages, request.tools)


def _prompt(engine: PolicyEngine, prompt: str | list[int]) -> list[int]:
    return [int(token_id) for token_id in engine.tokenizer(prompt)["input_ids"]] if isinstance(prompt, str) else prompt


async def _answered(
    http: Request, batcher: Batcher, job: SampleJob, answer: Answer, policy: Policy, *, stream: bool, held: AsyncExitStack
) -> Response:
    """Sample and answer. A stream takes over what is held for it."""
    batcher.submit(job)
    headers = {VERSION_HEADER: str(policy.version)}
    if stream:
        kept = held.pop_all()
        kept.callback(job.give_up)
        return _Stream(_events(job, answer), headers, kept.aclose)
    try:
        pieces = await _unless_it_leaves(http, _all_of(job))
    finally:
        job.give_up()
    if pieces is None:
        return Response(status_code=499)
    return Response(orjson.dumps(answer.whole(pieces)), media_type="application/json", headers=headers)


async def _all_of(job: SampleJob) -> list[RowPiece]:
    return sorted([piece async for piece in job.pieces()], key=lambda piece: piece.index)


async def _unless_it_leaves(http: Request, work: Awaitable[list[RowPiece]]) -> Sequence[RowPiece] | None:
    """The work's result; None: the client went away."""
    working = asyncio.ensure_future(work)
    left = asyncio.ensure_future(http.receive())  # the body was read: what comes next is its leaving
    try:
        await asyncio.wait([working, left], return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        working.cancel()
        left.cancel()


async def _events(job: SampleJob, answer: Answer) -> AsyncIterator[bytes]:
    try:
        async for piece in job.pieces():
            for chunk in answer.chunks(piece):
                yield _event(chunk)
    except SamplingError as error:
        yield _event(error_body(str(error), 500, code="sampling_failed"))
    else:
        if (last := answer.last_chunk()) is not None:
            yield _event(last)
    yield b"data: [DONE]\n\n"


def _event(value: Mapping[str, object]) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


class _Stream(StreamingResponse):
    """Server-sent events, with something to do when they end, on whatever way."""

    def __init__(self, events: AsyncIterator[bytes], headers: Mapping[str, str], at_end: Callable[[], Awaitable[None]]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={**headers, "cache-control": "no-cache"})
        self._at_end = at_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._at_end()
