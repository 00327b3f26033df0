"""What goes wrong in a run: a seeded deck of faults, played at random moments.

Each fault says what it did. Two are aimed at the gap between store and commit: the worker is stopped when the manifest of a step's weights
appears (`sight`), at once, or when the first record of its transaction is in the broker's log file; then `steps` is read to its end. If the
attempt is committed there, the blow came late: the worker continues, and the next manifest is waited for. If it is not, the worker is
killed, or, as a zombie, woken when another worker has done the step. What counts is settled at the end of the run: an attempt whose weights
are in the store and which the ledger never had was struck in the gap; one whose records are in the log as well, in its open transaction.
"""

import asyncio
import errno
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.crew import Crew, WorkerProcess
from tests.chaos.sight import Stored, Strike, stop, strike_at_manifest
from tests.chaos.store_fault import failing
from tests.chaos.stream import LANES
from tests.chaos.witness import Witness
from tests.s3_proxy import S3Proxy

from headrace.core.lanes import lane_of
from headrace.core.local import LocalBroker
from headrace.core.settings import Settings
from headrace.schemas.state import ModelState, StepRecord

_GAP_TRIES = 6
_COMMIT_SECONDS = 3.0
"""From the manifest of the weights to the first record of the transaction, at most."""
_STEP_SECONDS = 20.0
_TAKEOVER_SECONDS = 40.0
_CLAIMED = "is claimed"
"""In a worker's log when a lane was claimed."""


_WAITS = " waits, and is tried again until it works: "
_STORE_SECONDS = 40.0
_SPARED = 2
_ENDS_WORKERS = {
    "worker killed",
    "worker killed between store and commit",
    "worker killed while it recovers",
    "worker stopped through a rebalance",
    "zombie woken between store and commit",
}
_OF_S3 = {"store that refuses writes for a while"}
_OF_A_FILE_STORE = {
    "worker killed between store and commit",
    "broker killed between store and commit",
    "zombie woken between store and commit",
    "store full for a while",
    "store read-only for a while",
}
"""Those between store and commit look into the store's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What the workers of a run stand on."""

    broker: LocalBroker
    s3: S3Proxy | None
    """Their store; None: a folder."""


class Adversary:
    """Strikes.

    Args:
        settings: Of the run.
        crew: Its workers.
        ground: What they stand on.
        committed: What subscribers see.
        rng: Chooses.
        say: Prints a line.
        only: Names of the faults to play; None: all.
    """

    def __init__(
        self,
        settings: Settings,
        crew: Crew,
        ground: Ground,
        *,
        committed: Witness,
        rng: random.Random,
        say: Callable[[str], None],
        only: Sequence[str] | None = None,
    ) -> None:
        self._store = Path(settings.store.url.removeprefix("file://"))
        broker = ground.broker
        self._s3 = ground.s3
        self._steps = settings.topic_names.steps
        self._broker_data = broker.log_file.parent / "data"
        self._crew = crew
        self._broker = broker
        self._committed = committed
        self._rng = rng
        self._say = say
        self.counts: Counter[str] = Counter()
        self.gaps: list[tuple[str, str]] = []
        """Fault and attempt, of each blow between store and commit."""
        self._faults = {
            "worker killed": self._kill_worker,
            "worker killed between store and commit": self._kill_in_gap,
            "worker killed while it recovers": self._kill_in_recovery,
            "rank killed": self._kill_rank,
            "broker killed": self._kill_broker,
            "broker killed between store and commit": self._kill_broker_in_gap,
            "broker restarted": self._restart_broker,
            "worker stopped through a rebalance": self._stop_through_rebalance,
            "zombie woken between store and commit": self._zombie_in_gap,
            "store full for a while": self._fill_store,
            "store read-only for a while": self._lock_store,
            "store that refuses writes for a while": self._refuse_writes,
        }
        fits = _OF_A_FILE_STORE if self._s3 is None else _OF_S3
        self._faults = {name: fault for name, fault in self._faults.items() if name in fits or name not in _OF_A_FILE_STORE | _OF_S3}
        if only is not None:
            there = self._faults
            self._faults = {name: there[name] for name in only if name in there}
            if not self._faults:
                raise SystemExit(f"--only names no fault of this run's store; there are: {', '.join(there)}")
        self._deck: list[str] = []

    async def strike(self) -> None:
        """Play the next fault of the deck; a deck holds each once, in random order."""
        if not self._deck:
            self._deck = self._rng.sample(sorted(self._faults), len(self._faults))
        name = self._deck.pop()
        done = None if name in _ENDS_WORKERS and self._suspected() else await self._faults[name]()
        if done is None:
            self._say(f"{name}: no occasion")
            return
        self.counts[name] += 1
        self._say(f"{name}: {done}")

    def _suspected(self) -> bool:
        """Whether a batch has ended two workers, as the log says: the product refuses one that ends `worker.max_step_attempts` of them."""
        last = {state.model_id: state for state in self._committed.of(ModelState)}
        return any(state.intent is not None and state.intent.attempts >= _SPARED for state in last.values())

    async def _fill_store(self) -> str | None:
        return await self._while_waiting(failing(self._store, errno.ENOSPC))

    async def _lock_store(self) -> str | None:
        return await self._while_waiting(failing(self._store, errno.EROFS))

    async def _refuse_writes(self) -> str | None:
        assert self._s3 is not None
        return await self._while_waiting(self._s3.refusing(503, "ServiceUnavailable"))

    async def _while_waiting(self, fault: AbstractContextManager[None]) -> str | None:
        """Keep a fault of the store until a step has waited for its end for a while."""
        before = self._waits()
        with fault:
            if not await self._until(lambda: self._waits() > before, _STORE_SECONDS):
                return None
            await asyncio.sleep(self._rng.uniform(0, 3))  # how long it lasts
        return f"{self._waits() - before} steps waited"

    def _waits(self) -> int:
        return sum(worker.log.read_text(errors="replace").count(_WAITS) for worker in self._crew.workers)

    async def _kill_worker(self) -> str | None:
        await asyncio.sleep(self._rng.uniform(0, 0.5))  # a random moment, not a wait for something
        worker = self._any_worker()
        if worker is None:
            return None
        self._crew.kill(worker)
        return f"pid {worker.pid}"

    async def _kill_in_gap(self) -> str | None:
        stored = await self._in_gap()
        if stored is None:
            return None
        self.gaps.append(("killed", stored.attempt))
        self._crew.kill(stored.worker)
        return _of(stored)

    async def _kill_in_recovery(self) -> str | None:
        """Kill a worker, wait until one claims lanes again, and kill that within a second and a half, once or twice."""
        worker = self._any_worker()
        if worker is None:
            return None
        self._crew.kill(worker)
        times = self._rng.randint(1, 2)
        for _ in range(times):
            self._crew.replace_dead()
            newest = self._crew.workers[-1]
            if not await self._until(lambda w=newest: w.says("the group gave lanes") or not w.alive, _TAKEOVER_SECONDS):
                return None
            await asyncio.sleep(self._rng.uniform(0, 1.5))  # a random moment of its recovery
            if newest.alive:
                self._crew.kill(newest)
        return f"{times} in a row"

    async def _kill_rank(self) -> str | None:
        worker = self._any_worker()
        ranks = worker.ranks() if worker is not None else []
        if not ranks:
            return None
        await asyncio.sleep(self._rng.uniform(0, 0.3))  # a random moment
        rank = self._rng.choice(ranks)
        try:
            os.kill(rank, signal.SIGKILL)
        except ProcessLookupError:
            return None
        return f"pid {rank}"

    async def _kill_broker(self) -> str:
        os.kill(self._broker.pid, signal.SIGKILL)
        await self._start_broker()
        return f"back at {self._broker.bootstrap_servers}"

    async def _kill_broker_in_gap(self) -> str | None:
        """The worker lives and does not know whether its commit happened."""
        pid = self._broker.pid
        stored = await self._manifest(lambda *_: os.kill(pid, signal.SIGKILL))
        if stored is None:
            return None
        await self._start_broker()
        return _of(stored)

    async def _restart_broker(self) -> str:
        os.kill(self._broker.pid, signal.SIGTERM)
        await self._start_broker()
        return f"back at {self._broker.bootstrap_servers}"

    async def _start_broker(self) -> None:
        await asyncio.to_thread(self._broker.wait, 60)
        self._broker.stop()
        await asyncio.sleep(self._rng.uniform(0, 1))  # how long it is away
        await asyncio.to_thread(self._broker.start)

    async def _stop_through_rebalance(self) -> str | None:
        owners = [worker for worker in self._crew.running if worker.says(_CLAIMED)]
        if not owners or len(self._crew.running) < 2:
            return None
        worker = self._rng.choice(owners)
        stop(worker)
        return await self._wake(worker, "at a random moment")

    async def _zombie_in_gap(self) -> str | None:
        if len(self._crew.running) < 2:
            return None
        stored = await self._in_gap()
        if stored is None:
            return None
        self.gaps.append(("zombie", stored.attempt))
        return await self._wake(stored.worker, _of(stored), stored)

    async def _wake(self, worker: WorkerProcess, where: str, stored: Stored | None = None) -> str | None:
        """SIGCONT, when another worker has claimed a lane of the stopped one, or has done the step that it was in."""
        others = [other for other in self._crew.running if other is not worker]
        claims = _claims(others)

        def taken_over() -> bool:
            if stored is None:
                return _claims(others) > claims
            return any(r.model_id == stored.model_id and r.step == stored.step for r in self._committed.of(StepRecord))

        try:
            if not await self._until(taken_over, _TAKEOVER_SECONDS):
                return None
            await asyncio.sleep(self._rng.uniform(0, 1))  # a random moment after that
        finally:
            worker.signal(signal.SIGCONT)
        return where

    async def _in_gap(self) -> Stored | None:
        """A worker, stopped between store and commit; None if none could be caught there."""
        for _ in range(_GAP_TRIES):
            stored = await self._manifest(self._stop_in_transaction if len(self.gaps) % 2 == 0 else stop)
            if stored is None:
                return None
            await self._committed.catch_up()
            if not any(record.attempt == stored.attempt for record in self._committed.of(StepRecord)):
                return stored
            stored.worker.signal(signal.SIGCONT)
        return None

    async def _manifest(self, strike: Strike) -> Stored | None:
        return await asyncio.to_thread(strike_at_manifest, self._store, self._crew.running, _STEP_SECONDS, strike)

    def _stop_in_transaction(self, worker: WorkerProcess, model_id: str) -> None:
        """Wait until the first record of the step's transaction, the ledger's, is in the broker's log; blocks."""
        folder = self._broker_data / f"{self._steps}-{lane_of(model_id, LANES)}"
        log = max(folder.glob("*.log"))
        size, until = log.stat().st_size, time.monotonic() + _COMMIT_SECONDS
        while log.stat().st_size == size and time.monotonic() < until:
            time.sleep(0.0002)
        stop(worker, model_id)

    def _any_worker(self) -> WorkerProcess | None:
        running = self._crew.running
        return self._rng.choice(running) if running else None

    async def _until(self, fits: Callable[[], bool], seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                while not fits():  # noqa: ASYNC110 - logs of other processes have no event
                    await asyncio.sleep(0.05)
        except TimeoutError:
            return False
        return True


def _claims(workers: Sequence[WorkerProcess]) -> int:
    return sum(worker.log.read_text(errors="replace").count(_CLAIMED) for worker in workers)


def _of(stored: Stored) -> str:
    return f"step {stored.step} of {stored.model_id[:8]}, attempt {stored.attempt[-8:]}, worker {stored.worker.pid}"
