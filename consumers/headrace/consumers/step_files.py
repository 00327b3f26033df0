"""The files of a step on their way to the object store, before its transaction begins.

Guarantees: names carry model, incarnation, step and attempt and are never used again (exactly-once rule 14); every file is
durable and every manifest written last when `store_step` returns. Gives up: deletion of what a lost attempt left behind.
"""

import asyncio
import shutil
from dataclasses import dataclass
from pathlib import Path

from headrace.core.store import ObjectStore, fetch_folder, store_folder
from headrace.schemas.weights import FolderKind, Manifest, WeightsRef
from headrace.trainer.plan import StepResult

DUPLICATES_FILE = "duplicates.u64"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredStep:
    """What a step left in the store."""

    weights: WeightsRef
    weights_manifest: Manifest
    snapshot: WeightsRef
    plots: WeightsRef | None
    """Where the step drew any."""


async def store_step(store: ObjectStore, out_dir: Path, result: StepResult, duplicates: bytes) -> StoredStep:
    """Store weights and snapshot; the local folder is gone afterwards.

    Args:
        store: The object store.
        out_dir: The plan's `out_dir`, with `weights/`, `snapshot/` and perhaps `plots/`.
        result: What the rank answered.
        duplicates: The duplicate window at the cut: part of the snapshot.

    Raises:
        HeadraceError: the store can't be reached, or refuses.
    """
    key = result.key
    prefix = f"models/{key.model_id}/{key.incarnation}"
    name = f"{key.step:08d}-{key.attempt}"

    def put(kind: FolderKind, folder: str) -> tuple[Manifest, WeightsRef]:
        return store_folder(
            store,
            f"{prefix}/{folder}/{name}",
            out_dir / kind,
            kind=kind,
            model_id=key.model_id,
            incarnation=key.incarnation,
            step=key.step,
            attempt=key.attempt or "",
        )

    await asyncio.to_thread((out_dir / "snapshot" / DUPLICATES_FILE).write_bytes, duplicates)
    (manifest, weights), (_, snapshot) = await asyncio.gather(
        asyncio.to_thread(put, "weights", "weights"), asyncio.to_thread(put, "snapshot", "snapshots")
    )
    drawn = await asyncio.to_thread((out_dir / "plots").is_dir)
    plots = (await asyncio.to_thread(put, "plots", "plots"))[1] if drawn else None
    await asyncio.to_thread(shutil.rmtree, out_dir, ignore_errors=True)
    return StoredStep(weights=weights, weights_manifest=manifest, snapshot=snapshot, plots=plots)


async def load_duplicates(store: ObjectStore, snapshot: WeightsRef, into: Path) -> bytes:
    """The duplicate window of a snapshot.

    Raises:
        HeadraceError: the snapshot is not there, or not what was committed.
    """
    await asyncio.to_thread(fetch_folder, store, snapshot.uri, snapshot.digest, into)
    try:
        return await asyncio.to_thread((into / DUPLICATES_FILE).read_bytes)
    finally:
        await asyncio.to_thread(shutil.rmtree, into, ignore_errors=True)
