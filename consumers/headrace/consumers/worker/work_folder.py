"""A worker's local folder: its own, whatever other workers share the folder above it.

A worker holds a lock on its folder as long as it lives, however it ends; a folder that nobody holds is what a killed worker left, and the
next one to start clears it away. Guarantees: no folder of a living worker is touched, also of one in another container that sees other
process ids. Gives up: clearing where a file system has no locks; folders stay there.
"""

import contextlib
import errno
import fcntl
import itertools
import logging
import os
import re
import shutil
from pathlib import Path

from headrace.core.processes import make_private_folder
from headrace.core.store.interface import plain_os_error

logger = logging.getLogger(__name__)

_NAME = re.compile(r"worker-\d+(-\d+)?")


class WorkFolder:
    """A new, empty folder `worker-<pid>` in `parent`; `worker-<pid>-2` where another container's worker has that number.

    Args:
        parent: `worker.work_dir`; is made.

    Raises:
        HeadraceError: no folder can be made there.
    """

    def __init__(self, parent: Path) -> None:
        try:
            self.path, self._held = _made(parent)
        except OSError as error:
            raise plain_os_error(error, f"the worker's folder in {parent} (worker.work_dir)") from error

    def remove(self) -> None:
        """Delete the folder, and let go of it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._held)


def _made(parent: Path) -> tuple[Path, int]:
    """A new folder, and the descriptor that holds it."""
    make_private_folder(parent)
    for folder in parent.iterdir():
        if _NAME.fullmatch(folder.name):
            _clear_if_dead(folder)
    for number in itertools.count(1):
        path = parent / (f"worker-{os.getpid()}" + (f"-{number}" if number > 1 else ""))
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
            held = _hold(path)
            if held is not None:
                return path, held
    raise AssertionError("there is always another number")


def _clear_if_dead(folder: Path) -> None:
    held = _hold(folder, needs_lock=True)
    if held is not None:
        logger.info("%s is cleared: its worker was killed", folder)
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def _hold(folder: Path, *, needs_lock: bool = False) -> int | None:
    """A descriptor that holds the folder; None where another does, or where it is gone."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if needs_lock or error.errno in {errno.EWOULDBLOCK, errno.EACCES}:
            os.close(descriptor)
            return None
        logger.warning("%s can't be locked (%s): what killed workers leave there stays", folder, error.strerror)
    with contextlib.suppress(FileNotFoundError):
        # Cleared away between the two calls, it is another folder now, or none.
        if os.path.samestat(folder.stat(), os.fstat(descriptor)):
            return descriptor
    os.close(descriptor)
    return None
