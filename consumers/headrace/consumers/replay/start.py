"""Finds where a replay begins: the nearest state before its first step that still exists, and the ledger's records from there on.

Only the last few snapshots of a model are kept, for recovery; a replay of early steps therefore often begins at the base model. The ledger
names a snapshot, or, where a worker stored one between steps, the store alone: its manifest names the attempt.
Guarantees: the chosen state exists, each of its files was found in the store; the records from there to the last step have no gap.
Limitations: the owner may delete the snapshot a moment later. The run then fails and says so.
"""

import asyncio
from contextlib import aclosing
from dataclasses import dataclass

from headrace.consumers.worker.rerun import RESTART_CUTS
from headrace.consumers.worker.storage.stored_snapshots import stored_snapshots
from headrace.core.errors import HeadraceError
from headrace.core.ledger import StepRange, read_ledger, stream_ledger
from headrace.core.settings import Settings
from headrace.core.store import DigestMismatchError, ObjectNotFoundError, ObjectStore, read_manifest
from headrace.schemas.state import ModelState, StepRecord
from headrace.schemas.weights import WeightsRef


class NothingToReplayError(HeadraceError):
    """The requested steps can't be replayed; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A step whose state is, or was, stored."""

    step: int
    snapshot: WeightsRef
    restarts: bool = False
    """No step before it leads to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The steps to run."""

    start: Start | None
    """None: the base model, or the weights that the model began with."""
    gone: int
    """Snapshots nearer to the first step that do not exist any more."""
    first: int
    """The first requested step; those before it only lead there."""
    records: tuple[StepRecord, ...]
    """From the step after the start to the last requested one."""


async def find_route(settings: Settings, store: ObjectStore, state: ModelState, steps: StepRange) -> Route:
    """Find the way to the requested steps.

    Args:
        settings: Of this process.
        store: Where snapshots are.
        state: Of the model.
        steps: The requested ones.

    Raises:
        NothingToReplayError: the ledger does not have them, or a step that restarted from a snapshot can't be started any more.
        HeadraceError: Kafka or the store can't be reached.
    """
    end, stored = await _stored_states(settings, store, state)
    first, last = steps.first or 1, end if steps.last is None else steps.last
    if end == 0:
        raise NothingToReplayError(f"{state.name} has no step yet")
    if max(first, last) > end:
        raise NothingToReplayError(f"steps {steps} were asked for, but the ledger of {state.name} ends at step {end}")
    start, gone = await asyncio.to_thread(_nearest, store, [each for each in stored if each.step < first])
    begin = 1 if start is None else start.step + 1
    span = StepRange(first=begin, last=last)
    records = await read_ledger(settings, state.model_id, incarnation=state.incarnation, steps=span, shadow_of=state.shadow_of)
    if missing := sorted(set(range(begin, last + 1)) - {record.step for record in records}):
        raise NothingToReplayError(f"the ledger of {state.name} does not have step {missing[0]}, which leads to step {last}")
    return Route(start=start, gone=gone, first=first, records=tuple(records))


async def _stored_states(settings: Settings, store: ObjectStore, state: ModelState) -> tuple[int, list[Start]]:
    """The ledger's last step, and every step whose state was stored once."""
    between = await asyncio.to_thread(stored_snapshots, store, state)
    found: list[Start] = []
    end = 0
    async with aclosing(stream_ledger(settings, state.model_id, incarnation=state.incarnation, shadow_of=state.shadow_of)) as stream:
        async for record in stream:
            end = record.step
            snapshot = record.snapshot or between.get((record.step, record.attempt))
            if snapshot is not None:
                found.append(Start(step=record.step, snapshot=snapshot, restarts=record.cut in RESTART_CUTS))
    return end, found


def _nearest(store: ObjectStore, stored: list[Start]) -> tuple[Start | None, int]:
    """The last one that still exists, and how many after it do not. Blocks."""
    for gone, each in enumerate(sorted(stored, key=lambda each: -each.step)):
        if _exists(store, each.snapshot):
            return each, gone
        if each.restarts:
            raise NothingToReplayError(
                f"step {each.step} began again from a snapshot that is gone ({each.snapshot.uri}): what came after can't be run again"
            )
    return None, len(stored)


def _exists(store: ObjectStore, snapshot: WeightsRef) -> bool:
    try:
        for file in read_manifest(store, snapshot.uri, snapshot.digest).files:
            store.head(f"{store.resolve(snapshot.uri)}/{file.path}")
    except (ObjectNotFoundError, DigestMismatchError):
        return False
    return True
