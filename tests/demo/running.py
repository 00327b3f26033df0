"""The demo as its user runs it: a process, its output as it comes, and every process under it by pid."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil


class RunningDemo:
    """`headrace demo` in a process of its own.

    Args:
        arguments: After `headrace demo`.
        tmp: Becomes TMPDIR, so that what a run leaves on disk shows; and the figure's folder.
    """

    def __init__(self, *arguments: str, tmp: Path) -> None:
        self.files = tmp / "files"
        self.files.mkdir()
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "headrace.cli", "demo", "--out", str(tmp / "out"), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "TMPDIR": str(self.files), "COLUMNS": "160"},
            start_new_session=True,
        )
        self.output: list[str] = []
        self.seen: dict[int, psutil.Process] = {}
        self._news: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def wait_for_line(self, part: str, seconds: float = 150.0) -> None:
        """Until a line with this part is printed."""
        until = time.monotonic() + seconds
        while True:
            line = self._news.get(timeout=max(0.1, until - time.monotonic()))
            assert line is not None, f"the demo ended before it said {part!r}:\n{''.join(self.output)}"
            if part in line:
                return

    def look(self) -> list[psutil.Process]:
        """All processes under the demo now; remembered for `survivors`."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        self.seen |= {process.pid: process for process in found}
        return found

    def find(self, module: str, seconds: float = 20.0) -> psutil.Process:
        """A process under the demo that runs this module itself (not its supervisor), once there is one."""
        until = time.monotonic() + seconds
        while True:
            for process in self.look():
                with contextlib.suppress(psutil.NoSuchProcess):
                    words = process.cmdline()
                    if module in words and not any(word.endswith("supervisor.py") for word in words):
                        return process
            assert time.monotonic() < until, f"no process runs {module}"
            time.sleep(0.02)

    def send(self, number: signal.Signals) -> None:
        """A signal to the demo's own process alone."""
        self.look()
        self.process.send_signal(number)

    def end(self, seconds: float = 170.0) -> int:
        """Wait for its end; returns the exit status."""
        return self.process.wait(seconds)

    def survivors(self, seconds: float) -> list[str]:
        """Processes seen under the demo that still live after so many seconds."""
        until = time.monotonic() + seconds
        while True:
            alive = [p for p in self.seen.values() if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
            if not alive or time.monotonic() > until:
                return [f"{p.pid} {' '.join(p.cmdline())}" for p in alive]
            time.sleep(0.05)

    def numbers(self) -> dict[str, float]:
        """The JSON object of the last line."""
        return json.loads(self.output[-1])

    def close(self) -> None:
        """Whatever the test came to: nothing is left."""
        self.process.kill()
        for process in self.seen.values():
            if process.is_running():
                process.kill()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)
            self._news.put(line)
        self._news.put(None)
