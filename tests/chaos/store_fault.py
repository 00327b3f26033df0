"""A file store that fills up or becomes read-only, as a run's processes see it: root heeds no permissions, and not every machine mounts.

While the file `SWITCH` next to the store names an error, each call of a worker that would write below the store fails with it, and reads
succeed. Python's audit events show these calls, whatever code makes them. Limitations: the calls fail at their beginning;
tests/core/test_store_files.py has a write that fails in the middle of a file.
"""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SWITCH = "store-fault"
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_MAKES = {"os.mkdir", "os.link"}
_CHANGES = {"os.remove", "os.rename", "os.rmdir", "os.truncate"}


@contextmanager
def failing(store: Path, error: int) -> Iterator[None]:
    """Let all writes below a store fail with this error, in all workers of the run."""
    switch = store.parent / SWITCH
    switch.with_suffix(".new").write_text(str(error))
    switch.with_suffix(".new").replace(switch)
    try:
        yield
    finally:
        switch.unlink()


def install(store: Path) -> None:
    """Obey the switch in this process, from now on."""
    switch, below = str(store.parent / SWITCH), f"{store}{os.sep}"

    def hook(event: str, args: tuple[object, ...]) -> None:
        opens = event == "open" and isinstance(args[2], int) and bool(args[2] & _WRITES)
        writes = opens or event in _MAKES or event in _CHANGES
        path = os.fspath(args[0]) if writes and isinstance(args[0], str | os.PathLike) else None
        if not isinstance(path, str) or not path.startswith(below):
            return
        try:
            with open(switch) as file:  # noqa: PTH123 - in a hook of all calls, the shortest one
                error = int(file.read())
        except FileNotFoundError:
            return
        if event not in _CHANGES or error == errno.EROFS:  # a full disk lets files go
            raise OSError(error, os.strerror(error), path)

    sys.addaudithook(hook)
