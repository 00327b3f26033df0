"""The process that owns the device: plans go in through a pipe, results come out.

Guarantees: a step that raises fails that step (`StepFailedError`, with the traceback), a process that ends fails it too
(`RankDiedError`); the process ends with its parent, however that ends; it never sees the SIGINT of a terminal's process group, which
is the parent's to judge. Gives up: thread safety (one call at a time), and starting from a short-lived thread: on Linux the rank
ends with the thread that started it.
"""

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import traceback
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Literal

from headrace.core.errors import HeadraceError
from headrace.core.processes import die_with
from headrace.trainer.plan import BaseSource, StepPlan, StepResult

logger = logging.getLogger(__name__)

_STOP_SECONDS = 5.0

Request = tuple[Literal["run"], StepPlan] | tuple[Literal["preload"], BaseSource]


class StepFailedError(HeadraceError):
    """The step raised; the rank lives on. The last line of the message says what."""


class RankDiedError(HeadraceError):
    """The rank process ended in the middle of a step."""


class RankProcess:
    """A rank process, from its start to its end.

    Args:
        threads: Torch threads; 0: all cores.
    """

    def __init__(self, threads: int = 0) -> None:
        # spawn: torch's thread pools and a parent's event loop do not survive a fork.
        context = multiprocessing.get_context("spawn")
        self._pipe, self._theirs = context.Pipe()
        self._process = context.Process(
            target=_main, args=(self._theirs, self._pipe, threads, os.getpid()), name="headrace-rank", daemon=True
        )

    @property
    def pid(self) -> int | None:
        """The process id; None before the start."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.is_alive()

    def start(self) -> None:
        """Start it; returns at once. Its imports (seconds) overlap with whatever the caller does next."""
        # The child inherits the mask: a Ctrl-C during its first imports would end it before it can ignore the signal. The resource
        # tracker, which a first start brings up, would unblock it again, so it comes first.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._theirs.close()

    def preload(self, base: BaseSource) -> None:
        """Ask it to read a base model before the first plan comes; nothing is awaited, a failure shows at the first step."""
        with contextlib.suppress(OSError):
            self._pipe.send(("preload", base))

    def run(self, plan: StepPlan) -> StepResult:
        """Run a step; blocks until it is done.

        Raises:
            StepFailedError: it raised.
            RankDiedError: the process is gone.
        """
        try:
            self._pipe.send(("run", plan))
            answer = self._pipe.recv()
        except (OSError, EOFError) as error:
            self._process.join(_STOP_SECONDS)
            raise RankDiedError(f"the rank process ended during the step (exit code {self._process.exitcode})") from error
        if isinstance(answer, StepResult):
            return answer
        raise StepFailedError(str(answer))

    def kill(self) -> None:
        """End it now; a `run` in another thread raises `RankDiedError`."""
        if self._process.pid is not None:
            self._process.kill()

    def close(self) -> None:
        """Ask it to end, and make it."""
        self._pipe.close()
        if self._process.pid is None:
            return
        self._process.join(_STOP_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()


def _main(pipe: Connection, parents_end: Connection, threads: int, parent: int) -> None:
    parents_end.close()  # else the pipe never ends for us
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s rank: %(message)s", stream=sys.stderr)
    # Before torch loads OpenMP: its threads wait by spinning otherwise, and a step of 0.06 s took 0.96 s on two busy cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # our stderr is a log
    from headrace.trainer.engine import TrainingEngine  # noqa: PLC0415 - imports torch, in this process only

    engine = TrainingEngine(threads)
    while True:
        try:
            request: Request = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            match request:
                case ("preload", BaseSource() as base):
                    engine.preload(base)
                    continue
                case ("run", StepPlan() as plan):
                    answer: StepResult | str = engine.run(plan)
        except Exception:
            if request[0] == "preload":
                logger.exception("preload failed")
                continue
            answer = traceback.format_exc()
        try:
            pipe.send(answer)
        except (BrokenPipeError, OSError):
            return
