"""A Java service as a child process that cannot outlive this one.

Guarantees: `stop` returns when Java has exited; when this process ends in any way, Java gets SIGTERM at once (see
`supervisor`). The service runs in a session of its own, so Ctrl-C in the terminal reaches this process alone.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from headrace.core.local import supervisor
from headrace.core.local.errors import LocalServiceError

GRACE_S = 10.0
"""Seconds between SIGTERM and SIGKILL; Kafka needs 0.4 s."""


@contextlib.contextmanager
def deferred_signals() -> Iterator[None]:
    """Handlers of SIGINT and SIGTERM run at the end of the block: what it starts is then known, and can be stopped.

    (An interrupt inside of `subprocess.Popen` leaves a process that has no handle.)
    """
    if threading.current_thread() is not threading.main_thread():  # handlers run in the main thread alone
        yield
        return
    arrived: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in handlers:
        signal.signal(number, lambda received, _frame: arrived.append(received))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if arrived:
            signal.raise_signal(arrived[0])


class JavaProcess:
    """A running Java program.

    Args:
        java: The `java` program.
        arguments: JVM options, main class and its arguments.
        jars: Class path.
        output: File that takes what the program prints; emptied first.
        lock: Open file whose lock lives as long as the program; this process' copy is for the caller to close.

    Raises:
        LocalServiceError: the program could not be run.
    """

    def __init__(self, java: Path, arguments: Sequence[str], *, jars: Sequence[Path], output: Path, lock: IO[str]) -> None:
        command = [sys.executable, "-I", "-S", supervisor.__file__, str(os.getpid()), str(GRACE_S), str(java), *arguments]
        supervised: subprocess.Popen[bytes] | None = None
        try:
            with output.open("wb") as out, deferred_signals():
                supervised = self._supervisor = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=out,
                    env=java_environment(jars),
                    pass_fds=[lock.fileno()],
                    start_new_session=True,
                )
            # Its line comes once Java is started; an empty answer means it could not be.
            assert self._supervisor.stdout is not None  # noqa: S101  (narrows the type: it was asked for as a pipe)
            line = self._supervisor.stdout.readline()
        except BaseException:  # an interrupt: no one else knows of the process yet
            if supervised is not None:
                self.stop()
            raise
        if not line:
            self._supervisor.communicate()
            raise LocalServiceError(output.read_text(errors="replace").strip() or f"{java} could not be started")
        self.pid = int(line)
        """Process id of Java itself."""

    def poll(self) -> int | None:
        """Java's exit status once it ended (128 + number for a signal), else None."""
        return self._supervisor.poll()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for Java to end and give its exit status.

        Raises:
            TimeoutError: it still runs after `timeout` seconds.
        """
        try:
            return self._supervisor.wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"Java process {self.pid} still runs after {timeout} s") from error

    def stop(self) -> None:
        """SIGTERM, SIGKILL after the grace; returns when it is gone. Safe to call again."""
        pipe, answers = self._supervisor.stdin, self._supervisor.stdout
        assert pipe is not None  # noqa: S101  (narrows the type)
        assert answers is not None  # noqa: S101  (narrows the type)
        with contextlib.suppress(BrokenPipeError, ValueError):  # it ended by itself; it was stopped before
            pipe.write(b"stop")  # the closing alone would not do: a child forked by this process may hold the pipe open
            pipe.close()
        self._supervisor.wait()
        answers.close()


def run_java(command: Sequence[str], *, jars: Sequence[Path], timeout_s: float) -> tuple[int, str]:
    """Run a Java program to its end; returns its exit status and what it printed. Whatever ends the call, the program has ended before.

    (`subprocess.run` waits a quarter of a second for it after an interrupt, and no longer.)

    Raises:
        subprocess.TimeoutExpired: it took longer, and was killed.
    """
    child: subprocess.Popen[str] | None = None
    try:
        with deferred_signals():
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=java_environment(jars))
        printed, _ = child.communicate(timeout=timeout_s)
    except BaseException:
        if child is not None:
            child.kill()
            child.wait()
        raise
    return child.returncode, printed


def java_environment(jars: Sequence[Path]) -> dict[str, str]:
    """This process' environment with the class path in it, which keeps 150 file names out of the process list."""
    return {**os.environ, "CLASSPATH": os.pathsep.join(map(str, jars))}


def tail(*files: Path, lines: int = 15) -> str:
    """The last lines of the files, for an error message."""
    texts = [file.read_text(errors="replace").strip().splitlines() for file in files if file.exists()]
    return "\n".join(f"  {line}" for text in texts for line in text[-lines:])
