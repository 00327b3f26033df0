"""One line for each request: method, path, status, milliseconds, bytes. Nothing of headers, query or body, which can hold secrets."""

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger("headrace.gateway.access")


class AccessLog:
    """Middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, size = time.monotonic(), 0, 0

        async def noting(message: Message) -> None:
            nonlocal status, size
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                size += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            ms = (time.monotonic() - began) * 1000
            # The path as a repr: line breaks in it must not forge a line.
            logger.info("%s %r %d %.0f ms %d bytes", scope["method"], scope["path"], status or 499, ms, size)
