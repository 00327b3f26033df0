r"""Folders of files in a store, made one by a manifest: weights and snapshots.

`prefix/a`, `prefix/b/c`, … and `prefix/manifest.json`, which lists each file's size and SHA-256 and is written last, by a conditional put.
The digest of a folder is the SHA-256 over its files' lines `sha256  path\n`, sorted: what `sha256sum` prints.

Guarantees: a fetched folder has exactly the files of the manifest, each checked, and appears at once; an interrupted fetch continues
where it stopped. Limitations: symbolic links and empty folders.

SHA-256 on the way: of chunks as they pass, of files as they lie. A wrong digest raises, and leaves no file.
"""

import hashlib
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import orjson
from pydantic import ValidationError

from headrace.core.store.interface import DigestMismatchError, ObjectStore, StoredObject, StoreError, plain_os_error
from headrace.core.store.keys import TEMPORARY_PREFIX, check_key
from headrace.schemas.weights import FolderKind, Manifest, StoredFile, WeightsRef

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


MANIFEST = "manifest.json"


def folder_digest(files: Iterable[StoredFile]) -> str:
    """One name for the content of all files, hex."""
    return hashlib.sha256("".join(sorted(f"{file.sha256}  {file.path}\n" for file in files)).encode()).hexdigest()


def store_folder(
    store: ObjectStore,
    prefix: str,
    folder: Path,
    *,
    kind: FolderKind,
    model_id: str,
    incarnation: str,
    step: int,
    attempt: str,
) -> tuple[Manifest, WeightsRef]:
    """Store every file of a folder under `prefix`, then the manifest. All is durable when it returns; repeating it is harmless.

    Raises:
        StoreError: the folder is empty or has what can't be stored, a name is taken by other content, or the store can't be used.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    names = {path: path.relative_to(folder).as_posix() for path in paths}
    if not paths or MANIFEST in names.values():
        raise StoreError(f"{folder} has {'a file ' + MANIFEST + ' of its own' if paths else 'no files'}: it can't be stored as {prefix}")
    if odd := next((path for path in paths if path.is_symlink() or not path.is_file()), None):
        raise StoreError(f"{odd} is no ordinary file: it can't be stored")

    made: list[Manifest] = []

    def listed(stored: Sequence[StoredObject]) -> tuple[str, bytes]:
        found = zip(paths, stored, strict=True)
        files = tuple(StoredFile(path=names[path], size=one.size, sha256=_known(one)) for path, one in found)
        manifest = Manifest(
            kind=kind, model_id=model_id, incarnation=incarnation, step=step, attempt=attempt, files=files, digest=folder_digest(files)
        )
        made.append(manifest)
        return f"{prefix}/{MANIFEST}", orjson.dumps(manifest.model_dump(mode="json"), option=orjson.OPT_INDENT_2)

    store.put_folder_if_absent({f"{prefix}/{names[path]}": path for path in paths}, listed)
    (manifest,) = made
    return manifest, WeightsRef(uri=store.uri(prefix), digest=manifest.digest)


def _known(stored: StoredObject) -> str:
    assert stored.sha256 is not None  # noqa: S101 - a put always knows it
    return stored.sha256


def read_manifest(store: ObjectStore, uri: str, digest: str | None) -> Manifest:
    """The manifest of a stored folder, checked against the digest that was committed; None where no one has committed one.

    Raises:
        ObjectNotFoundError: there is none.
        DigestMismatchError: it is unreadable, or lists other content.
        InvalidKeyError: the URI is not in this store.
    """
    where = f"{uri}/{MANIFEST}"
    body = store.get_bytes(f"{store.resolve(uri)}/{MANIFEST}")
    try:
        manifest = Manifest.model_validate_json(body)
    except ValidationError as error:
        raise DigestMismatchError(f"{where} is no manifest: {error.errors(include_url=False, include_input=False)[0]['msg']}") from error
    for file in manifest.files:
        check_key(file.path)
    check(f"the list of files in {where}", folder_digest(manifest.files), digest or manifest.digest)
    return manifest


def fetch_folder(store: ObjectStore, uri: str, digest: str, dest: Path) -> Manifest:
    """Download a stored folder to `dest`, which appears whole; what stands there with other content is replaced.

    Files wait in a hidden folder next to `dest` until all are there; those that are right are kept by the next call.

    Raises:
        ObjectNotFoundError: the manifest or a file is gone.
        DigestMismatchError: names the file that was changed or truncated.
        StoreUnavailableError: the store, or the local disk.
    """
    manifest = read_manifest(store, uri, digest)
    key = store.resolve(uri)
    partial = dest.with_name(f"{TEMPORARY_PREFIX}{dest.name}")
    try:
        if _is_whole(dest, manifest):
            return manifest
        partial.mkdir(parents=True, exist_ok=True)
        for path in partial.rglob("*"):
            if path.is_file() and path.relative_to(partial).as_posix() not in {file.path for file in manifest.files}:
                path.unlink()
        for file in manifest.files:
            here = partial / file.path
            if not _is(here, file):
                store.get_file(f"{key}/{file.path}", here, sha256=file.sha256)
        if dest.exists():
            shutil.rmtree(dest)
        partial.rename(dest)
    except OSError as error:
        raise plain_os_error(error, f"{dest} (from {uri})") from error
    return manifest


def _is_whole(folder: Path, manifest: Manifest) -> bool:
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return there == {file.path for file in manifest.files} and all(_is(folder / file.path, file) for file in manifest.files)


def _is(path: Path, file: StoredFile) -> bool:
    return path.is_file() and path.stat().st_size == file.size and sha256_of_file(path) == file.sha256
