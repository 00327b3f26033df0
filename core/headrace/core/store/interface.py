"""The interface of a store. `tests/core/test_store.py` is its contract, run against both implementations.

The errors of a store. Only `ObjectNotFoundError` and `DigestMismatchError` are final, and may refuse a group or stop a model (rule 13).

A store raises them only if it knows: it answered that there is no such object, or the object was read whole and has another digest.
Whatever else happens, known or not, is a `StoreUnavailableError`: an outage (`headrace.core.outages`), which is waited for.
"""

import errno
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

from headrace.core.errors import HeadraceError, OutageError

FOLDER_THREADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """What a store knows about an object."""

    key: str
    size: int
    """Bytes."""
    sha256: str | None
    """Hex; None where the store would have to read the object to tell."""
    modified: datetime | None = None
    """When it was stored, by the store's clock; `list` and `head` always say it, puts and gets never."""


class ObjectStore(Protocol):
    """Objects by key. Keys are `a/b/c`; see `keys.check_key`.

    Every method may raise `InvalidKeyError` and `StoreUnavailableError`. An object is there whole or not at all, and when a put
    returns it is durable. There is no overwriting: names are never used again.
    """

    def uri(self, key: str) -> str:
        """The URI of a key, for messages."""
        ...

    def resolve(self, uri: str) -> str:
        """The key of a URI of this store; any other URI raises `InvalidKeyError`."""
        ...

    def put_bytes_if_absent(self, key: str, data: bytes) -> StoredObject:
        """Store bytes under a free name. The same content under that name already is success; other content raises `ObjectExistsError`."""
        ...

    def put_file_if_absent(self, key: str, path: Path, *, sha256: str | None = None) -> StoredObject:
        """As `put_bytes_if_absent`, streamed from a file; with `sha256` the source must have it, else `DigestMismatchError`."""
        ...

    def put_stream_if_absent(self, key: str, chunks: Iterable[bytes], *, sha256: str | None = None) -> StoredObject:
        """As `put_file_if_absent`, from an iterator of bytes."""
        ...

    def put_folder_if_absent(
        self, files: Mapping[str, Path], last: Callable[[Sequence[StoredObject]], tuple[str, bytes]]
    ) -> Sequence[StoredObject]:
        """Several `put_file_if_absent` side by side, then one object more, which only appears when all of them are there.

        Args:
            files: Source by key.
            last: Key and content of the last object, from what was stored, in the order of `files`: the list of the others.
        """
        with ThreadPoolExecutor(FOLDER_THREADS, thread_name_prefix="headrace-store") as pool:
            stored = list(pool.map(lambda item: self.put_file_if_absent(*item), files.items()))
        self.put_bytes_if_absent(*last(stored))
        return stored

    def get_bytes(self, key: str, *, sha256: str | None = None) -> bytes:
        """The whole object. Raises `ObjectNotFoundError`, and `DigestMismatchError` where `sha256` is given."""
        ...

    def get_chunks(self, key: str, *, sha256: str | None = None) -> Iterator[bytes]:
        """The object in pieces. The digest is known at the end only: use nothing of it before the iterator has ended."""
        ...

    def get_file(self, key: str, path: Path, *, sha256: str | None = None) -> StoredObject:
        """The object as a file, which appears whole and checked or not at all; an older file there is replaced."""
        ...

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop` (excluded), fewer where the object ends before."""
        ...

    def head(self, key: str) -> StoredObject:
        """What is known of an object without reading it. Raises `ObjectNotFoundError`."""
        ...

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        """Objects whose key starts with `prefix` (a text, not a folder), in the order of their keys' UTF-8 bytes, page by page."""
        ...

    def delete(self, key: str) -> None:
        """Delete an object; a missing one is no error."""
        ...

    def sweep(self, prefix: str, before: datetime) -> int:
        """Remove what writers that were killed left unfinished below a prefix, where nothing was added since `before` (with a time zone).

        Returns how many there were. No object is touched: what is unfinished is none.
        """
        ...


class StoreError(HeadraceError):
    """Base of all errors of the object store."""


class InvalidKeyError(StoreError):
    """A key or URI that names nothing in this store; URIs come from messages, so this is said before anything is touched."""


class ObjectNotFoundError(StoreError):
    """The store answered: there is no such object."""


class ObjectExistsError(StoreError):
    """The name is taken by an object with other content. Nothing was changed."""


class DigestMismatchError(StoreError):
    """Content that differs from the SHA-256 it must have: changed, truncated, or too long."""


class StoreUnavailableError(StoreError, OutageError):
    """The store did not answer, or its answer is not whole or not understood: network, server error, permission. Trying later may help."""


class StoreMisconfiguredError(StoreUnavailableError):
    """No bucket, no folder, or refused credentials: it helps to correct the settings or the store, while waiting alone does not.

    At the start of a process this ends the process. Later it is an outage like any other: the settings worked before.
    """


class StoreFullError(StoreUnavailableError):
    """No space, or no quota, for the object. Nothing of it was left behind."""


_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def plain_os_error(error: OSError, where: str) -> StoreUnavailableError:
    """An operating system's error as ours, with the place; a full disk is told apart."""
    if error.errno in _FULL:
        return StoreFullError(f"no space for {where} ({error.strerror}): make room there, or set another place for it")
    named = f" ({error.filename})" if error.filename else ""
    return StoreUnavailableError(f"{where}: {error.strerror or error}{named}")
