"""Processes that read large JSON: what a request holds costs the event loop nothing, and memory and processor time within a bound.

Guarantees: a body of up to `SMALL_BYTES` is read by a thread of this process, a larger one by a process of its own, of which there are
`gateway.readers`; requests wait for one that is free. A body that takes more memory than `gateway.reader_memory_bytes`, or more processor
time than `_SECONDS`, or that ends the process in another way, is refused alone (413).
Limitations: the bound of memory is Linux's (RLIMIT_DATA); a process that was started stays until the gateway ends.

A large body as it was received: a small one in memory, a larger one in a temporary file, which any process can read.

Guarantees: the gateway's own memory holds no large body; the file is gone with the context. Limitations: it needs the temporary folder's
disk (503 without room).
"""

import asyncio
import contextlib
import hashlib
import mmap
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import ParamSpec, TypeVar

from fastapi import Request
from typing_extensions import Buffer

from headrace.core.processes import die_with, name_process
from headrace.core.settings import GatewaySettings, S3Settings
from headrace.core.store import ObjectStore, open_store
from headrace.gateway.problems import ProblemError

SMALL_BYTES = 64 * 1024
_SECONDS = 60.0
"""Processor time of one body, many times what the largest takes."""

P = ParamSpec("P")
T = TypeVar("T")


class Readers:
    """Open it as a context.

    Args:
        settings: How many, and how large.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._turn = asyncio.Semaphore(settings.readers)
        self._idle: list[ProcessPoolExecutor] = []

    async def __aenter__(self) -> "Readers":
        return self

    async def __aexit__(self, *_: object) -> None:
        while self._idle:
            self._end(self._idle.pop())

    async def run(self, size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What a function makes of something large.

        Args:
            size: Bytes that it reads.
            function: Of a module; it blocks and computes.
            args: Its arguments, which can be pickled, as its result and its errors can.
            kwargs: The same.

        Raises:
            ProblemError: 413, it takes more than a reader may have.
            Exception: what the function raises.
        """
        if size <= SMALL_BYTES:
            return await asyncio.to_thread(function, *args, **kwargs)
        async with self._turn:
            executor = self._idle.pop() if self._idle else self._start()
            try:
                found: Future[T] = executor.submit(_run, partial(function, *args, **kwargs))
                answer = await asyncio.wrap_future(found)
            except BrokenProcessPool:
                executor.shutdown(wait=False)
                raise self._too_much() from None
            except MemoryError:
                self._end(executor)  # what it holds is of no use
                raise self._too_much() from None
            except BaseException:
                self._give_back(executor, found)
                raise
            self._give_back(executor, found)
            return answer

    def _start(self) -> ProcessPoolExecutor:
        # spawn: this process runs an event loop and threads, which a fork would copy in the middle of something.
        context = multiprocessing.get_context("spawn")
        told = (os.getpid(), self._settings.reader_memory_bytes)
        return ProcessPoolExecutor(1, mp_context=context, initializer=_prepare, initargs=told)

    def _give_back(self, executor: ProcessPoolExecutor, found: "Future[T]") -> None:
        if found.done():
            self._idle.append(executor)
        else:  # the request was cancelled
            self._end(executor)

    def _end(self, executor: ProcessPoolExecutor) -> None:
        for process in list((executor._processes or {}).values()):
            process.kill()
        executor.shutdown(wait=False, cancel_futures=True)

    def _too_much(self) -> ProblemError:
        return ProblemError(
            413,
            f"to read this takes more than {self._settings.reader_memory_bytes} bytes of memory (gateway.reader_memory_bytes) or "
            f"{_SECONDS:g} s: split it",
        )


@cache
def store_at(url: str, s3: S3Settings) -> ObjectStore:
    """The object store, in the process that calls: a store can't be handed to another."""
    return open_store(url, s3)


def _prepare(parent: int, memory: int) -> None:
    die_with(parent)
    name_process("headrace-reader")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the gateway ends its readers
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))


def _run(function: Callable[[], T]) -> T:
    signal.setitimer(signal.ITIMER_PROF, _SECONDS)  # no one handles SIGPROF: the kernel ends the process, whatever it computes
    try:
        return function()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


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
