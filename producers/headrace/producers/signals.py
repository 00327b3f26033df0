"""SIGTERM: flush what the producers of this process hold, then let the signal do what it would have done.

Guarantees: the host's handler is not lost. It (or the default, which ends the process) gets the same signal when the flush is
done; a host that ignores SIGTERM continues ignoring it. The main thread is never blocked: the flush runs on the producers' own loops,
and a thread waits for it. Limitations: handlers that a host installs later (they replace ours); groups sent after the signal.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from types import FrameType

Flush = Callable[[], "Future[None]"]
"""Starts a flush on the producer's loop, from any thread."""

_REPEAT_SECONDS = 0.05


class _Termination:
    """The one handler of the process, and who wants to be flushed."""

    def __init__(self) -> None:
        self._flushes: list[Flush] = []
        self._previous: Callable[[int, FrameType | None], object] | int | None = None
        self._installed = False
        self._flushed = False
        self._repeated = threading.Event()

    def add(self, flush: Flush, *, replace: bool) -> bool:
        """Register; install the handler where there is none (or in front of one, if asked). False if the host keeps SIGTERM."""
        if not self._installed:
            if threading.current_thread() is not threading.main_thread():
                return False  # Python allows handlers from the main thread only
            current = signal.getsignal(signal.SIGTERM)
            if current is None or (current is not signal.SIG_DFL and not replace):
                return False
            self._previous = signal.signal(signal.SIGTERM, self._on_signal)
            self._installed, self._flushed = True, False
            self._repeated.clear()
        self._flushes.append(flush)
        return True

    def remove(self, flush: Flush) -> None:
        """Forget a producer that is closed; the last one takes the handler away."""
        with contextlib.suppress(ValueError):
            self._flushes.remove(flush)
        if not self._flushes and self._installed and threading.current_thread() is threading.main_thread():
            self._restore()

    def _restore(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, self._previous)
        self._installed = False

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._flushed or not self._flushes:
            self._repeated.set()
            previous = self._previous
            self._restore()
            # Called, not signalled: a signal from inside its own handler may stay pending while the main thread is in a system call.
            if callable(previous):
                previous(signum, frame)
            else:
                os.kill(os.getpid(), signum)
            return
        started = [flush() for flush in self._flushes]
        threading.Thread(target=self._wait_and_repeat, args=(started, signum), name="headrace-sigterm", daemon=True).start()

    def _wait_and_repeat(self, started: "list[Future[None]]", signum: int) -> None:
        wait(started)
        self._flushed = True
        # To the main thread itself, which it wakes from a system call: only there may handlers be changed. Repeated, since a signal
        # that comes in the moment before a system call does not interrupt it.
        while not self._repeated.wait(_REPEAT_SECONDS):
            signal.pthread_kill(threading.main_thread().ident or 0, signum)


termination = _Termination()
