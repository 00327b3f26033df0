"""Workers without the seconds of their imports, so that a run can kill ten times as many in the same time.

One process imports what workers and ranks import (multiprocessing's fork server, with `preload` as its only module), and each worker is
forked from it; inside the worker, the rank and the tokenizing process are forked, too, where they are spawned otherwise. All that is left
out is importing: claims, recovery, loading of models and the transactions are those of `headrace worker`, which `main` runs. Linux only.
Limitations: a fork next to threads is not safe in general; what a rank inherits (sockets to Kafka, signal handlers) is taken from it first.
"""

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import threading
from multiprocessing.context import ForkServerProcess
from multiprocessing.process import BaseProcess
from pathlib import Path


def start(environment: dict[str, str], log: Path, sabotage: str | None) -> BaseProcess:
    """A worker process, in a session of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.chaos.preload"])
    process: ForkServerProcess = context.Process(target=_worker, args=(environment, str(log), sabotage), name="headrace-worker")
    process.start()
    return process


def _worker(environment: dict[str, str], log: str, sabotage: str | None) -> None:
    os.setsid()
    threading.Thread(target=_end_with_starter, name="starter", daemon=True).start()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.update(environment)
    logging.getLogger().handlers.clear()
    spawn_by_fork()
    from tests.chaos.worker_main import work  # noqa: PLC0415 - the preloading process has it

    work(sabotage)


def _end_with_starter() -> None:
    starter = multiprocessing.parent_process()
    assert starter is not None
    starter.join()
    os.kill(os.getpid(), signal.SIGKILL)


def spawn_by_fork() -> None:
    """From now on, this process' `spawn` context forks."""
    contexts = multiprocessing.get_context

    def get_context(method: str | None = None) -> object:
        return contexts("fork" if method == "spawn" else method)

    multiprocessing.get_context = get_context  # type: ignore[assignment]
    os.register_at_fork(after_in_child=_disinherit)


def _disinherit() -> None:
    """What a spawned child would not have: its parent's connections and signal handlers."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - numbers, no paths
        with contextlib.suppress(OSError):
            with socket.socket(fileno=os.dup(int(name))) as copy:
                tcp = copy.family == socket.AF_INET
            if tcp:
                os.close(int(name))
