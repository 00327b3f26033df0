"""The world of ranks as the worker sees it: plans go in through a pipe to rank 0, results come out.

Guarantees: a step that raises fails that step (`StepFailedError`, with the traceback, or `RankOutageError`, where a disk or another thing
failed that the step is not to blame for); a rank that ends or gives no sign of life fails it
too (`RankDiedError`, which names the rank), and all ranks of the world end with it; ranks end with their parent, however that ends;
they never see the SIGINT of a terminal's process group, which is the parent's to judge. Limitations: thread safety (one call at a time,
`hand_over` and `hold_back` excepted), and starting from a short-lived thread: on Linux a rank ends with the thread that started it.
"""

import contextlib
import logging
import multiprocessing
import os
import select
import signal
import tempfile
import threading
import time
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

from headrace.core.errors import HeadraceError, OutageError
from headrace.trainer.plan import (
    Ahead,
    BaseSource,
    BaseUnusableError,
    Failure,
    HandedOver,
    Saved,
    SavePlan,
    SignOfLife,
    StepPlan,
    StepResult,
)
from headrace.trainer.rank_main import main
from headrace.trainer.world import Seat, WorldSettings

logger = logging.getLogger(__name__)

_STOP_SECONDS = 5.0
_BLAME_SECONDS = 1.0


class StepFailedError(HeadraceError):
    """The step raised. The last line of the message says what."""


class StepDivergedError(StepFailedError):
    """An update made weights that are not finite, or far too large: the step would fail again, from the same state."""


class BaseNotLoadedError(StepFailedError, BaseUnusableError):
    """The ranks can't use the base model: no fault of the step."""


class RankDiedError(HeadraceError):
    """A rank process ended, or hung, in the middle of a step."""


class RankOutageError(OutageError):
    """The step raised because a disk, for one, does not work. The state on the ranks is gone; the step may be run again when it works."""


def cause_of(error: HeadraceError) -> str:
    """What went wrong, without the traceback that a rank's error brings along: the last line of the message."""
    text = str(error).strip()
    return text.splitlines()[-1] if text else repr(error)


class RankWorld:
    """The rank processes of this machine, from their start to their end.

    Args:
        world: How many ranks, and how they share.
        launched: A launcher (torchrun, deepspeed) started the other ranks: only rank 0 is started here, and meets them by its environment.
    """

    def __init__(self, world: WorldSettings, *, launched: bool = False) -> None:
        self._world = world
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-world-")
        rendezvous = str(Path(self._folder.name, "rendezvous")) if world.size > 1 and not launched else None
        # spawn: torch's thread pools and a parent's event loop do not survive a fork.
        context = multiprocessing.get_context("spawn")
        pairs = [context.Pipe() for _ in range(1 if launched else world.size)]
        self._pipes = [ours for ours, _ in pairs]
        self._theirs = [theirs for _, theirs in pairs]
        self._processes: list[SpawnProcess] = [
            context.Process(
                target=main,
                args=(theirs, world, Seat(rank=rank, local_rank=rank, rendezvous=rendezvous), os.getpid()),
                name=f"headrace-rank-{rank}",
                daemon=True,
            )
            for rank, theirs in enumerate(self._theirs)
        ]
        self._broken = False
        self._ready: set[int] = set()
        self._sending = threading.Lock()
        self._ahead: str | None = None
        """The folder of the plan that rank 0 has already."""
        self._going: str | None = None

    @property
    def pids(self) -> tuple[int | None, ...]:
        """The process ids by rank; None before the start."""
        return tuple(process.pid for process in self._processes)

    @property
    def going(self) -> str | None:
        """The folder of the plan that the ranks have continued to by themselves: `run` of it, or `settle`, comes before all else."""
        return None if self._broken else self._going

    @property
    def alive(self) -> bool:
        """Whether the next plan can be run by this world."""
        return not self._broken and all(process.is_alive() for process in self._processes)

    def start(self) -> None:
        """Start the ranks; returns at once. Their imports (seconds) overlap with whatever the caller does next."""
        # A child inherits the mask: a Ctrl-C during its first imports would end it before it can ignore the signal. The resource
        # tracker, which a first start brings up, would unblock it again, so it comes first.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for process in self._processes:
                process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for theirs in self._theirs:
            theirs.close()

    def preload(self, base: BaseSource) -> None:
        """Ask the ranks to read a base model before the first plan comes; nothing is awaited, a failure shows at the first step."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(("preload", base))

    def drop(self) -> None:
        """Ask the ranks to free the model that they hold; nothing is awaited."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(("drop", None))

    def hand_over(self, plan: StepPlan, *, goes_on: bool) -> None:
        """Give rank 0 the plan that comes next, to be made ready while it runs another: the only call that may be made next to another.

        Blocks until it is read. What was handed over before and not run is forgotten; the process that dies meanwhile says so to who
        waits for it.

        Args:
            plan: The plan.
            goes_on: Whether the ranks may continue to it by themselves when they have made its state; the result then says so.
        """
        with self._sending, contextlib.suppress(OSError):
            self._ahead = None
            self._pipes[0].send(("ahead", Ahead(plan=plan, goes_on=goes_on)))
            self._ahead = plan.out_dir

    def hold_back(self) -> None:
        """Ask the ranks not to continue by themselves; they may have done so. It may run next to another call."""
        with self._sending, contextlib.suppress(OSError):
            self._pipes[0].send(("wait", None))

    def run(self, plan: StepPlan) -> StepResult:
        """Run a step; blocks until it is done.

        Raises:
            StepFailedError: it raised. A world of one rank lives on; a larger one has ended.
            RankOutageError: it raised, and is not to blame; otherwise as `StepFailedError`.
            RankDiedError: a rank is gone, or hung; the world has ended.
        """
        result = self._ask(plan)
        assert isinstance(result, StepResult)  # noqa: S101 - narrows the type: a step was asked for
        return result

    def save(self, plan: SavePlan) -> None:
        """Write the state that the ranks hold; raises as `run`."""
        self._ask(plan)

    def settle(self) -> StepResult:
        """The result of what the ranks have continued to by themselves; blocks and raises as `run`."""
        result = self._answered(None)
        assert isinstance(result, StepResult)  # noqa: S101 - as in `run`
        return result

    def _ask(self, plan: StepPlan | SavePlan) -> StepResult | Saved:
        if self._going is not None:
            if not isinstance(plan, StepPlan) or plan.out_dir != self._going:
                raise AssertionError("the ranks have continued to another step, which was not settled")
            return self.settle()
        # From a thread of its own: a rank that is stopped, or that still waits for another to start, reads no plan, and a large one does
        # not fit into the pipe.
        # Not waited for here: a rank that is stopped while it is handed a plan would hold this up where no one looks for signs of life.
        ours = self._sending.acquire(blocking=False)
        sending = threading.Thread(target=self._send, args=(plan, ours), name="headrace-plan", daemon=True)
        if ours and self._is_there(plan) and self._have_room():
            sending.run()  # some bytes, for which there is room: to start a thread took 3 ms, next to others that compute
        else:
            sending.start()
        return self._answered(sending)

    def _answered(self, sending: threading.Thread | None) -> StepResult | Saved:
        try:
            return self._result()
        except (OSError, EOFError):
            raise self._died() from None
        except BaseException:
            if self._broken:
                self.kill()
            raise
        finally:
            if sending is not None and sending.ident is not None:
                sending.join(_STOP_SECONDS)  # at once: the result is here, or who should have read the plan is not

    def _is_there(self, plan: StepPlan | SavePlan) -> bool:
        return isinstance(plan, StepPlan) and plan.out_dir == self._ahead

    def _have_room(self) -> bool:
        """Whether each pipe takes some bytes at once."""
        looking = select.poll()  # `select.select` knows no descriptor above 1,023, and a worker of many lanes has more
        for pipe in self._pipes:
            looking.register(pipe, select.POLLOUT)
        return len(looking.poll(0)) == len(self._pipes)

    def _send(self, plan: StepPlan | SavePlan, ours: bool) -> None:
        if not ours:
            self._sending.acquire()
        first: StepPlan | SavePlan | HandedOver = plan
        if isinstance(plan, StepPlan) and self._is_there(plan):
            first, self._ahead = HandedOver.of(plan), None
        try:
            for rank, pipe in enumerate(self._pipes):
                pipe.send(("run", first if rank == 0 else None))
        except OSError:
            pass  # a rank is gone: the end of its pipe says so to who waits for the result
        finally:
            self._sending.release()

    def _result(self) -> StepResult | Saved:
        by_pipe = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        limit = self._world.silence_seconds
        silent = dict.fromkeys(by_pipe.values(), 0.0)
        while True:
            looked = time.monotonic()
            ready = wait(self._pipes, timeout=limit / 4)
            # A look counts for no more than it should take: where this process itself was stopped, its ranks were perhaps, too.
            passed = min(time.monotonic() - looked, limit / 4)
            silent = {rank: seconds + passed for rank, seconds in silent.items()}
            for pipe in ready:
                assert isinstance(pipe, Connection)  # noqa: S101 - narrows the type: only pipes were waited for
                rank = by_pipe[pipe]
                message = pipe.recv()
                silent[rank] = 0.0
                self._ready.add(rank)
                if isinstance(message, StepResult | Saved):
                    self._going = message.goes_on if isinstance(message, StepResult) else None
                    if self._ahead == self._going:
                        self._ahead = None  # it has left the inbox
                    return message
                if isinstance(message, Failure):
                    self._going = None
                    raise self._failed(rank, message)
                assert isinstance(message, SignOfLife)  # noqa: S101 - there is no other
            # A rank that has not joined yet is importing, or waits for another to start: its end shows as the end of its pipe.
            hung = [rank for rank in sorted(self._ready) if silent[rank] > limit]
            if hung:
                self._broken = True
                raise RankDiedError(
                    f"rank {hung[0]} of {self._world.size} gave no sign of life for {limit:.0f} s: the world is ended (a rank "
                    "that only computes gives one; was the process stopped, or is the machine out of memory?)"
                )

    def _failed(self, rank: int, failure: Failure) -> HeadraceError:
        if self._world.size == 1:
            return _error(failure)
        # The others stand somewhere in the middle of a collective: nothing can be saved. Where a rank was killed its neighbours fail too,
        # with an error of their connection: name the dead one.
        self._broken = True
        deadline = time.monotonic() + _BLAME_SECONDS
        wait([process.sentinel for process in self._processes], timeout=_BLAME_SECONDS)
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        if any(process.exitcode is not None and process.exitcode < 0 for process in self._processes):
            return self._died()
        return _error(failure, f"rank {rank} of {self._world.size}: ")

    def _died(self) -> HeadraceError:
        self._broken = True
        ended = wait([process.sentinel for process in self._processes if process.pid is not None], timeout=_STOP_SECONDS)
        for process in self._processes:
            if process.sentinel in ended:
                process.join(_STOP_SECONDS)  # its sentinel may be a moment ahead of its exit code
        codes = [(process.exitcode, rank) for rank, process in enumerate(self._processes) if process.exitcode is not None]
        code, rank = min(codes, default=(None, 0))  # a signal's code is negative: what was killed, before what failed because of that
        self.kill()
        if rank not in self._ready:
            # It has not looked at a plan: a library that can't be imported, a disk that is full, a device that others hold.
            return RankOutageError(f"rank {rank} of {self._world.size} ended while it started (exit code {code}): its log says why")
        return RankDiedError(f"rank {rank} of {self._world.size} ended during the step (exit code {code}): the world is ended")

    def kill(self) -> None:
        """End all ranks now; a `run` in another thread raises `RankDiedError`."""
        self._broken = True
        for process in self._processes:
            if process.pid is not None:
                process.kill()

    def close(self) -> None:
        """Ask the ranks to end, and make them."""
        self._broken = True  # who asks from another thread whether it is alive may not ask a process that is closed
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            if process.pid is None:
                continue
            process.join(_STOP_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self._processes.clear()  # who closes once more, since no other world could be started, finds none
        self._folder.cleanup()


def _error(failure: Failure, where: str = "") -> HeadraceError:
    if failure.of_base:
        return BaseNotLoadedError(where + failure.text)
    if failure.outage is not None:
        return RankOutageError(where + failure.outage)
    return (StepDivergedError if failure.diverged else StepFailedError)(where + failure.text)
