"""The files of a step on their way to the object store, before its transaction begins.

Guarantees: names carry model, incarnation, step and attempt, and always mean the same bytes (exactly-once rule 14); when `store_step`
returns, every file is durable, every manifest was written last, and everything was read back whole with its digest. Files that come back
damaged are deleted and stored once more: nothing refers to an attempt before its commit. Limitations: damage after the reading back is
found by who fetches the files. `headrace.consumers.worker.storage.orphans` deletes what a lost attempt left.

Folders of steps in the object store: how they are called, which there are, and how one goes.

`models/<model id>/<incarnation>/<weights|snapshots|plots|reports|logprobs>/<step>-<attempt>/…`, the step in eight digits. Guarantees: a
folder's name says all of its identity; one that is deleted loses its manifest first, so that what is left of an interrupted deletion is no
folder to anybody but this module. Limitations: what has other names; it is not listed and never deleted. All calls block.
"""

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import TypeVar

import orjson

from headrace.core.store import (
    DigestMismatchError,
    InvalidKeyError,
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectStore,
    StoredObject,
    StoreUnavailableError,
    read_manifest,
    store_folder,
)
from headrace.core.store.folders import MANIFEST
from headrace.core.store.interface import FOLDER_THREADS
from headrace.schemas.state import REPORT_FILE, ROWS_FILE, StepReport
from headrace.schemas.weights import FolderKind, Manifest, StoredFile, WeightsRef
from headrace.trainer.plan import StateKey, StepResult

_FOLDERS: dict[FolderKind, str] = {
    "weights": "weights",
    "snapshot": "snapshots",
    "plots": "plots",
    "report": "reports",
    "logprobs": "logprobs",
}
KINDS: dict[str, FolderKind] = {folder: kind for kind, folder in _FOLDERS.items()}
_KEY = re.compile(rf"models/([^/]+)/([^/]+)/({'|'.join(_FOLDERS.values())})/(\d{{8,}})-([^/]+)/")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFolder:
    """What is stored of one kind by one attempt at a step; perhaps not all of it."""

    key: str
    """Without a slash at its end."""
    kind: FolderKind
    incarnation: str
    step: int
    attempt: str
    objects: tuple[StoredObject, ...]

    @property
    def bytes(self) -> int:
        """Of all its objects."""
        return sum(found.size for found in self.objects)

    @property
    def modified(self) -> datetime:
        """When the last of its objects was stored."""
        return max(found.modified for found in self.objects if found.modified is not None)


def folder_key(state: StateKey, kind: FolderKind) -> str:
    """Where a state's folder of a kind is stored."""
    return f"models/{state.model_id}/{state.incarnation}/{_FOLDERS[kind]}/{state.step:08d}-{state.attempt}"


def list_folders(
    store: ObjectStore, model_id: str, incarnation: str | None = None, kind: FolderKind | None = None, step: int | None = None
) -> Iterator[StepFolder]:
    """The folders of a model, in the order of their keys: of all its incarnations or of one, of all kinds or (with an incarnation) of one,
    of all steps or (with a kind) of one.

    Raises:
        StoreError: the store can't be used.
    """
    prefix = f"models/{model_id}/" + (f"{incarnation}/" if incarnation else "") + (f"{_FOLDERS[kind]}/" if incarnation and kind else "")
    prefix += f"{step:08d}-" if incarnation and kind and step is not None else ""
    matched = ((_KEY.match(found.key), found) for found in store.list(prefix))
    known = ((match, found) for match, found in matched if match is not None)
    for key, objects in groupby(known, key=lambda pair: pair[0].group()):
        members = list(objects)
        _, of, folder, number, attempt = members[0][0].groups()
        yield StepFolder(
            key=key.removesuffix("/"),
            kind=KINDS[folder],
            incarnation=of,
            step=int(number),
            attempt=attempt,
            objects=tuple(found for _, found in members),
        )


def delete_folder(store: ObjectStore, folder: StepFolder) -> None:
    """Delete all that was listed of a folder.

    Raises:
        StoreError: the store can't be used; the rest is found by the next listing.
    """
    for found in sorted(folder.objects, key=lambda found: not found.key.endswith(f"/{MANIFEST}")):
        store.delete(found.key)


T = TypeVar("T")

DUPLICATES_FILE = "duplicates.u64"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredStep:
    """What a step left in the store."""

    weights: WeightsRef
    weights_manifest: Manifest
    report: WeightsRef
    snapshot: WeightsRef | None
    """Where the plan asked for one."""
    plots: WeightsRef | None
    """Where the step drew any."""
    logprobs: WeightsRef | None = None
    """Where the step computed log-probabilities instead of training."""


async def store_step(store: ObjectStore, out_dir: Path, result: StepResult, duplicates: bytes, report: StepReport) -> StoredStep:
    """Store what the step wrote, and its report. The local folder stays; a call that failed may be repeated.

    Args:
        store: The object store.
        out_dir: The plan's `out_dir`, with `weights/` and perhaps `snapshot/`, `plots/`, `rows/` and `logprobs/`.
        result: What the rank answered.
        duplicates: The duplicate window at the cut: part of the snapshot, where there is one.
        report: Of the step; the kept rows lie next to it.

    Raises:
        StoreUnavailableError: the store can't be used, or did not keep what it was given.
        OSError: the local disk can't be used.
    """
    key = result.key

    def put(kind: FolderKind) -> tuple[Manifest, WeightsRef]:
        return _put(store, out_dir / kind, kind, key, key)

    kinds = await asyncio.to_thread(_lay_out, out_dir, duplicates, report)
    stored = dict(zip(kinds, await _side_by_side(put, kinds), strict=True))
    # Behind all of them: what was stored first has waited for the largest.
    await _side_by_side(lambda kind: _read_back(store, stored[kind][1]), kinds)
    manifest, weights = stored["weights"]
    return StoredStep(
        weights=weights,
        weights_manifest=manifest,
        report=stored["report"][1],
        snapshot=stored["snapshot"][1] if "snapshot" in stored else None,
        plots=stored["plots"][1] if "plots" in stored else None,
        logprobs=stored["logprobs"][1] if "logprobs" in stored else None,
    )


async def store_snapshot(store: ObjectStore, folder: Path, key: StateKey, duplicates: bytes, attempt: str) -> WeightsRef:
    """Store a state that was committed without one, as the snapshot of its step. The local folder stays; a failed call may be repeated.

    Args:
        store: The object store.
        folder: With the state.
        key: Of the state.
        duplicates: The duplicate window.
        attempt: A fresh one, for the name: another owner may have tried this before.

    Raises:
        StoreUnavailableError, OSError: as `store_step`.
    """

    def put() -> WeightsRef:
        (folder / DUPLICATES_FILE).write_bytes(duplicates)
        _, ref = _put(store, folder, "snapshot", key, replace(key, attempt=attempt))
        _read_back(store, ref)
        return ref

    return await asyncio.to_thread(put)


async def store_for_deployment(store: ObjectStore, deployment: str, key: StateKey, stored: StoredStep) -> str:
    """Write a version's manifest under a deployment's prefix, too; returns its identity, the name of the snapshot there.

    `deployments/<deployment>/<identity>/manifest.json`, with the folder of the files in `uri`; the identity is new for every attempt.

    Raises:
        HeadraceError: the store can't be reached, or refuses.
    """
    identity = f"v{key.step}-{(key.attempt or '')[-12:]}"
    manifest = stored.weights_manifest.model_copy(update={"uri": stored.weights.uri})
    body = orjson.dumps(manifest.model_dump(mode="json"), option=orjson.OPT_INDENT_2)
    await asyncio.to_thread(store.put_bytes_if_absent, f"deployments/{deployment}/{identity}/{MANIFEST}", body)
    return identity


async def _side_by_side(call: Callable[[FolderKind], T], kinds: Sequence[FolderKind]) -> list[T]:
    """A call for each kind, in threads. All of them end before the first failure is raised: what still writes would meet the next try."""
    answers = await asyncio.gather(*(asyncio.to_thread(call, kind) for kind in kinds), return_exceptions=True)
    done: list[T] = []
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
        done.append(answer)
    return done


def _put(store: ObjectStore, folder: Path, kind: FolderKind, key: StateKey, called: StateKey) -> tuple[Manifest, WeightsRef]:
    """Store a folder of the state `key` under the name of `called`."""
    prefix = folder_key(called, kind)
    with _deleted_if_damaged(store, prefix):
        return store_folder(
            store,
            prefix,
            folder,
            kind=kind,
            model_id=key.model_id,
            incarnation=key.incarnation,
            step=key.step,
            attempt=key.attempt or "",
        )


def _read_back(store: ObjectStore, ref: WeightsRef) -> None:
    with _deleted_if_damaged(store, store.resolve(ref.uri)):
        read_whole(store, ref)


@contextmanager
def _deleted_if_damaged(store: ObjectStore, prefix: str) -> Iterator[None]:
    """Delete a folder that nothing refers to yet, if it is not what was stored.

    Raises:
        StoreUnavailableError: it was not; it may be stored once more.
    """
    try:
        yield
    except (ObjectExistsError, ObjectNotFoundError, DigestMismatchError) as error:
        for found in list(store.list(f"{prefix}/")):
            store.delete(found.key)
        raise StoreUnavailableError(f"what was stored was damaged before its commit, and is stored once more: {error}") from error


def _lay_out(out_dir: Path, duplicates: bytes, report: StepReport) -> list[FolderKind]:
    """Put next to the rank's files what the rank does not know; returns the folders to store."""
    if (out_dir / "snapshot").is_dir():
        (out_dir / "snapshot" / DUPLICATES_FILE).write_bytes(duplicates)
    folder = out_dir / "report"
    folder.mkdir(exist_ok=True)
    (folder / REPORT_FILE).write_bytes(orjson.dumps(report.model_dump(mode="json"), option=orjson.OPT_INDENT_2))
    rows = out_dir / "rows" / ROWS_FILE
    if rows.is_file():
        rows.rename(folder / ROWS_FILE)
    return [kind for kind in KINDS.values() if kind == "weights" or (out_dir / kind).is_dir()]


def read_duplicates(store: ObjectStore, snapshot: WeightsRef) -> bytes:
    """The duplicate window of a snapshot; nothing else of it is read. Blocks.

    Raises:
        ObjectNotFoundError, DigestMismatchError: the snapshot is not there, or not what was committed.
        InvalidKeyError: it is in another store.
    """
    key = store.resolve(snapshot.uri)
    manifest = _manifest(store, snapshot)
    digests = {file.path: file.sha256 for file in manifest.files}
    if DUPLICATES_FILE not in digests:
        raise DigestMismatchError(f"{snapshot.uri} has no {DUPLICATES_FILE}: it is no snapshot of a worker")
    return store.get_bytes(f"{key}/{DUPLICATES_FILE}", sha256=digests[DUPLICATES_FILE])


def read_whole(store: ObjectStore, ref: WeightsRef) -> None:
    """Read a stored folder whole, and compare it with its manifest, and that with what was stored. Blocks.

    Raises: as `read_duplicates`.
    """

    def read(file: StoredFile) -> None:
        for _ in store.get_chunks(f"{key}/{file.path}", sha256=file.sha256):
            pass

    key = store.resolve(ref.uri)
    with ThreadPoolExecutor(FOLDER_THREADS, thread_name_prefix="headrace-read-back") as pool:
        list(pool.map(read, _manifest(store, ref).files))


def _manifest(store: ObjectStore, ref: WeightsRef) -> Manifest:
    try:
        return read_manifest(store, ref.uri, ref.digest)
    except InvalidKeyError as error:  # the folder's own URI is of this store: the manifest lists a path that is none
        raise DigestMismatchError(f"{ref.uri}/{MANIFEST} is damaged: {error}") from error
