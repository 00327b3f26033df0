"""What a request may bring, and how long it may take to: ASGI middleware, so that nothing is read beyond it.

Guarantees: nothing of a body is read before its sender has shown a key (but for signed uploads, whose address is the key, and whose handler
asks first). Each kind of route has its own limit: a body that says it is larger is refused before it is read, one that turns out to be is
cut off, both with 413; one that does not come in whole in time gets 408. All bodies under way have a budget, of which one account has half
at most; beyond it 429. The body of a plain route is JSON that orjson reads, without half of a surrogate pair and not nested deeper than
`_DEEPEST`, or the request is refused: no handler and no library behind it meets another one.
Limitations: what the network and the server hold before they are asked (64 KiB a connection) is in no budget.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, TypeVar

import orjson
from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.core.settings import GatewaySettings
from headrace.gateway.access import identify
from headrace.gateway.problems import FaultError, ProblemError, UnprocessableError, answer, faults_answer
from headrace.gateway.training_jobs.config import parts_of
from headrace.schemas.parsing import write_json
from headrace.schemas.reasons import CodecError

PLAIN_BYTES = 256 * 1024
_DEEPEST = 100
_UPLOAD_BYTES = 1024 * 1024
"""Of an upload, which goes to a file, counts so much."""
_RETRY_SECONDS = 2

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


class Body(Enum):
    """What the body of a route is."""

    PLAIN = "plain"
    """JSON of at most `PLAIN_BYTES`."""
    INFERENCE = "inference"
    """JSON that continues to an engine."""
    GROUPS = "groups"
    """JSON with groups of trajectories, which the handler puts into a file."""
    UPLOAD = "upload"
    """A file of a dataset, which the handler streams on."""
    SIGNED_UPLOAD = "signed upload"
    """The same, where the address is the key."""


_TAKES: dict[Callable[..., Any], Body] = {}


def takes(body: Body) -> Callable[[Endpoint], Endpoint]:
    """Say what the body of a route is, on its handler; without a word it is `Body.PLAIN`."""

    def mark(endpoint: Endpoint) -> Endpoint:
        _TAKES[endpoint] = body
        return endpoint

    return mark


class Budget:
    """Bytes of bodies that are held at once.

    Args:
        most: In all.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: Counter[str] = Counter()

    def take(self, account: str, size: int) -> None:
        """Hold more.

        Raises:
            ProblemError: 429, there is no room for it now.
        """
        if self._held.total() + size > self._most or self._held[account] + size > self._most // 2:
            raise ProblemError(
                429,
                f"requests under way hold as much as this gateway takes at once ({self._most} bytes, half of it of one account, "
                "gateway.held_body_bytes): send it again in a moment",
                headers={"Retry-After": str(_RETRY_SECONDS)},
            )
        self._held[account] += size

    def give_back(self, account: str, size: int) -> None:
        """Hold less."""
        self._held[account] -= size
        if not self._held[account]:
            del self._held[account]


class BodyLimit:
    """Middleware.

    Args:
        app: What it guards.
        settings: Limits.
    """

    def __init__(self, app: ASGIApp, settings: GatewaySettings) -> None:
        self._app = app
        self._settings = settings
        self._budget = Budget(settings.held_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        reading = _Reading(scope, receive, self._settings, self._budget)
        started = False

        async def noting(message: Message) -> None:
            nonlocal started
            if reading.problem is not None and not started:
                return  # what reads the body has its own words for a body that can't be read
            started = True
            await send(message)

        try:
            await self._app(scope, reading.receive, noting)
        except (ProblemError, UnprocessableError):
            if reading.problem is None or started:
                raise
        finally:
            reading.end()
        if reading.problem is not None and not started:
            await _answer(scope["path"], reading.problem)(scope, receive, send)


class _Reading:
    """The body of one request, as its handler receives it."""

    def __init__(self, scope: Scope, receive: Receive, settings: GatewaySettings, budget: Budget) -> None:
        self._scope = scope
        self._receive = receive
        self._settings = settings
        self._budget = budget
        self._until = time.monotonic() + settings.request_timeout_seconds
        self._account = ""
        self._kind = Body.PLAIN
        self._limit = self._read = self._held = 0
        headers = Headers(scope=scope)
        self._begun = False
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        # Without a body that a handler reads, it receives only that the client is there, or hangs up; pages ask that without a key.
        self._ended = scope["method"] in {"GET", "HEAD", "OPTIONS"} or not has_body
        self.problem: ProblemError | UnprocessableError | None = None
        """Why the body can't be taken, whatever the handler makes of that."""

    async def receive(self) -> Message:
        """What the handler calls."""
        if self._ended:
            return await self._receive()
        try:
            if not self._begun:
                await self._begin()
            return await (self._whole() if self._kind is Body.PLAIN else self._piece())
        except (ProblemError, UnprocessableError) as problem:
            self.problem = problem
            raise

    def end(self) -> None:
        """The request is answered: what it held is free."""
        if self._held:
            self._budget.give_back(self._account, self._held)
            self._held = 0

    async def _begin(self) -> None:
        """Decide, before anything is read, whether it may be."""
        self._begun = True
        self._kind = kind = _TAKES.get(self._scope.get("endpoint", _nothing), Body.PLAIN)
        if kind is not Body.SIGNED_UPLOAD:
            self._account = (await identify(Request(self._scope))).account
        headers = Headers(scope=self._scope)
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise ProblemError(415, "the body must not be compressed: leave Content-Encoding out")
        self._limit = self._most()
        said = headers.get("content-length", "")
        size = int(said) if said.isascii() and said.isdigit() else 0  # the server has checked it
        if size > self._limit:
            raise self._too_large()
        self._hold(_UPLOAD_BYTES if self._is_upload() else size)

    async def _piece(self) -> Message:
        try:
            # Of an upload each piece has the time, of anything else the whole.
            seconds = self._settings.request_timeout_seconds if self._is_upload() else max(0.0, self._until - time.monotonic())
            message = await asyncio.wait_for(self._receive(), seconds)
        except TimeoutError:
            raise ProblemError(408, f"the request did not come in whole within {self._settings.request_timeout_seconds:g} s") from None
        if message["type"] == "http.disconnect":
            raise ProblemError(400, "the request broke off: send it again")
        self._read += len(message.get("body", b""))
        self._ended = not message.get("more_body", False)
        if self._read > self._limit:
            raise self._too_large()
        if not self._is_upload():
            self._hold(self._read)
        return message

    async def _whole(self) -> Message:
        """All of a plain body, as one piece that was looked at."""
        pieces: list[bytes] = []
        while not self._ended:
            pieces.append((await self._piece()).get("body", b""))
        body = b"".join(pieces)
        check_json(body)
        return {"type": "http.request", "body": body, "more_body": False}

    def _hold(self, size: int) -> None:
        """Hold so much in all."""
        if size > self._held:
            self._budget.take(self._account, size - self._held)
            self._held = size

    def _is_upload(self) -> bool:
        return self._kind in {Body.UPLOAD, Body.SIGNED_UPLOAD}

    def _setting(self) -> str | None:
        if self._kind is Body.PLAIN:
            return "max_body_bytes" if self._settings.max_body_bytes < PLAIN_BYTES else None
        names = {Body.INFERENCE: "max_inference_bytes", Body.GROUPS: "max_body_bytes"}
        return names.get(self._kind, "max_upload_bytes")

    def _most(self) -> int:
        name = self._setting()
        limit: int = PLAIN_BYTES if name is None else getattr(self._settings, name)
        # What is larger than the budget would be told to try again, without effect.
        return limit if self._is_upload() else min(limit, self._settings.held_body_bytes // 2)

    def _too_large(self) -> ProblemError:
        name = self._setting()
        if name is None:
            return ProblemError(413, f"the body has more than {self._limit} bytes, which is what is read here: data belongs into a dataset")
        return ProblemError(413, f"the body has more than {self._limit} bytes (gateway.{name}): split it")


def check_json(body: bytes) -> None:
    """Refuse what handlers could fail on.

    Raises:
        UnprocessableError: it is not JSON, or too deep.
    """
    if not body.strip():
        return
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise UnprocessableError([_surrogate_in(body) or FaultError(["body"], f"not JSON: {error}", "json_invalid")]) from None
    level = [value]
    for _ in range(_DEEPEST):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return
    raise UnprocessableError([FaultError(["body"], f"nested deeper than {_DEEPEST} levels", "too_deep")])


def _surrogate_in(body: bytes) -> FaultError | None:
    """The fault of a text that Python takes and UTF-8 has no bytes for, with its place."""
    try:
        write_json(json.loads(body))
    except CodecError as error:
        return FaultError(["body", *parts_of(error.path)], error.detail)
    except (ValueError, RecursionError):
        pass
    return None


def _inside(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _answer(path: str, problem: ProblemError | UnprocessableError) -> ASGIApp:
    return answer(path, problem) if isinstance(problem, ProblemError) else faults_answer(path, problem.faults)


def _nothing() -> None:
    """The handler of a request that no route has."""
