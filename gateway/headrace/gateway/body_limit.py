"""The most that a request may bring, and how long it may take to: ASGI middleware, so that nothing is read beyond it.

Guarantees: a body that says it is too large is refused before it is read, one that turns out to be is cut off, both with 413; one that does
not come in whole in time gets 408. Of somebody who shows no key that is known, `_STRANGERS_BYTES` are read at most, then it is 401: a body
is read before a handler asks for the key. Gives up: uploads of datasets, which have a limit of their own (`is_upload`) and ask first.
"""

import asyncio
import time
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.core.settings import GatewaySettings
from headrace.gateway.problems import ProblemError, answer, no_key

_STRANGERS_BYTES = 64 * 1024


class BodyLimit:
    """Middleware.

    Args:
        app: What it guards.
        settings: Limits.
        is_upload: Whether a path takes a file that is streamed on.
        is_known: Whether the headers hold a key that is known, or none is needed.
    """

    def __init__(
        self, app: ASGIApp, settings: GatewaySettings, is_upload: Callable[[str], bool], is_known: Callable[[Headers], bool]
    ) -> None:
        self._app = app
        self._settings = settings
        self._is_upload = is_upload
        self._is_known = is_known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        upload = self._is_upload(path)
        headers = Headers(scope=scope)
        limit, too_large = self._limit(headers, upload=upload)
        seconds = self._settings.request_timeout_seconds
        until = time.monotonic() + seconds
        said = headers.get("content-length", "0")
        if said.isdigit() and int(said) > limit:
            await answer(path, too_large)(scope, receive, send)
            return
        read, ended, started = 0, False, False
        found: ProblemError | None = None

        async def limited() -> Message:
            nonlocal read, ended, found
            if ended:
                return await receive()
            try:
                # Of an upload each piece has the time, of anything else the whole.
                message = await asyncio.wait_for(receive(), seconds if upload else max(0.0, until - time.monotonic()))
            except TimeoutError:
                found = ProblemError(408, f"the request did not come in whole within {seconds:g} s")
                raise found from None
            read += len(message.get("body", b""))
            ended = not message.get("more_body", False)
            if read > limit:
                found = too_large
                raise found
            return message

        async def noting(message: Message) -> None:
            nonlocal started
            if found is not None and not started:
                return  # what reads the body has its own words for a body that can't be read
            started = True
            await send(message)

        try:
            await self._app(scope, limited, noting)
        except ProblemError:
            if found is None or started:
                raise
        if found is not None and not started:
            await answer(path, found)(scope, receive, send)

    def _limit(self, headers: Headers, *, upload: bool) -> tuple[int, ProblemError]:
        """Bytes, and what is said of more."""
        if not upload and not self._is_known(headers):
            return _STRANGERS_BYTES, no_key()
        name = "max_upload_bytes" if upload else "max_body_bytes"
        limit: int = getattr(self._settings, name)
        return limit, ProblemError(413, f"the body has more than {limit} bytes (gateway.{name}): split it")
