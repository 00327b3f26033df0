"""What every handler needs: settings, the view of the log, the writer, the store, the tokens. One for each app."""

import asyncio
import logging
from contextlib import AsyncExitStack
from typing import Annotated, cast

import httpx
from fastapi import Depends, Request

from headrace.core.checkup import check_store
from headrace.core.deadline import deadline
from headrace.core.settings import Settings
from headrace.core.store import ObjectStore, open_store
from headrace.gateway.log_view import LogView
from headrace.gateway.log_writer import LogWriter
from headrace.gateway.pace import Pace
from headrace.gateway.readers import Readers
from headrace.gateway.tokens import Tokens

logger = logging.getLogger(__name__)

_STORE_SECONDS = 5.0


class Gate:
    """Open it as a context; handlers get it by `OpenGate`.

    Args:
        settings: Of this process.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.pace = Pace(settings.gateway.requests_per_minute)
        self.tokens = Tokens(settings.gateway)
        self.view = LogView(settings)
        self.writer = LogWriter(settings, self.view)
        self.readers = Readers(settings.gateway)
        self.store: ObjectStore = open_store(settings.store.url, settings.s3)
        self.http = httpx.AsyncClient(
            timeout=httpx.Timeout(settings.gateway.inference_timeout_seconds, connect=5.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=200),
            trust_env=False,
        )
        """To the engines."""
        self.ending = asyncio.Event()
        """Set when the server is to end: answers without an end of their own end then."""
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "Gate":
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.http)
            await stack.enter_async_context(self.readers)
            await stack.enter_async_context(self.view)
            await stack.enter_async_context(self.writer)
            await self._try_store()
            self._stack = stack.pop_all()
        return self

    async def _try_store(self) -> None:
        """Write to the store, which makes the folder of a new one; a store that should hold a model's files already is not made here."""
        if self.view.tables.steps:
            return
        try:
            async with deadline(_STORE_SECONDS):
                (found,) = await asyncio.to_thread(check_store, self.settings)
        except TimeoutError:
            logger.warning("the object store %s does not answer: requests that need it get 503 until it does", self.settings.store.url)
        else:
            if not found.ok:
                logger.warning("the object store can't be used: %s (%s)", found.detail, found.advice)

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()


def gate_of(request: Request) -> Gate:
    """The gate of the app that a request came to."""
    return cast("Gate", request.app.state.gate)


OpenGate = Annotated[Gate, Depends(gate_of)]
