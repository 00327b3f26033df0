"""Requests to batches: what arrives together, or while a batch runs, is sampled together if it is for the same weights.

Guarantees: the oldest request is always in the next batch; a request that is left by its client frees its rows at their next token and
disturbs no one; the queue is bounded, and beyond the bound a request is refused at once. One thread owns the engine: sampling and changes
of its weights take turns there. Limitations: rows that join a running batch.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from headrace.core.errors import HeadraceError
from headrace.core.outages import said
from headrace.engine.sampling.policy_engine import PolicyEngine
from headrace.engine.sampling.sampled_row import RowPiece, RowRequest, SampledRow

logger = logging.getLogger(__name__)

T = TypeVar("T")
_GATHER_SECONDS = 0.003
"""An idle engine waits so long for what arrives with the first request."""


class EngineBusyError(HeadraceError):
    """More requests wait than the queue holds; try again later."""


class SamplingError(HeadraceError):
    """The batch of a request failed; says why."""


class SampleJob:
    """The rows of one request, which are sampled together.

    Args:
        weights: Name of the weights; None: the base model.
        rows: What is asked for of each.
        decode: Token ids to text.
    """

    def __init__(self, weights: str | None, rows: Sequence[RowRequest], decode: Callable[[Sequence[int]], str]) -> None:
        self.weights = weights
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[RowPiece | SamplingError] = asyncio.Queue()
        self.rows = [SampledRow(row, index, decode, self._emit) for index, row in enumerate(rows)]

    async def pieces(self) -> AsyncIterator[RowPiece]:
        """Pieces as they come, until each row has ended.

        Raises:
            SamplingError: the batch failed.
        """
        left = len(self.rows)
        while left:
            piece = await self._pieces.get()
            if isinstance(piece, SamplingError):
                raise piece
            left -= piece.finish is not None
            yield piece

    def give_up(self) -> None:
        """No one waits for it any more."""
        for row in self.rows:
            row.give_up()

    def fail(self, error: SamplingError) -> None:
        """End it with an error; rows that ended keep what they have."""
        self.give_up()
        self._pieces.put_nowait(error)

    def _emit(self, piece: RowPiece) -> None:
        self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)


class Batcher:
    """The queue before an engine, and the thread that owns it.

    Args:
        engine: What samples.
        rows_at_once: Rows of a batch at most; a request with more is a batch of its own.
        rows_waiting: Rows that wait at most.
    """

    def __init__(self, engine: PolicyEngine, *, rows_at_once: int = 64, rows_waiting: int = 4096) -> None:
        self._engine = engine
        self._at_once = rows_at_once
        self._bound = rows_waiting
        self._waiting: deque[SampleJob] = deque()
        self._running: list[SampleJob] = []
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._closed = False

    @property
    def rows_waiting(self) -> int:
        """Rows that are in no batch yet."""
        return sum(len(job.rows) for job in self._waiting)

    def submit(self, job: SampleJob) -> None:
        """Put a job into the queue.

        Raises:
            EngineBusyError: the queue is full, or the engine ends.
        """
        if self._closed:
            raise EngineBusyError("the engine is ending: ask another one")
        if self._waiting and self.rows_waiting + len(job.rows) > self._bound:
            raise EngineBusyError(f"{self.rows_waiting} completions wait already, at most {self._bound} may: try again in a moment")
        self._waiting.append(job)
        self._arrived.set()

    async def call(self, work: Callable[[], T]) -> T:
        """Run something in the engine's thread, between two batches."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def post(self, work: Callable[[], None]) -> None:
        """As `call`, without waiting for it; what it raises is logged. Nothing, once the thread is gone."""

        def logged() -> None:
            try:
                work()
            except Exception:  # there is no one to tell
                logger.exception("work in the engine's thread failed")

        if not self._closed:
            self._thread.submit(logged)

    async def run(self) -> None:
        """Sample what is asked for until cancelled."""
        while True:
            if not self._waiting:
                self._arrived.clear()
                await self._arrived.wait()
                await asyncio.sleep(_GATHER_SECONDS)
            self._running = batch = self._next()
            rows = [row for job in batch for row in job.rows]
            weights = batch[0].weights
            try:
                await self.call(lambda weights=weights, rows=rows: self._engine.sample(weights, rows))  # type: ignore[misc]
            except Exception as error:  # whatever torch raises: the requests of this batch fail, the next ones do not
                logger.exception("a batch of %d rows failed", len(rows))
                for job in batch:
                    job.fail(SamplingError(f"sampling failed: {said(error)}"))
            self._running = []

    async def close(self) -> None:
        """End what runs at its next token, refuse what waits, and let the thread go. After `run` was cancelled."""
        self._closed = True
        for job in [*self._running, *self._waiting]:
            job.fail(SamplingError("the engine was stopped"))
        self._waiting.clear()
        await asyncio.to_thread(self._thread.shutdown, wait=True)

    def _next(self) -> list[SampleJob]:
        """The oldest job and all later ones that fit to it."""
        batch = [self._waiting.popleft()]
        count = len(batch[0].rows)
        left: deque[SampleJob] = deque()
        for job in self._waiting:
            if job.weights == batch[0].weights and count + len(job.rows) <= self._at_once:
                batch.append(job)
                count += len(job.rows)
            else:
                left.append(job)
        self._waiting = left
        return batch
