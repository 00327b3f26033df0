"""Where a replay begins: the nearest state before its first step that still exists, and the ledger's records from there on.

Snapshots are kept for recovery, the last few of each model, so a replay of early steps often begins at the base model. They are named by
the ledger, or, where a worker stored one between steps, by the store alone: its manifest says which attempt it is the state of. Guarantees:
the state that is named exists, each of its files was seen in the store; the records are gapless from there to the last step that was asked
for. Limitations: holding the snapshot against its owner, who may delete it the moment after; the run then says so.

Where in the log to look: the offsets that times stand for.

Times are those of `trajectory-groups`, which the broker stamps (LogAppendTime): they grow with the offsets, and no producer's clock counts.
Guarantees: a span without records is empty, never an error.
"""

import asyncio
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime

from aiokafka import AIOKafkaConsumer, TopicPartition

from headrace.consumers.worker.rerun import RESTART_CUTS
from headrace.consumers.worker.storage.stored_snapshots import stored_snapshots
from headrace.core.errors import HeadraceError
from headrace.core.ledger import StepRange, read_ledger, stream_ledger
from headrace.core.settings import Settings
from headrace.core.store import DigestMismatchError, ObjectNotFoundError, ObjectStore, read_manifest
from headrace.schemas.state import ModelState, StepRecord
from headrace.schemas.weights import WeightsRef


class NothingToReplayError(HeadraceError):
    """The steps that were asked for can't be reached; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A step whose state is stored."""

    step: int
    snapshot: WeightsRef


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """A step whose state was stored once."""

    step: int
    snapshot: WeightsRef
    restarts: bool = False
    """No step before it leads to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What to run."""

    start: Start | None
    """None: the base model, or the weights that the model began with."""
    gone: int
    """Snapshots nearer to the first step that do not exist any more."""
    first: int
    """The first step that was asked for; those before it only lead there."""
    records: tuple[StepRecord, ...]
    """From the step after the start to the last that was asked for."""


async def find_route(settings: Settings, store: ObjectStore, state: ModelState, steps: StepRange) -> Route:
    """The way to the steps that were asked for.

    Args:
        settings: Of this process.
        store: Where snapshots are.
        state: Of the model.
        steps: Asked for.

    Raises:
        NothingToReplayError: the ledger does not have them, or a step that began again can't be begun any more.
        HeadraceError: Kafka or the store can't be reached.
    """
    first, last, once = await _bounds(settings, store, state, steps)
    start, gone = await asyncio.to_thread(_nearest, store, [stored for stored in once if stored.step < first])
    begin = StepRange(first=1 if start is None else start.step + 1, last=last)
    records = await read_ledger(settings, state.model_id, incarnation=state.incarnation, steps=begin, shadow_of=state.shadow_of)
    missing = sorted(set(range(begin.first or 1, last + 1)) - {record.step for record in records})
    if missing:
        raise NothingToReplayError(f"the ledger of {state.name} does not have step {missing[0]}, which leads to step {last}")
    return Route(start=start, gone=gone, first=first, records=tuple(records))


async def _bounds(settings: Settings, store: ObjectStore, state: ModelState, steps: StepRange) -> tuple[int, int, list[_Stored]]:
    """First and last step that the range means in this ledger, and all states that were stored."""
    between = await asyncio.to_thread(stored_snapshots, store, state)
    once: list[_Stored] = []
    end = 0
    stream = stream_ledger(settings, state.model_id, incarnation=state.incarnation, shadow_of=state.shadow_of)
    async with aclosing(stream):
        async for record in stream:
            end = record.step
            snapshot = record.snapshot or between.get((record.step, record.attempt))
            if snapshot is not None:
                once.append(_Stored(step=record.step, snapshot=snapshot, restarts=record.cut in RESTART_CUTS))
    first, last = steps.first or 1, end if steps.last is None else steps.last
    if end == 0:
        raise NothingToReplayError(f"{state.name} has no step yet")
    if max(first, last) > end:
        raise NothingToReplayError(f"steps {steps} were asked for, but the ledger of {state.name} ends at step {end}")
    return first, last, once


def _nearest(store: ObjectStore, once: list[_Stored]) -> tuple[Start | None, int]:
    """The last one that still exists, and how many behind it do not. Blocks."""
    for gone, stored in enumerate(sorted(once, key=lambda stored: -stored.step)):
        if _exists(store, stored.snapshot):
            return Start(step=stored.step, snapshot=stored.snapshot), gone
        if stored.restarts:
            raise NothingToReplayError(
                f"step {stored.step} began again from a snapshot that is gone ({stored.snapshot.uri}): what came after can't be run again"
            )
    return None, len(once)


def _exists(store: ObjectStore, snapshot: WeightsRef) -> bool:
    try:
        manifest = read_manifest(store, snapshot.uri, snapshot.digest)
        for file in manifest.files:
            store.head(f"{store.resolve(snapshot.uri)}/{file.path}")
    except (ObjectNotFoundError, DigestMismatchError):
        return False
    return True


async def span_of(
    consumer: AIOKafkaConsumer, where: TopicPartition, end: int, since: datetime | None, until: datetime | None
) -> tuple[int, int]:
    """Offsets `[first, stop)` of the records that came between two times.

    Args:
        consumer: Any, of this cluster.
        where: The partition.
        end: Offset after the last record that is asked for.
        since: Included; None: from the beginning.
        until: Excluded; None: to the end.
    """
    first = (await consumer.beginning_offsets([where]))[where]
    if since is not None:
        first = max(first, await _offset_at(consumer, where, since, end))
    stop = end if until is None else min(end, await _offset_at(consumer, where, until, end))
    return first, max(first, stop)


async def _offset_at(consumer: AIOKafkaConsumer, where: TopicPartition, time: datetime, end: int) -> int:
    """Offset of the first record at or after a time; the end where there is none."""
    milliseconds = max(0, int(time.timestamp() * 1000))
    found = (await consumer.offsets_for_times({where: milliseconds}))[where]
    return end if found is None else int(found.offset)
