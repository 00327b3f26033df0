"""The demo's other processes: started under the local services' supervisor, ended together, none left behind.

Guarantees: a child ends with this process, however that ends (see `headrace.core.local.supervisor`); `stop` returns when the children
and all that they started are gone; what a child prints is in its log file. Ctrl-C in the terminal reaches this process alone (each child
has a session of its own), so it is this process that decides in which order things end.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Self

from headrace.core.errors import HeadraceError
from headrace.core.local import supervisor
from headrace.core.local.process import deferred_signals, tail
from headrace.core.processes import make_private_folder

GRACE_S = 10
"""Seconds between SIGTERM and SIGKILL."""


class ChildEndedError(HeadraceError):
    """A process of the demo ended before the demo did; says which, how, and its last words."""


class Child:
    """A running process.

    Args:
        name: For people, and the log file's name.
        command: Program and arguments.
        environment: All of its environment.
        log: File that takes what it prints.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.log = log
        with log.open("wb") as out:
            self._supervisor = subprocess.Popen(  # noqa: S603 - our own commands
                [sys.executable, "-I", "-S", supervisor.__file__, str(os.getpid()), str(GRACE_S), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=out,
                env=dict(environment),
                start_new_session=True,
            )
        self.ended: Future[int] = Future()
        """The exit status, once the process and all of its session are gone."""
        self.ended.set_running_or_notify_cancel()  # a task that stops waiting for it must not cancel it
        threading.Thread(target=self._watch, name=f"demo-{name}", daemon=True).start()

    def ask_to_stop(self) -> None:
        """SIGTERM, SIGKILL after the grace; returns at once. Safe to call again."""
        pipe = self._supervisor.stdin
        with contextlib.suppress(BrokenPipeError, ValueError):  # it ended by itself; it was asked before
            if pipe is not None:
                pipe.write(b"stop")
                pipe.close()

    def failure(self) -> ChildEndedError:
        """The error to raise when it ended and should not have."""
        status = self.ended.result()
        how = f"was ended by signal {status - 128}" if status > 128 else f"ended with status {status}"
        return ChildEndedError(f"{self.name} {how}; its last words, from {self.log}:\n{tail(self.log)}")

    def _watch(self) -> None:
        pid = self._supervisor.pid
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        # Not reaped yet, so the session's number can't be anybody else's: what the child left behind goes now.
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says EPERM when only the dead are left
            os.killpg(pid, signal.SIGKILL)
        self.ended.set_result(self._supervisor.wait())


class Children:
    """The processes of one run, as a context manager that leaves none behind.

    Args:
        logs: Folder for their log files; made if missing.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._children: list[Child] = []

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> Child:
        """Start a process."""
        make_private_folder(self._logs)
        with deferred_signals():
            child = Child(name, command, environment, self._logs / f"{name.replace(' ', '-')}.log")
            self._children.append(child)
        return child

    def stop(self) -> None:
        """End all at the same time and wait until they are gone."""
        for child in self._children:
            child.ask_to_stop()
        for child in self._children:
            child.ended.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
