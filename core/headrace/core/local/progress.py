"""Telling the person at the terminal what a first start is doing; all of it goes to stderr.

A terminal gets a progress bar, anything else one plain line at the start and one at the end.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn


def say(line: str) -> None:
    """One plain line to stderr."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


class DownloadProgress:
    """Progress over all files of one download, by bytes.

    Args:
        label: What is downloaded, for people.
        files: Number of files.
        size: Bytes of all files together.
    """

    def __init__(self, label: str, *, files: int, size: int) -> None:
        self._label = label
        self._line = f"Downloading {label} ({files} files, {size / 1e6:.0f} MB; only the first time)"
        console = Console(stderr=True)
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self._bar = Progress(*columns, console=console, transient=True)
            self._task = self._bar.add_task(self._line, total=size)

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        if self._bar is None:
            say(self._line)
        else:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
        if error is None:
            say(f"Downloaded {self._label} in {time.monotonic() - self._began:.0f} s")

    @contextmanager
    def file(self, _name: str, _size: int) -> Iterator[Callable[[int], None]]:
        """Hook of jgo: yields the function that counts the bytes of one file (several run at once)."""
        yield self._advance

    def _advance(self, size: int) -> None:
        if self._bar is not None:
            self._bar.advance(self._task, size)
