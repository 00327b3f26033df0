"""What the store still has of a model's states: where recovery stands when the snapshot of the committed state can't be read.

Guarantees: only "not there" and "other content" count as lost; a store that does not answer raises.
Limitations: a ledger that has lost one version alone is not told from a worker that ended before its commit. Of the groups between the last
readable snapshot and the lost one, only those that trained are known as duplicates.

Which snapshots stay: the one that a model's committed state names, and some before it that a replay may start from.

Guarantees: called after a commit, it deletes only what is older than the snapshot that this commit named, so neither recovery nor a later
owner can need it, however long the caller was frozen in between (exactly-once rule 14); what counts is what is stored, so that a restart
forgets nothing. Weights are never deleted here, engines may ask for any version. Limitations: what attempts that never committed left
above the committed step, which is `orphans`' to find.
"""

import asyncio
import logging

from pydantic import ValidationError

from headrace.consumers.worker.duplicates import LISTED as LISTED_IDS
from headrace.consumers.worker.duplicates import DuplicateWindow
from headrace.consumers.worker.storage.step_files import StepFolder, delete_folder, list_folders, read_duplicates, read_whole
from headrace.core.errors import HeadraceError
from headrace.core.ledger import StepRange, read_ledger
from headrace.core.reports import NoReportError, read_report
from headrace.core.settings import Settings
from headrace.core.store import DigestMismatchError, ObjectNotFoundError, ObjectStore
from headrace.core.store.folders import MANIFEST
from headrace.schemas.state import ModelState
from headrace.schemas.weights import Manifest, WeightsRef

LISTED = 100
"""Unknown versions that a state lists, at most: the latest."""
RESUME = "`headrace models resume` continues from what could be run again, as a new version"


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


logger = logging.getLogger(__name__)


class SnapshotKeeper:
    """Deletes snapshots that the policy does not keep.

    Args:
        store: Where they are.
        keep: `worker.keep_snapshots`: steps whose snapshot stays, the committed one included.
    """

    def __init__(self, store: ObjectStore, keep: int) -> None:
        self._store = store
        self._keep = keep

    async def committed(self, state: ModelState) -> None:
        """A state with a new snapshot is committed. A deletion that fails is only logged: the next one finds what is left."""
        try:
            await asyncio.to_thread(self._delete_old, state)
        except HeadraceError as error:
            logger.warning("old snapshots of %s stay for now: %s", state.name, error)

    def _delete_old(self, state: ModelState) -> None:
        if state.snapshot is None:
            return
        current = self._store.resolve(state.snapshot.uri)
        by_step: dict[int, list[StepFolder]] = {}
        named = None
        for folder in list_folders(self._store, state.model_id, state.incarnation, "snapshot"):
            by_step.setdefault(folder.step, []).append(folder)
            named = folder.step if folder.key == current else named
        if named is None:  # not where this worker stores snapshots: nothing says which are older
            return
        steps = sorted((step for step in by_step if step <= named), reverse=True)
        for step in steps[self._keep :]:
            for folder in by_step[step]:
                delete_folder(self._store, folder)
                logger.info("snapshot %s is deleted", folder.key)
