"""What the store still has of a model's states: where recovery stands when the snapshot of the committed state can't be read.

Guarantees: only "not there" and "other content" count as lost; a store that does not answer raises.
Limitations: a ledger that has lost one version alone is not told from a worker that ended before its commit. Of the groups between the last
readable snapshot and the lost one, only those that trained are known as duplicates.
"""

import asyncio

from pydantic import ValidationError

from headrace.consumers.worker.duplicates import LISTED as LISTED_IDS
from headrace.consumers.worker.duplicates import DuplicateWindow
from headrace.consumers.worker.storage.step_files import read_duplicates, read_whole
from headrace.consumers.worker.storage.step_folders import StepFolder, list_folders
from headrace.core.ledger import read_ledger
from headrace.core.reports import NoReportError, read_report
from headrace.core.settings import Settings
from headrace.core.step_range import StepRange
from headrace.core.store import DigestMismatchError, ObjectNotFoundError, ObjectStore
from headrace.core.store.folders import MANIFEST
from headrace.schemas.state import ModelState
from headrace.schemas.weights import Manifest, WeightsRef

LISTED = 100
"""Unknown versions that a state lists, at most: the latest."""
RESUME = "`headrace models resume` goes on from what could be run again, as a new version"


async def window_of(settings: Settings, store: ObjectStore, state: ModelState) -> tuple[DuplicateWindow, str | None]:
    """The duplicate window of the committed state, and why the snapshot can't be used, if so.

    Where the snapshot can't be read, the window of the last one before it counts, with the groups that the reports of the steps since name.
    """
    size = settings.worker.duplicate_window
    step, ids, problem = await asyncio.to_thread(_stored, store, state)
    if problem is None or state.status == "diverged" or state.rebasing is not None:  # what was read of reports stands in the state by now
        return DuplicateWindow(size, ids, state.window_since), problem
    window = DuplicateWindow(size, ids)
    steps = StepRange(first=step + 1, last=state.snapshot_step)
    records = await read_ledger(settings, state.model_id, incarnation=state.incarnation, steps=steps, shadow_of=state.shadow_of)
    unread = 0
    for record in records[-LISTED_IDS:]:
        try:
            report = await asyncio.to_thread(read_report, store, record.report)
        except (NoReportError, DigestMismatchError):
            unread += 1
        else:
            for group in report.groups:
                window.add(group.group_id)
    window.add_listed(state.window_since)
    if unread:
        problem = f"{problem}. The reports of {unread} steps can't be read: of their groups no duplicate is known any more"
    return window, f"{problem}. {RESUME}"


def _stored(store: ObjectStore, state: ModelState) -> tuple[int, bytes, str | None]:
    """The last step whose window can be read, its ids, and what is wrong with the snapshot."""
    if state.snapshot is None or state.status == "deleted":
        return 0, b"", None
    try:
        return state.snapshot_step, read_duplicates(store, state.snapshot), None
    except (ObjectNotFoundError, DigestMismatchError) as error:
        problem = f"the snapshot of step {state.snapshot_step} can't be used: {error}"
    for (step, _), ref in sorted(stored_snapshots(store, state).items(), key=lambda item: item[0], reverse=True):
        if step < state.snapshot_step:
            try:
                return step, read_duplicates(store, ref), problem
            except (ObjectNotFoundError, DigestMismatchError):
                continue
    return 0, b"", problem


def stored_snapshots(store: ObjectStore, state: ModelState) -> dict[tuple[int, str], WeightsRef]:
    """The snapshots that are stored, by step and attempt that each is the state of."""
    found: dict[tuple[int, str], WeightsRef] = {}
    for folder in list_folders(store, state.model_id, state.incarnation, "snapshot"):
        try:
            manifest = Manifest.model_validate_json(store.get_bytes(f"{folder.key}/{MANIFEST}"))
        except (ObjectNotFoundError, ValidationError):
            continue  # never finished, or half deleted
        found[manifest.step, manifest.attempt] = WeightsRef(uri=store.uri(folder.key), digest=manifest.digest)
    return found


def unknown_versions(store: ObjectStore, state: ModelState, *, lost: bool) -> tuple[str, ...]:
    """URIs of the versions after the committed one that the store has, if Kafka has lost the end of the ledger.

    Weights two steps after the committed one are a proof, since a step's files are stored after the commit of the step before it.

    Args:
        store: Object store.
        state: As committed.
        lost: The snapshot of the committed state is not there: any later version is a proof.
    """

    def later(step: int | None = None) -> list[StepFolder]:
        folders = list_folders(store, state.model_id, state.incarnation, "weights", step)
        return [found for found in folders if found.step > state.policy_version and any(o.key.endswith(MANIFEST) for o in found.objects)]

    if state.status == "deleted" or not (lost or later(state.policy_version + 2)):
        return state.unknown_versions
    known = dict.fromkeys(state.unknown_versions)
    return tuple(known | dict.fromkeys(store.uri(found.key) for found in later()))[-LISTED:]


def is_whole(store: ObjectStore, ref: WeightsRef) -> bool:
    """Whether a stored folder is all there, each file with its digest."""
    try:
        read_whole(store, ref)
    except (ObjectNotFoundError, DigestMismatchError):
        return False
    return True
