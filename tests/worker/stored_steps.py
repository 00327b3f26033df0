"""Steps as they lie in the object store, and the states that name them, for the tests of what is kept and what goes."""

import itertools
from collections.abc import Iterator

from headrace.consumers.worker.storage.step_files import folder_key
from headrace.core.store import ObjectStore
from headrace.schemas.state import ModelState
from headrace.schemas.training import ModelSettings
from headrace.schemas.weights import FolderKind, WeightsRef
from headrace.trainer.plan import StateKey

_numbers = itertools.count()


def state_of(
    model_id: str = "m",
    *,
    version: int = 0,
    last_attempt: str | None = None,
    snapshot: str | None = None,
    incarnation: str = "i",
    store: ObjectStore | None = None,
) -> ModelState:
    """The committed state of a model; `snapshot` is a key."""
    return ModelState(
        model_id=model_id,
        incarnation=incarnation,
        account="a",
        project="p",
        name="n",
        worker_group="default",
        settings=ModelSettings(base_model="tiny"),
        scanned=0,
        policy_version=version,
        last_attempt=last_attempt,
        snapshot=None if snapshot is None or store is None else WeightsRef(uri=store.uri(snapshot), digest="0" * 64),
    )


def put_folder(
    store: ObjectStore, kind: FolderKind, step: int, attempt: str, *, model_id: str = "m", incarnation: str = "i", whole: bool = True
) -> str:
    """A folder of two files and its manifest; not `whole`: what a worker left that was killed in the middle. Returns its key."""
    key = folder_key(StateKey(model_id=model_id, incarnation=incarnation, step=step, attempt=attempt), kind)
    for name in ("a.bin", "b/c.bin", "manifest.json")[: 3 if whole else 1]:
        store.put_bytes_if_absent(f"{key}/{name}", b"%d" % next(_numbers))
    return key


def folders(store: ObjectStore, prefix: str = "") -> Iterator[str]:
    """Keys of the folders that have anything in them, each once."""
    keys = ("/".join(found.key.split("/")[:5]) for found in store.list(prefix))
    return (key for key, _ in itertools.groupby(keys))
