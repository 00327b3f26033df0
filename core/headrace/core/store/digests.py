"""SHA-256 on the way: of chunks as they pass, of files as they lie. A wrong digest raises, and leaves no file."""

import hashlib
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from headrace.core.store.errors import DigestMismatchError, plain_os_error
from headrace.core.store.keys import TEMPORARY_PREFIX

CHUNK_BYTES = 1024 * 1024


class Tally:
    """Size and digest of the chunks that have passed."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self.size = 0
        """Bytes."""

    def passing(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """The same chunks, counted."""
        for chunk in chunks:
            self._hash.update(chunk)
            self.size += len(chunk)
            yield chunk

    @property
    def sha256(self) -> str:
        """Hex."""
        return self._hash.hexdigest()


def sha256_of_bytes(data: bytes) -> str:
    """Hex."""
    return hashlib.sha256(data).hexdigest()


def sha256_of_file(path: Path) -> str:
    """Hex. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_chunks(path: Path) -> Iterator[bytes]:
    """The content of a file."""
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def check(what: str, found: str, expected: str | None) -> None:
    """Raise `DigestMismatchError` unless nothing is expected or it is found."""
    if expected is not None and found != expected:
        raise DigestMismatchError(f"{what} has SHA-256 {found}, it must be {expected}: it was changed or is not whole")


def verified(chunks: Iterable[bytes], what: str, sha256: str | None) -> Iterator[bytes]:
    """The same chunks; raises after the last one if their digest is not the expected one."""
    tally = Tally()
    yield from tally.passing(chunks)
    check(what, tally.sha256, sha256)


def write_verified(path: Path, fill: Callable[[Path], None], what: str, sha256: str | None) -> tuple[int, str]:
    """Let `fill` write a file, check what lies on the disk, then move it to `path`; returns (size, digest)."""
    partial = path.with_name(f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}")  # no object of a folder has such a name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fill(partial)
        found = sha256_of_file(partial)
        check(what, found, sha256)
        size = partial.stat().st_size
        partial.replace(path)
    except OSError as error:
        raise plain_os_error(error, f"{path} (from {what})") from error
    finally:
        partial.unlink(missing_ok=True)
    return size, found
