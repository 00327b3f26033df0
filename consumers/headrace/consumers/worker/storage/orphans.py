"""What attempts left in the object store that were never committed: found and deleted by the lane's owner (exactly-once rule 14).

An attempt at a step beyond the committed version is an orphan once it is old; at a step below, where several attempts left files, the
committed one is looked up in the ledger, and the others are. Only attempts of this cluster's worker group are judged (`attempts`).

Guarantees: nothing is deleted that `models` or the ledger refers to, since an attempt goes only where the committed one of its step is
known to be another, or where the step is beyond all that is committed. The order makes it sound against a frozen owner: first list, then
prove the ownership by a commit, then judge by the states that this commit has. The process that is owner then has been it all the time, so
the list holds no attempt of a later owner, and what is an orphan now will be one for ever: deleting may take as long as it likes. Published
weights are whole or (a future format) build upon committed ones, and so need nothing else. The ledger is read from the time of the files at
hand, and only where a step has several attempts. Limitations: a lone attempt of an earlier incarnation, which may be the committed one;
clocks of store and broker that differ by an hour.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from headrace.consumers.worker.attempts import Attempts
from headrace.consumers.worker.storage.step_files import StepFolder, delete_folder, list_folders
from headrace.core.errors import HeadraceError
from headrace.core.kafka import client_options
from headrace.core.reading import offsets_since, stream_to_end
from headrace.core.settings import Settings
from headrace.core.store import InvalidKeyError, ObjectStore
from headrace.schemas.envelope import header_text, open_record
from headrace.schemas.reasons import CodecError
from headrace.schemas.state import ModelState, StepRecord

logger = logging.getLogger(__name__)

EVERY_SECONDS = 3600.0
_CLOCKS_DIFFER = timedelta(hours=1)

Step = tuple[str, str, int]
"""Model id, incarnation, step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owned:
    """What a lane's owner knows at the moment of a commit."""

    states: Mapping[str, ModelState]
    """All models of the lane, as committed."""
    running: frozenset[str]
    """Attempts whose step runs, or is being stored or committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What went."""

    folders: tuple[str, ...] = ()
    """Keys."""
    bytes: int = 0
    unfinished: int = 0
    """Files or uploads that a killed writer had not finished."""


class OrphanCollector:
    """Collects the orphans of one lane.

    Args:
        settings: Grace, worker group.
        store: Object store.
        lane: Partition number.
    """

    def __init__(self, settings: Settings, store: ObjectStore, lane: int) -> None:
        self._store = store
        self._lane = lane
        self._grace = timedelta(seconds=settings.worker.orphan_grace_seconds)
        self._options = client_options(settings.kafka, f"headrace-orphans-{lane}")
        self._ledger = settings.topic_names.steps
        self._attempts = Attempts(settings)
        self._committed: dict[Step, str | None] = {}
        """Looked up: the committed attempt, or None where the ledger had none."""

    async def run(self, states: Callable[[], Mapping[str, ModelState]], owned: Callable[[], Awaitable[Owned]]) -> None:
        """Collect now and every hour, until cancelled. What fails is logged and tried again.

        Raises:
            FencedError, OutcomeUnknownError: from `owned`; the lane is not ours (any more).
        """
        while True:
            try:
                found = await self.collect(states(), owned)
            except HeadraceError as error:
                logger.warning("lane %d: what attempts left stays for now: %s", self._lane, error)
            else:
                if found.folders or found.unfinished:
                    logger.info(
                        "lane %d: deleted %d folders (%d bytes) and %d unfinished files of attempts that were never committed",
                        self._lane,
                        len(found.folders),
                        found.bytes,
                        found.unfinished,
                    )
            await asyncio.sleep(EVERY_SECONDS)

    async def collect(self, states: Mapping[str, ModelState], owned: Callable[[], Awaitable[Owned]]) -> Collected:
        """Delete what is an orphan now.

        Args:
            states: Of all models of the lane.
            owned: Commits as the lane's owner, and says what is committed then. Asked only if there is something to delete.

        Raises:
            HeadraceError: the store or the broker can't be used; the next call finds what is left.
            FencedError, OutcomeUnknownError: from `owned`; nothing was deleted.
        """
        before = datetime.now(UTC) - self._grace
        own = f"{await self._attempts.origin()}-"
        listed = {
            model_id: [folder for folder in await asyncio.to_thread(self._list, model_id) if folder.attempt.startswith(own)]
            for model_id in states
        }
        orphans, suspects = self._judge(listed, Owned(states=states, running=frozenset()), before)
        if orphans or suspects:
            proof = await owned()
            _, suspects = self._judge(listed, proof, before)
            if suspects:
                await self._look_up(listed, suspects)
            orphans, _ = self._judge(listed, proof, before)
        for folder in orphans:
            await asyncio.to_thread(delete_folder, self._store, folder)
            logger.debug("deleted %s: its attempt was never committed", folder.key)
        unfinished = sum([await asyncio.to_thread(self._store.sweep, f"models/{model_id}/", before) for model_id in states])
        return Collected(
            folders=tuple(folder.key for folder in orphans), bytes=sum(folder.bytes for folder in orphans), unfinished=unfinished
        )

    def _list(self, model_id: str) -> list[StepFolder]:
        return list(list_folders(self._store, model_id))

    def _judge(self, listed: Mapping[str, list[StepFolder]], owned: Owned, before: datetime) -> tuple[list[StepFolder], set[Step]]:
        """The orphans, and the steps of which the ledger must say who committed them."""
        orphans: list[StepFolder] = []
        suspects: set[Step] = set()
        for model_id, state in owned.states.items():
            folders = listed.get(model_id, [])
            referenced = self._keys(state)
            several = _with_several_attempts(folders)
            for folder in folders:
                if folder.modified > before or folder.attempt in owned.running or folder.key in referenced:
                    continue
                step = (model_id, folder.incarnation, folder.step)
                current = folder.incarnation == state.incarnation
                if current and folder.step > state.policy_version:
                    orphans.append(folder)
                    continue
                committed = state.last_attempt if current and folder.step == state.policy_version else self._committed.get(step)
                if committed is not None and committed != folder.attempt:
                    orphans.append(folder)
                elif committed is None and step not in self._committed and (folder.incarnation, folder.step) in several:
                    suspects.add(step)
        return orphans, suspects

    def _keys(self, state: ModelState) -> set[str]:
        """Of the folders that a state names."""
        start = None if state.start_from is None else state.start_from.snapshot
        uris = [ref.uri for ref in (state.weights, state.snapshot, start) if ref is not None]
        return {key for uri in (*uris, *state.unknown_versions) if (key := self._key(uri)) is not None}

    def _key(self, uri: str) -> str | None:
        try:
            return self._store.resolve(uri)
        except InvalidKeyError:  # in another store: nothing here is meant
            return None

    async def _look_up(self, listed: Mapping[str, list[StepFolder]], suspects: set[Step]) -> None:
        """Note the committed attempt of each step, as far as the ledger has it."""
        # A record is written after its files: the oldest of a step's folders is no younger than the committed one.
        times = [f.modified for model_id, folders in listed.items() for f in folders if (model_id, f.incarnation, f.step) in suspects]
        start = (await offsets_since(self._options, self._ledger, min(times) - _CLOCKS_DIFFER))[self._lane]
        keys = {model_id.encode() for model_id, _, _ in suspects}
        missing = set(suspects)
        async with aclosing(stream_to_end(self._options, self._ledger, [self._lane], start={self._lane: start})) as batches:
            async for batch in batches:
                for raw in batch:
                    if raw.key not in keys:
                        continue
                    try:
                        record = open_record(raw.value, header_text(raw.headers), (StepRecord,))
                    except CodecError:
                        continue  # of a later release, perhaps: its step stays unknown, and its files stay
                    if isinstance(record, StepRecord) and (step := (record.model_id, record.incarnation, record.step)) in missing:
                        self._committed[step] = record.attempt
                        missing.remove(step)
                if not missing:
                    return
        self._committed.update(dict.fromkeys(missing))
        logger.info("lane %d: the ledger has no record of %d steps with several attempts in the store; all stay", self._lane, len(missing))


def _with_several_attempts(folders: Iterable[StepFolder]) -> set[tuple[str, int]]:
    attempts: dict[tuple[str, int], set[str]] = {}
    for folder in folders:
        attempts.setdefault((folder.incarnation, folder.step), set()).add(folder.attempt)
    return {step for step, found in attempts.items() if len(found) > 1}
