"""The folder of one local service: its lock, and a note of where the service is.

Guarantees: one service a folder. The lock (flock) is held by the service's own processes, so it is free exactly when
the last of them is gone, whatever killed whom; a lock file left lying about means nothing.
Limitations: network file systems without flock.
"""

import fcntl
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from headrace.core.local.errors import LocalServiceError
from headrace.core.processes import make_private_folder, runs

DYING_S = 15.0
"""How long to wait for a service whose owner is gone: it is on its way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceNote:
    """What `service.json` in the folder says about the service, running or not."""

    address: str
    """Where clients find it: bootstrap servers, or an endpoint URL."""
    ports: list[int]
    """Its ports; a restart takes them again if they are free."""
    pid: int = 0
    """Java's process id; 0 before its first start."""
    owner_pid: int = 0
    """The process that started it and that it ends with."""


class ServiceFolder:
    """A service's folder.

    Args:
        path: The folder; made if missing.
        label: Name of the service for people.

    Raises:
        LocalServiceError: the folder cannot be made or written.
    """

    def __init__(self, path: Path, label: str) -> None:
        self.path = path.absolute()
        self.data = self.path / "data"
        """What the service keeps."""
        self.log_file = self.path / "server.log"
        """Its log; older ones lie next to it."""
        self.output_file = self.path / "server.out"
        """What it printed since its start; of interest when it did not come up."""
        self._label = label
        try:
            make_private_folder(self.path)
            (self.path / "lock").touch()
        except OSError as error:
            raise LocalServiceError(f"the data folder {self.path} cannot be written: {error.strerror}. Name another data folder") from error

    def lock(self) -> IO[str]:
        """Take the folder; hand the open file to the service and close it.

        Raises:
            LocalServiceError: a service runs on this folder; says where.
        """
        file = (self.path / "lock").open("w")
        until = time.monotonic() + DYING_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                note = self.note()
                if note is None or runs(note.owner_pid) or time.monotonic() > until:
                    file.close()
                    raise LocalServiceError(self._taken(note)) from None
                time.sleep(0.05)  # flock has no wait with a time limit
            else:
                return file

    def _taken(self, note: ServiceNote | None) -> str:
        if note is None or not note.pid:
            return f"another process is starting {self._label} on the folder {self.path}; wait for it, or name another data folder"
        return (
            f"{self._label} already runs on the folder {self.path}: at {note.address} (Java process {note.pid}, "
            f"started by process {note.owner_pid}). Use it there, stop that process, or name another data folder"
        )

    def note(self) -> ServiceNote | None:
        """What is known of the service; None if it was never started here."""
        try:
            return ServiceNote(**json.loads((self.path / "service.json").read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise LocalServiceError(f"{self.path / 'service.json'} is damaged ({error}); delete that file") from error

    def write_note(self, note: ServiceNote) -> None:
        """Replace the note as a whole."""
        self.write("service.json", json.dumps(asdict(note)))

    def write(self, name: str, text: str) -> Path:
        """Write a file of the folder so that only its owner reads it, replacing it as a whole.

        Raises:
            LocalServiceError: no space, no right.
        """
        path = self.path / name
        new = path.with_name(f"{name}.new")
        try:
            new.touch(mode=0o600)
            new.write_text(text, encoding="utf-8")
            new.replace(path)
        except OSError as error:
            raise LocalServiceError(f"cannot write {path}: {error.strerror}") from error
        return path
