"""A large body as it was received: a small one in memory, a larger one in a temporary file, which any process can read.

Guarantees: the gateway's own memory holds no large body; the file is gone with the context. Limitations: it needs the temporary folder's
disk (503 without room).
"""

import asyncio
import contextlib
import hashlib
import mmap
import os
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from fastapi import Request
from typing_extensions import Buffer

from headrace.gateway.problems import ProblemError
from headrace.gateway.readers import SMALL_BYTES

_PIECE_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedBody:
    """A body; another process can have it."""

    size: int
    content: bytes = b""
    """Of a small one."""
    path: Path | None = None
    """Of a larger one."""

    def buffer(self) -> Buffer:
        """Its bytes."""
        if self.path is None:
            return self.content
        with self.path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def digest(self, before: bytes) -> str:
        """SHA-256 of some bytes and the body. Computes."""
        found = hashlib.sha256(before)
        found.update(self.buffer())
        return found.hexdigest()


@contextlib.asynccontextmanager
async def received(request: Request) -> AsyncIterator[ReceivedBody]:
    """The whole body, for as long as the context is open.

    Raises:
        ProblemError: 503: there is no room for it.
    """
    start = bytearray()
    async with contextlib.AsyncExitStack() as stack:
        stream = request.stream()
        async for chunk in stream:
            start += chunk
            if len(start) > SMALL_BYTES:
                break
        else:
            yield ReceivedBody(size=len(start), content=bytes(start))
            return
        try:
            file = stack.enter_context(tempfile.NamedTemporaryFile(prefix="headrace-body-"))  # noqa: SIM115 - the stack closes it
            async for chunk in stream:
                start += chunk
                if len(start) > _PIECE_BYTES:
                    await asyncio.to_thread(file.write, start)
                    start = bytearray()
            await asyncio.to_thread(file.write, start)
            await asyncio.to_thread(file.flush)
        except OSError as error:
            raise ProblemError(503, f"the gateway has no place for the body while it is read ({os.strerror(error.errno or 0)})") from None
        yield ReceivedBody(size=os.fstat(file.fileno()).st_size, path=Path(file.name))
