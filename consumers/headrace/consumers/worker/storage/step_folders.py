"""Folders of steps in the object store: how they are called, which there are, and how one goes.

`models/<model id>/<incarnation>/<weights|snapshots|plots|reports|logprobs>/<step>-<attempt>/…`, the step in eight digits. Guarantees: a
folder's name says all of its identity; one that is deleted loses its manifest first, so that what is left of an interrupted deletion is no
folder to anybody but this module. Gives up: what has other names; it is not listed and never deleted. All calls block.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby

from headrace.core.store import ObjectStore, StoredObject
from headrace.core.store.folders import MANIFEST
from headrace.schemas.weights import FolderKind
from headrace.trainer.plan import StateKey

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
