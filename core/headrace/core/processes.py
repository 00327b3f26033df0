"""Other processes: a child that ends with its parent, how much memory it may take, its name in `ps` and `top`, and whether one runs.

Guarantees of `die_with`: on Linux the kernel kills the child at once, also in the middle of a computation. Limitations: elsewhere it ends
at its next read of a pipe from the parent; and on Linux "the parent" is the thread that started the child: start it from one that lives
as long as the process.

Folders for data: only the user of the process can enter them.

Guarantees: each folder that `make_private_folder` creates, missing parents too, has mode 700. A folder that exists keeps its mode: an
operator can open one on purpose.
"""

import contextlib
import ctypes
import os
import resource
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def die_with(parent: int) -> None:
    """End this process when the process with pid `parent`, which started it, ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the call
            os._exit(1)


def name_process(name: str) -> None:
    """Give this process a name of at most 15 characters that `ps`, `top` and the kernel's log show; on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15])


def runs(pid: int) -> bool:
    """Whether there is such a process (or another one that has its number by now)."""
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def bound_memory(share: float) -> None:
    """Let this process have so much of the machine's memory at most, and let the kernel end it before others where memory is short.

    Beyond the bound Python raises `MemoryError`. A process with a lower limit keeps it.
    """
    most = int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * share)
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    if all(limit == resource.RLIM_INFINITY or limit > most for limit in limits):
        resource.setrlimit(resource.RLIMIT_DATA, (most, limits[1]))
    with contextlib.suppress(OSError):  # not Linux
        Path("/proc/self/oom_score_adj").write_text("500", encoding="ascii")


_OWNER_ALONE = 0o700


def make_private_folder(folder: Path) -> None:
    """Create the folder and its missing parents; an existing folder stays as it is.

    Raises:
        OSError: it can't be created, or something else has its name.
    """
    try:
        folder.mkdir(mode=_OWNER_ALONE)
    except FileNotFoundError:
        make_private_folder(folder.parent)
        folder.mkdir(mode=_OWNER_ALONE, exist_ok=True)
    except FileExistsError:
        if not folder.is_dir():
            raise
