"""The most that a request may bring, and how long it may take to: ASGI middleware, so that nothing is read beyond it.

Guarantees: a body that says it is too large is refused before it is read, one that turns out to be is cut off, both with 413; one that does
not come in whole in time gets 408. Gives up: uploads of datasets, which have a limit of their own (`is_upload`).
"""

import asyncio
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.core.settings import GatewaySettings
from headrace.gateway.problems import ProblemError, answer


class BodyLimit:
    """Middleware.

    Args:
        app: What it guards.
        settings: Limits.
        is_upload: Whether a path takes a file that is streamed on.
    """

    def __init__(self, app: ASGIApp, settings: GatewaySettings, is_upload: Callable[[str], bool]) -> None:
        self._app = app
        self._settings = settings
        self._is_upload = is_upload

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        upload = self._is_upload(path)
        limit = self._settings.max_upload_bytes if upload else self._settings.max_body_bytes
        seconds = self._settings.request_timeout_seconds
        said = dict(scope["headers"]).get(b"content-length", b"0")
        if said.isdigit() and int(said) > limit:
            await answer(path, _too_large(limit, upload=upload))(scope, receive, send)
            return
        read, ended, started = 0, False, False

        async def limited() -> Message:
            nonlocal read, ended
            if ended:
                return await receive()
            try:
                # Of an upload each piece has the time, of anything else the whole.
                message = await asyncio.wait_for(receive(), seconds)
            except TimeoutError:
                raise ProblemError(408, f"the request did not come in whole within {seconds:g} s") from None
            read += len(message.get("body", b""))
            ended = not message.get("more_body", False)
            if read > limit:
                raise _too_large(limit, upload=upload)
            return message

        async def noting(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, limited, noting)
        except ProblemError as problem:
            if started:
                raise
            await answer(path, problem)(scope, receive, send)


def _too_large(limit: int, *, upload: bool) -> ProblemError:
    setting = "gateway.max_upload_bytes" if upload else "gateway.max_body_bytes"
    return ProblemError(413, f"the body has more than {limit} bytes ({setting}): split it")
