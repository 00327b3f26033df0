"""Imports that take seconds, without the garbage collector: modules are objects that stay, and there is nothing among them to collect.

Measured: a rank process spent 6.3 s of processor time on torch, deepspeed and transformers, and 5.1 s without the collector looking
through them again and again. Guarantees: the collector is as it was afterwards, whatever is raised. Limitations: it is for imports
only, since garbage stays until the end of the block.

Memory that a process gives back is kept for what it needs next, instead of going back to the system.

A reader of large records takes and gives back megabytes for each. glibc returns them to the system at once, and to take pages again (each
is cleared) costs nearly as much as to decompress what goes into them: 0.9 of 2.3 ms for a group of 1.5 MB.

Guarantees: changes nothing but speed; does nothing where the C library is not glibc, or the process that started the process
has set these bounds (`MALLOC_TRIM_THRESHOLD_`, …). Limitations: up to `KEPT_BYTES` of memory that are free and still the process's, and
glibc's own adjusting of the bounds.
"""

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """No garbage collection inside the block."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


KEPT_BYTES = 64 << 20
_MAPPED_ALONE = 32 << 20
"""The largest that glibc allows: what is larger is mapped for itself, and given back at once."""
_GROWTH = 4 << 20
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # of malloc.h


def keep_memory() -> bool:
    """From now on; whether it could be done."""
    if any(f"MALLOC_{name}_" in os.environ for name in ("TRIM_THRESHOLD", "TOP_PAD", "MMAP_THRESHOLD")):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # no such function; on Windows not even such a call
        return False
    bounds = ((_TRIM_THRESHOLD, KEPT_BYTES), (_TOP_PAD, _GROWTH), (_MMAP_THRESHOLD, _MAPPED_ALONE))
    done = [mallopt(name, value) for name, value in bounds]
    return all(done)
