"""Programs that this process waits for, when the waiting is interrupted."""

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.core.local.process import JavaProcess, run_java


class InterruptedHere(BaseException):
    pass


@pytest.fixture
def interrupt() -> Iterator[None]:
    """Raises in this thread a moment after the test has begun, as Ctrl-C does."""

    def stop(_number: int, _frame: object) -> None:
        raise InterruptedHere

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def programs_that_sleep() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if "61.25" in p.cmdline() and p.status() != psutil.STATUS_ZOMBIE]


def test_an_interrupt_while_a_program_runs_ends_it_first(interrupt: None) -> None:
    with pytest.raises(InterruptedHere):
        run_java(["sleep", "61.25"], jars=[], timeout_s=60)
    assert not programs_that_sleep()


def test_an_interrupt_before_java_has_told_its_number_ends_it_first(interrupt: None, tmp_path: Path) -> None:
    # A supervisor that never tells: it waits for a program file that is a pipe nobody writes.
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nread wait\n", encoding="utf-8")
    slow.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch, (tmp_path / "lock").open("w") as lock:
        patch.setattr("sys.executable", str(slow))
        with pytest.raises(InterruptedHere):
            JavaProcess(Path("java"), ["61.25"], jars=[], output=tmp_path / "out", lock=lock)
    assert not programs_that_sleep()


def test_an_interrupt_while_a_program_is_being_started_ends_it_first(monkeypatch: pytest.MonkeyPatch) -> None:
    start = subprocess.Popen

    def interrupted(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
        program = start(*arguments, **options)
        signal.raise_signal(signal.SIGTERM)  # the program runs, and no one has its handle yet
        return program

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_java(["sleep", "61.25"], jars=[], timeout_s=60)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not programs_that_sleep()
