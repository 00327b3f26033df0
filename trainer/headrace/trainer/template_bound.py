"""A bound on what one rendering of a chat template may use. A template is a program that came with a model, and may not end.

Guarantees: Python code inside the block that used up its processor time raises `TemplateBoundError`; on Linux an allocation above the
bound raises `MemoryError`. Processor time, not wall time, so that a busy machine refuses nothing that an idle one takes.
Limitations: one operation in C that continues for ever (`10**10**10`); the process that admits records has a bound of its own, which ends
it. No bound outside of the main thread, where Python allows no signal handler.
"""

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_STATM = Path("/proc/self/statm")
_AGAIN_SECONDS = 0.1


class TemplateBoundError(Exception):
    """The template used up its processor time."""


@contextmanager
def bounded(seconds: float, extra_bytes: int) -> Iterator[None]:
    """Bound the block to so many seconds of this process's user time, and so many bytes beyond what it has mapped.

    Raises:
        TemplateBoundError: the time is over.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise TemplateBoundError(f"it used more than {seconds:g} s of processor time")

    former = signal.signal(signal.SIGVTALRM, stop)
    try:
        with _bounded_memory(extra_bytes):
            try:
                # Again and again: an exception inside a destructor is swallowed.
                signal.setitimer(signal.ITIMER_VIRTUAL, seconds, _AGAIN_SECONDS)
                yield
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    finally:
        signal.signal(signal.SIGVTALRM, former)


@contextmanager
def _bounded_memory(extra_bytes: int) -> Iterator[None]:
    if not _STATM.exists():
        yield
        return
    mapped = int(_STATM.read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    allowed = mapped + extra_bytes
    if soft != resource.RLIM_INFINITY:
        allowed = min(allowed, soft)
    resource.setrlimit(resource.RLIMIT_AS, (allowed, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
