"""A worker's local folder: its own, even if other workers use the same parent folder.

A worker holds a lock on its folder until its process ends. A folder without a lock is left from a killed worker, and the next worker that
starts deletes it. Guarantees: no folder of a living worker is deleted, even of one in another container that sees other process ids.
Limitations: on a file system without locks nothing is deleted.
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

    Raises:
        HeadraceError: no folder can be made there.
    """

    def __init__(self, parent: Path) -> None:
        try:
            self.path, self._held = _made(parent)
        except OSError as error:
            raise plain_os_error(error, f"the worker's folder in {parent} (worker.work_dir)") from error

    def remove(self) -> None:
        """Delete the folder, and release its lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._held)


def _made(parent: Path) -> tuple[Path, int]:
    """A new folder, and the descriptor that locks it."""
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
    """A descriptor that locks the folder; None if another process does, or if it does not exist any more."""
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
        logger.warning("%s can't be locked (%s): folders of killed workers stay there", folder, error.strerror)
    with contextlib.suppress(FileNotFoundError):
        # Another worker may have deleted the folder between the two calls.
        if os.path.samestat(folder.stat(), os.fstat(descriptor)):
            return descriptor
    os.close(descriptor)
    return None
