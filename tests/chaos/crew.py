"""The worker processes of a run: started, watched, and started again when they have died.

Guarantees: each process has a log of its own; a worker ends with this program, however that ends. Linux only: it reads `/proc`.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.chaos.warm import start as start_warm
from tests.worker.conftest import environment_of

from headrace.core.settings import Settings

_NO_BROKER = "does not answer (KafkaConnectionError"


class Cold:
    """`headrace worker` from its beginning.

    Args:
        environment: Its settings.
        log: Where its output goes.
        sabotage: A guarantee to break on purpose; see `sabotage`.
    """

    def __init__(self, environment: dict[str, str], log: Path, sabotage: str | None) -> None:
        command = [sys.executable, "-m", "tests.chaos.worker_main", str(os.getpid()), *([sabotage] if sabotage else [])]
        with log.open("ab") as out:
            self._process = subprocess.Popen(command, env=os.environ | environment, stdout=out, stderr=out, start_new_session=True)
        self.pid = self._process.pid

    @property
    def exitcode(self) -> int | None:
        """None while it lives."""
        return self._process.poll()

    def join(self, timeout: float) -> None:
        """Wait for its end, at most so long."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)


class WorkerProcess:
    """One worker in a process group of its own.

    Args:
        settings: Of the run.
        log: Where its output goes.
        warm: Without the seconds of its imports; see `warm`.
        sabotage: A guarantee to break on purpose; see `sabotage`.
    """

    def __init__(self, settings: Settings, log: Path, *, warm: bool, sabotage: str | None) -> None:
        self.log = log
        log.touch()
        self.work_dir = settings.worker.work_dir
        make = start_warm if warm else Cold
        self._process = make(environment_of(settings), log, sabotage)
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        self.stopped = False
        """By SIGSTOP."""

    @property
    def alive(self) -> bool:
        """Whether it runs, or is stopped."""
        return self.exitcode is None

    @property
    def exitcode(self) -> int | None:
        """None while it lives."""
        return self._process.exitcode

    def says(self, words: str) -> bool:
        """Whether its log has these words."""
        return words in self.log.read_text(errors="replace")

    def holds(self, attempt: str) -> bool:
        """Whether the files of this attempt lie in its working folder: the step is its own."""
        return (self.work_dir / f"worker-{self.pid}" / attempt).exists()

    def ranks(self) -> list[int]:
        """Process ids of its ranks."""
        found = []
        for pid in self._children():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().startswith("headrace-rank"):
                    found.append(pid)
        return found

    def _children(self) -> list[int]:
        pids: list[int] = []
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{self.pid}/task").iterdir():
                pids.extend(map(int, (task / "children").read_text().split()))
        return pids

    def signal(self, number: signal.Signals) -> None:
        """To the worker and all its processes; nothing if it is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)
        self.stopped = number is signal.SIGSTOP or (self.stopped and number is not signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL to the worker alone; its ranks end with it by the kernel's hand, as they must."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
            os.killpg(self.pid, signal.SIGCONT)  # multiprocessing's tracker, stopped with it, would never see that all have ended
        self._process.join(30)

    async def end(self, seconds: float = 60) -> int | None:
        """SIGTERM; its exit code, or None if it had to be killed."""
        self.signal(signal.SIGCONT)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        await asyncio.to_thread(self._process.join, seconds)
        if self.alive:
            self.signal(signal.SIGKILL)
            self._process.join(30)
            return None
        return self.exitcode


class Crew:
    """So many workers, kept running.

    Args:
        settings: Of the run.
        size: Workers.
        logs: Folder of their logs.
        warm: See `WorkerProcess`.
        sabotage: See `WorkerProcess`.
    """

    def __init__(self, settings: Settings, size: int, logs: Path, *, warm: bool = False, sabotage: str | None = None) -> None:
        self._settings = settings
        self._warm = warm
        self._logs = logs
        self._sabotage = sabotage
        self._started = 0
        self.workers: list[WorkerProcess] = []
        self.killed: set[int] = set()
        """Process ids that were killed on purpose."""
        self.ended: list[WorkerProcess] = []
        """Ended by themselves."""
        logs.mkdir(parents=True, exist_ok=True)
        for _ in range(size):
            self._start()

    def _start(self) -> None:
        self._started += 1
        self.workers.append(
            WorkerProcess(self._settings, self._logs / f"worker-{self._started}.log", warm=self._warm, sabotage=self._sabotage)
        )

    @property
    def running(self) -> list[WorkerProcess]:
        """Alive and not stopped."""
        return [worker for worker in self.workers if worker.alive and not worker.stopped]

    def kill(self, worker: WorkerProcess) -> None:
        """SIGKILL, on purpose."""
        self.killed.add(worker.pid)
        worker.kill()

    def replace_dead(self) -> None:
        """Start a worker for each that has died."""
        for worker in [worker for worker in self.workers if not worker.alive]:
            self.workers.remove(worker)
            # Who finds no broker says so and ends, as often as it is started while the broker is away: nobody's fault.
            if worker.pid not in self.killed and not worker.says(_NO_BROKER):
                self.ended.append(worker)
            self._start()

    async def keep(self) -> None:
        """`replace_dead`, for ever."""
        while True:
            self.replace_dead()
            await asyncio.sleep(0.2)  # a death has no event here: the processes are not children of the loop

    async def end(self) -> list[int | None]:
        """SIGTERM to all; their exit codes."""
        return await asyncio.gather(*(worker.end() for worker in self.workers))

    def kill_all(self) -> None:
        """Whatever is left."""
        for worker in self.workers:
            if worker.alive:
                worker.signal(signal.SIGKILL)
                worker.kill()
