"""The process that ends a service with its parent, tried with programs that are quicker to start than Kafka."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from headrace.core.local import supervisor

PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-I", "-S", sys.argv[1], str(os.getpid()), "5", "sleep", "60"],
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
print(child.pid, child.stdout.readline().decode().strip(), flush=True)
if sys.argv[2] == "fork" and os.fork() == 0:  # a child without exec: it holds the pipe open
    import signal; signal.pause()
if sys.argv[2] == "fork":
    os.write(1, b"forked\\n")
sys.stdin.read()
"""


@contextmanager
def supervised(*command: str, grace_s: float = 5.0) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", supervisor.__file__, str(os.getpid()), str(grace_s), *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(*pids: int, within_s: float) -> float:
    """Seconds until none of the processes runs; they are not our children, so there is nothing to wait on but time."""
    began = time.monotonic()
    while any(map(is_running, pids)):
        assert time.monotonic() - began < within_s, f"still running: {[pid for pid in pids if is_running(pid)]}"
        time.sleep(0.01)
    return time.monotonic() - began


def test_the_childs_exit_status_is_passed_on() -> None:
    with supervised("sh", "-c", "exit 7") as (process, _):
        assert process.wait(5) == 7


def test_a_childs_death_by_signal_is_told_as_the_shell_does() -> None:
    with supervised("sleep", "60") as (process, pid):
        os.kill(pid, signal.SIGKILL)
        assert process.wait(5) == 128 + signal.SIGKILL


def test_closing_the_pipe_ends_the_child() -> None:
    with supervised("sleep", "60") as (process, pid):
        process.stdin.close()
        assert process.wait(5) == 128 + signal.SIGTERM
        assert not is_running(pid)


def test_a_child_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    fifo = tmp_path / "trap-is-set"
    os.mkfifo(fifo)
    with supervised("sh", "-c", f"trap '' TERM; echo > {fifo}; while true; do sleep 0.1; done", grace_s=0.3) as (process, pid):
        fifo.read_text()  # returns when the child has written
        process.stdin.close()
        assert process.wait(5) == 128 + signal.SIGKILL
        assert not is_running(pid)


@pytest.mark.parametrize("how", ["plain", "fork"])
def test_sigkill_of_the_parent_ends_the_child_also_when_a_forked_process_holds_the_pipe(how: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, supervisor.__file__, how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    with parent:
        supervising, child = map(int, parent.stdout.readline().split())
        if how == "fork":
            assert parent.stdout.readline() == b"forked\n"
        assert is_running(child)
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait(5)
        try:
            wait_until_gone(child, supervising, within_s=5)
        finally:
            if how == "fork":
                os.killpg(parent.pid, signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_sigkill_of_the_supervisor_itself_ends_the_child() -> None:
    with supervised("sleep", "60") as (process, pid):
        process.kill()
        process.wait(5)
        wait_until_gone(pid, within_s=5)


def test_a_program_that_does_not_exist_is_named() -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", supervisor.__file__, str(os.getpid()), "5", "/no/such/java"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 127
    assert done.stderr == "cannot run /no/such/java: No such file or directory\n"
