"""A store in a folder, for one machine or a shared file system.

Guarantees: an object appears by a hard link to a finished, fsynced file, which fails where the name is taken; every folder above it up to
the store's is fsynced before a put returns. An object is missing only if the store itself is there: a folder that is missing or empty is a
file system that is not mounted, and an outage (the first put leaves a hidden file, `.headrace-store`, so that no store is ever empty). New
folders have mode 700, new files 600. Below the store's folder no symbolic link is followed: a key that leads through one can't be read,
written or deleted, and `list` leaves links out. Limitations: a writer that is killed leaves a hidden partial file, which no reader sees
until `sweep` removes it; SHA-256 is not stored (`head` has none); file systems without hard links do not work; a process that may write
into the folder can put a link there between the check and the use.
"""

import contextlib
import errno
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from typing_extensions import override

from headrace.core.processes import make_private_folder
from headrace.core.store.folders import Tally, check, file_chunks, sha256_of_bytes, sha256_of_file, verified, write_verified
from headrace.core.store.interface import (
    FOLDER_THREADS,
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectStore,
    StoredObject,
    StoreError,
    StoreMisconfiguredError,
    StoreUnavailableError,
    plain_os_error,
)
from headrace.core.store.keys import STORE_FILE, TEMPORARY_PREFIX, check_key, check_prefix, key_of


class FileStore(ObjectStore):
    """Objects as files below a folder, which is made by the first put.

    Args:
        root: The folder; a relative one is taken from the current folder, now.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self._base = f"file://{self._root.as_posix()}"
        self._made = False
        """This object has written to the store, or found it made."""

    def __repr__(self) -> str:
        return f"FileStore({self._base})"

    @override
    def uri(self, key: str) -> str:
        return f"{self._base}/{check_key(key)}"

    @override
    def resolve(self, uri: str) -> str:
        return key_of(uri, self._base)

    @override
    def put_bytes_if_absent(self, key: str, data: bytes) -> StoredObject:
        return self._put(key, [data], None)

    @override
    def put_file_if_absent(self, key: str, path: Path, *, sha256: str | None = None) -> StoredObject:
        return self._put(key, file_chunks(path), sha256)

    @override
    def put_stream_if_absent(self, key: str, chunks: Iterable[bytes], *, sha256: str | None = None) -> StoredObject:
        return self._put(key, chunks, sha256)

    @override
    def get_bytes(self, key: str, *, sha256: str | None = None) -> bytes:
        with self._plain_errors(key):
            data = self._path(key).read_bytes()
        if sha256 is not None:
            check(self.uri(key), sha256_of_bytes(data), sha256)
        return data

    @override
    def get_chunks(self, key: str, *, sha256: str | None = None) -> Iterator[bytes]:
        with self._plain_errors(key):
            yield from verified(file_chunks(self._path(key)), self.uri(key), sha256)

    @override
    def get_file(self, key: str, path: Path, *, sha256: str | None = None) -> StoredObject:
        source = self._path(key)
        self.head(key)  # a missing object is not to be mistaken for a missing target folder

        def fill(partial: Path) -> None:
            with partial.open("wb") as out:
                for chunk in file_chunks(source):
                    out.write(chunk)

        size, found = write_verified(path, fill, self.uri(key), sha256)
        return StoredObject(key=key, size=size, sha256=found)

    @override
    def get_range(self, key: str, start: int, stop: int) -> bytes:
        if not 0 <= start <= stop:
            raise ValueError(f"no range: [{start}, {stop})")
        with self._plain_errors(key), self._path(key).open("rb") as file:
            file.seek(start)
            return file.read(stop - start)

    @override
    def head(self, key: str) -> StoredObject:
        path = self._path(key)
        with self._plain_errors(key):
            if path.is_dir():
                raise FileNotFoundError(errno.ENOENT, "a folder")
            return _stored(key, path.stat())

    @override
    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        folder, _, _ = check_prefix(prefix).rpartition("/")
        with self._plain_errors(prefix):
            for key, entry in self._walk(self._path(folder) if folder else self._root, folder, prefix):
                with contextlib.suppress(FileNotFoundError):  # deleted since it was seen
                    yield _stored(key, entry.stat(follow_symlinks=False))

    @override
    def delete(self, key: str) -> None:
        path = self._path(key)
        with self._plain_errors(key):
            try:
                path.unlink()
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                return
            _fsync_folder(path.parent)
            self._remove_empty(path.parent)

    @override
    def sweep(self, prefix: str, before: datetime) -> int:
        folder, _, _ = check_prefix(prefix).rpartition("/")
        found = 0
        with self._plain_errors(prefix):
            for partial in sorted((self._path(folder) if folder else self._root).rglob(f"{TEMPORARY_PREFIX}*")):
                inside = f"{partial.parent.relative_to(self._root).as_posix()}/".startswith(prefix)
                with contextlib.suppress(FileNotFoundError):  # its writer lives, and is done
                    if inside and partial.stat().st_mtime < before.timestamp():
                        partial.unlink()
                        found += 1
                        self._remove_empty(partial.parent)
        return found

    def _remove_empty(self, folder: Path) -> None:
        for above in (folder, *folder.parents):
            if above == self._root:
                break
            try:
                above.rmdir()
            except OSError:  # not empty, or gone by another's hand
                break

    def _path(self, key: str) -> Path:
        """Where an object is.

        Raises:
            InvalidKeyError: the key is none.
            StoreUnavailableError: a symbolic link stands there, or above it.
        """
        path = self._root / check_key(key)
        if os.path.realpath(path) != f"{os.path.realpath(self._root).rstrip('/')}/{key}":
            raise StoreUnavailableError(
                f"{self._base}/{key} leads through a symbolic link, which a file store does not follow: remove the link"
            )
        return path

    @override
    def put_folder_if_absent(
        self, files: Mapping[str, Path], last: Callable[[Sequence[StoredObject]], tuple[str, bytes]]
    ) -> Sequence[StoredObject]:
        # All files are written and fsynced side by side, and each folder is fsynced once for all of them: one by one it is a fsync for
        # each folder above each file.
        written: list[_Written] = []

        def write(key: str, chunks: Iterable[bytes]) -> StoredObject:
            with self._plain_errors(key, missing=StoreUnavailableError):
                one = _Written.of(self._path(key), chunks)
            written.append(one)
            return StoredObject(key=key, size=one.tally.size, sha256=one.tally.sha256)

        try:
            with self._plain_errors("", missing=StoreUnavailableError):
                self._make()
            with ThreadPoolExecutor(FOLDER_THREADS, thread_name_prefix="headrace-store") as pool:
                stored = list(pool.map(lambda item: write(item[0], file_chunks(item[1])), files.items()))
                key, content = last(stored)
                write(key, [content])
                for one in written:  # the last of them at the end
                    self._appear(one)
                with self._plain_errors("", missing=StoreUnavailableError):
                    list(pool.map(_fsync_folder, {folder for one in written for folder in self._above(one.path)}))
        finally:
            for one in written:
                one.partial.unlink(missing_ok=True)
        return stored

    def _put(self, key: str, chunks: Iterable[bytes], sha256: str | None) -> StoredObject:
        with self._plain_errors(key, missing=StoreUnavailableError):
            self._make()
            one = _Written.of(self._path(key), chunks)
            try:
                check(f"what was to be stored as {self.uri(key)}", one.tally.sha256, sha256)
                self._appear(one)
            finally:
                one.partial.unlink(missing_ok=True)
            for folder in self._above(one.path):
                _fsync_folder(folder)
        return StoredObject(key=key, size=one.tally.size, sha256=one.tally.sha256)

    def _appear(self, one: "_Written") -> None:
        """Give a written object its name; the name may have this content already."""
        where = f"{self._base}/{one.path.relative_to(self._root).as_posix()}"
        with self._plain_errors(one.path.relative_to(self._root).as_posix(), missing=StoreUnavailableError):
            try:
                os.link(one.partial, one.path)
            except FileExistsError:
                if one.path.is_dir() or sha256_of_file(one.path) != one.tally.sha256:
                    raise ObjectExistsError(f"{where} exists with other content; it was left as it is") from None
            one.partial.unlink(missing_ok=True)

    def _above(self, path: Path) -> Sequence[Path]:
        """The folders from an object's up to the store's; fsynced also for one that was there: its writer may not have come so far."""
        relative = path.relative_to(self._root)
        return [self._root / folder for folder in relative.parents]

    def _walk(self, folder: Path, above: str, prefix: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Files in the order of their keys: a folder sorts as its name with the slash."""
        try:
            with os.scandir(folder) as found:
                entries = [(f"{above}/{entry.name}" if above else entry.name, entry) for entry in found]
        except (FileNotFoundError, NotADirectoryError):
            return
        objects = [
            (key, entry) for key, entry in entries if not (entry.is_symlink() or entry.name.startswith((TEMPORARY_PREFIX, STORE_FILE)))
        ]
        keyed = [(key + "/" if entry.is_dir(follow_symlinks=False) else key, entry) for key, entry in objects]
        for key, entry in sorted(keyed, key=lambda pair: pair[0].encode(errors="surrogateescape")):
            if key.endswith("/") and (key.startswith(prefix) or prefix.startswith(key)):
                yield from self._walk(Path(entry.path), key[:-1], prefix)
            elif not key.endswith("/") and key.startswith(prefix):
                yield key, entry

    @contextlib.contextmanager
    def _plain_errors(self, key: str, missing: type[StoreError] = ObjectNotFoundError) -> Iterator[None]:
        where = f"{self._base}/{key}"
        try:
            yield
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            if missing is ObjectNotFoundError:
                self._check_there(where)
            raise missing(f"{where} does not exist" if missing is ObjectNotFoundError else f"{where}: {error}") from error
        except OSError as error:
            raise plain_os_error(error, where) from error

    def _make(self) -> None:
        """Make the store's folder, durably, with the file that says that it is one; once only: a store that vanishes is not made again."""
        mark = self._root / STORE_FILE
        # Read before the look at the disk: another thread may make the store between that look and this line's use.
        was_made = self._made
        if mark.exists():
            self._made = True
            return
        if was_made:
            raise StoreMisconfiguredError(
                f"the store's folder {self._root} was there and is gone: mount it, or restart with another store.url"
            )
        _make_durable_folder(self._root)
        mark.touch(mode=0o600)  # durable with the first object, whose put syncs this folder
        self._made = True

    def _check_there(self, where: str) -> None:
        """Refuse to call an object missing where the store itself is not there."""
        try:
            with os.scandir(self._root) as found:
                if any(found):
                    return
            state = "is empty"
        except OSError as error:
            state = f"can't be read ({error.strerror})"
        raise StoreMisconfiguredError(
            f"{where}: the store's folder {self._root} {state}: mount it, or correct store.url (`headrace doctor` makes a new store)"
        )


def _stored(key: str, status: os.stat_result) -> StoredObject:
    return StoredObject(key=key, size=status.st_size, sha256=None, modified=datetime.fromtimestamp(status.st_mtime, UTC))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """An object that is written and durable, and has no name yet."""

    path: Path
    """Where it will be."""
    partial: Path
    tally: Tally

    @classmethod
    def of(cls, path: Path, chunks: Iterable[bytes]) -> "_Written":
        """Write it next to its place; what fails leaves nothing."""
        partial = _new_partial(path.parent)
        tally = Tally()
        try:
            with partial.open("r+b") as file:
                for chunk in tally.passing(chunks):
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        return cls(path=path, partial=partial, tally=tally)


def _make_durable_folder(folder: Path) -> None:
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    make_private_folder(folder)
    for path in reversed(missing):
        _fsync_folder(path.parent)


def _new_partial(folder: Path) -> Path:
    """An empty file in the folder, which is made if it is missing, and made again if a deletion empties and removes it meanwhile."""
    while True:
        make_private_folder(folder)
        partial = folder / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
        try:
            partial.touch(mode=0o600, exist_ok=False)
        except FileNotFoundError:
            continue
        return partial


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
