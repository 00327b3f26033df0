"""Pacing: rollouts are held back while more groups are under way than the lag allows, so that no work is thrown away.

A gate counts the groups that it let through since its first version v0. A slot is free while

    passed < (version - v0 + max_policy_lag + 1) × groups_per_step × share

Guarantees: group n (from 0) of a stream that this gate alone feeds is cut at version v0 + n // groups_per_step, so a group that was sampled
at the version the gate knew when it passed has a lag of at most `max_policy_lag` at the cut. With several producers the shares must sum to
at most 1. A slot whose rollout failed is given back. Limitations: what other producers, or an earlier life of this one, left in the queue;
versions that jobs made, which use none of the stream's groups. Those can add lag; importance sampling, or the lane's own lag check, is
there for it.
"""

import asyncio
import math
import threading
from collections import deque
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from types import TracebackType


class PaceGate:
    """Holds rollouts back. Usable from asyncio and from threads at once; waiters pass first come, first served.

    Example: `async with gate.slot(): await producer.send(await rollout())`.

    Args:
        max_policy_lag: Versions between sampling and the cut, as in the model's settings.
        groups_per_step: As in the model's batch policy.
        share: The part of the stream that this producer feeds, in (0, 1].
        version: The model's policy version now; None: the first `observe` says it, and until then nothing passes.
    """

    def __init__(self, max_policy_lag: int, groups_per_step: int, share: float = 1.0, *, version: int | None = None) -> None:
        if max_policy_lag < 0 or groups_per_step < 1 or not 0 < share <= 1:
            raise ValueError("max_policy_lag must be at least 0, groups_per_step at least 1, and share in (0, 1]")
        if share * groups_per_step * (max_policy_lag + 1) < 1:
            raise ValueError(
                f"a share of {share} is less than one group in {max_policy_lag + 1} steps of {groups_per_step}: nothing would pass"
            )
        self._steps_ahead = max_policy_lag + 1
        self._groups_per_step = groups_per_step
        self._share = share
        self._first = version
        self._version = version
        self._passed = 0
        # Agents may be threads next to the event loop that observes versions: this lock guards the counters and is never held while
        # waiting.
        self._lock = threading.Lock()
        self._waiters: deque[Future[None]] = deque()

    @property
    def version(self) -> int | None:
        """The newest version observed."""
        return self._version

    @property
    def free(self) -> int:
        """Slots free now."""
        with self._lock:
            return max(0, self._limit() - self._passed)

    def observe(self, version: int) -> None:
        """A policy version is published (or, better, served by the engine that samples); older ones are ignored."""
        with self._lock:
            if self._first is None:
                self._first = version
            self._version = version if self._version is None else max(self._version, version)
            self._grant()

    def give_back(self, count: int = 1) -> None:
        """Slots whose groups will not be trained on: the rollout failed, or the lane refused the group (`GroupRejected`)."""
        with self._lock:
            self._passed = max(0, self._passed - count)
            self._grant()

    async def acquire(self) -> None:
        """Wait for a slot."""
        ticket = self._ticket()
        try:
            await asyncio.wrap_future(ticket)
        except asyncio.CancelledError:
            if self._abandon(ticket):
                self.give_back()
            raise

    def acquire_sync(self, timeout: float | None = None) -> bool:
        """Wait for a slot in a thread; False if none came within `timeout` seconds."""
        ticket = self._ticket()
        try:
            ticket.result(timeout)
        except FutureTimeoutError:
            return self._abandon(ticket)
        except BaseException:  # KeyboardInterrupt too must not keep the slot
            if self._abandon(ticket):
                self.give_back()
            raise
        return True

    def slot(self) -> "Slot":
        """A slot for one group, for `with` or `async with`; given back if the block raises."""
        return Slot(self)

    def _limit(self) -> int:
        if self._first is None or self._version is None:
            return 0
        # The small number keeps 10 × 0.1 from being 0.999…
        return math.floor((self._version - self._first + self._steps_ahead) * self._groups_per_step * self._share + 1e-9)

    def _ticket(self) -> "Future[None]":
        ticket: Future[None] = Future()
        with self._lock:
            self._waiters.append(ticket)
            self._grant()
        return ticket

    def _grant(self) -> None:
        while self._waiters and self._passed < self._limit():
            ticket = self._waiters.popleft()
            if ticket.set_running_or_notify_cancel():
                self._passed += 1
                ticket.set_result(None)

    def _abandon(self, ticket: "Future[None]") -> bool:
        """Stop waiting; whether the slot had been granted in the same moment (and is kept)."""
        return not ticket.cancel()


class Slot:
    """One slot of a gate as a context manager."""

    def __init__(self, gate: PaceGate) -> None:
        self._gate = gate

    async def __aenter__(self) -> None:
        await self._gate.acquire()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.__exit__(kind, error, trace)

    def __enter__(self) -> None:
        self._gate.acquire_sync()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self._gate.give_back()
