"""The demo's processes end with it: asked, by themselves, and when the demo is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from headrace.demo.children import Children

SLEEPER = [
    sys.executable,
    "-c",
    "import subprocess, time; subprocess.Popen(['sleep', '600']); print('up', flush=True); time.sleep(600)",
]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)",
]


def wait_for(what, seconds: float = 20.0):
    until = time.monotonic() + seconds
    while not (value := what()):
        assert time.monotonic() < until, "did not happen in time"
        time.sleep(0.02)
    return value


def descendants(pid: int, count: int) -> list[psutil.Process]:
    """All processes under a process, once there are so many of them."""
    return wait_for(lambda: found if len(found := psutil.Process(pid).children(recursive=True)) >= count else None)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_leaving_ends_the_children_and_what_they_started(tmp_path: Path):
    others = set(psutil.Process().children(recursive=True))  # the broker of the whole test run, for one
    with Children(tmp_path / "logs") as children:
        child = children.start("a child", SLEEPER, os.environ)
        wait_for(lambda: "up" in child.log.read_text())
        # Supervisor, the child, and the child's own child, which nobody told to end.
        processes = [p for p in descendants(os.getpid(), len(others) + 3) if p not in others]
        assert len(alive(processes)) >= 3
    # Killed it is; the kernel takes a moment to take it away.
    assert psutil.wait_procs(processes, timeout=10)[1] == []
    assert child.ended.result() == 128 + signal.SIGTERM


def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headrace.demo.children.GRACE_S", 0.3)
    with Children(tmp_path) as children:
        child = children.start("stubborn", STUBBORN, os.environ)
        wait_for(lambda: "up" in child.log.read_text())
    assert child.ended.result() == 128 + signal.SIGKILL


def test_a_child_that_ends_by_itself_is_reported_with_its_last_words(tmp_path: Path):
    with Children(tmp_path) as children:
        child = children.start("the worker", [sys.executable, "-c", "raise SystemExit('no disk today')"], os.environ)
        assert child.ended.result(timeout=20) == 1
        message = str(child.failure())
    assert "the worker ended with status 1" in message
    assert "no disk today" in message
    assert str(tmp_path / "the-worker.log") in message


def test_killing_the_parent_leaves_no_child(tmp_path: Path):
    program = f"""
import os, sys, time
from pathlib import Path
from headrace.demo.children import Children
with Children(Path({str(tmp_path)!r})) as children:
    child = children.start("child", {STUBBORN!r}, os.environ)
    time.sleep(600)
"""
    program = program.replace("signal.signal(signal.SIGTERM, signal.SIG_IGN); ", "")
    parent = subprocess.Popen([sys.executable, "-c", program])
    processes = descendants(parent.pid, 2)
    parent.kill()
    parent.wait()
    wait_for(lambda: not alive(processes))
