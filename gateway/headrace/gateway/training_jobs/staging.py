"""Groups of a request on their way: read, named, encoded; small ones as records, large ones as claims on the object store.

Guarantees: few groups at a time are Python objects, and at most about `_INLINE_BYTES` of all of them are held: a job of 50 MB does not
take several times that; payloads are durable before the transaction that names them; ids of groups follow from the job's, so a repeat makes
the same ones. Limitations: payloads of a request whose later groups have faults: they lie in the store unused. Computes and blocks: not
for an event loop.
"""

import uuid
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from headrace.core.store import ObjectStore
from headrace.gateway.job_records import group_record
from headrace.gateway.log_writer import Sealed
from headrace.gateway.training_jobs.config import Faults, parts_of
from headrace.producers.errors import InvalidGroupError
from headrace.schemas.codec import SampledGroup
from headrace.schemas.topics import Topics

_INLINE_BYTES = 8 * 1024 * 1024
"""Of one job in the log: a transaction is short, and held in memory."""
_STORING = 4
"""Groups that are encoded and stored at a time."""
Loc = list[str | int]
Read = Callable[[Faults], SampledGroup | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Where a job's groups go, and what all of them say."""

    job_id: str
    model_id: str
    topics: Topics
    lane: int
    inline_limit: int
    """Bytes of an encoded group above which it becomes a claim; 0: always."""
    is_sft: bool = False
    """They are examples."""
    without_logprobs: bool | None = None
    """The job's `allow_training_without_logprobs`, where it says one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A job's groups, ready for its transaction."""

    records: list[Sealed]
    group_ids: tuple[str, ...]


def stage(store: ObjectStore, groups: Iterable[tuple[Loc, Read]], placed: Placed, faults: Faults) -> Staged:
    """Stage the groups of a job.

    Args:
        store: Takes the large ones.
        groups: Where each stands in the request, and how it is read.
        placed: Where they go.
        faults: Takes what is wrong; from the first fault on nothing more is stored, the rest is only read.

    Raises:
        StoreUnavailableError: the store, or its disk.
    """
    ids: list[str] = []
    records: list[Sealed] = []
    storing: deque[tuple[Loc, Future[Sealed]]] = deque()
    held = 0

    def collect() -> None:
        nonlocal held
        loc, future = storing.popleft()
        try:
            record = future.result()
        except InvalidGroupError as error:
            faults.add([*loc, *parts_of(error.path)], error.detail)
            return
        held += len(record.value or b"")
        records.append(record)

    with ThreadPoolExecutor(_STORING, thread_name_prefix="headrace-staging") as pool:
        for i, (loc, read) in enumerate(groups):
            if faults.full:
                break
            group = read(faults)
            if group is None or faults:
                continue
            ids.append(str(uuid.uuid5(uuid.UUID(placed.job_id), str(i))))
            _name(group, ids[-1], placed)
            if len(storing) >= _STORING:
                collect()
            limit = min(placed.inline_limit, _INLINE_BYTES - held)
            storing.append((loc, pool.submit(_record, group, placed, store, limit)))
            del group
        while storing:
            collect()
    return Staged(records=records, group_ids=tuple(ids))


def _name(group: SampledGroup, group_id: str, placed: Placed) -> None:
    inner = group.group
    inner.group_id, inner.job_id = group_id, placed.job_id
    inner.purpose = "sft" if placed.is_sft else None  # what says nothing is for rl: the wire stays what older readers know
    inner.allow_training_without_logprobs = placed.without_logprobs


def _record(group: SampledGroup, placed: Placed, store: ObjectStore, limit: int) -> Sealed:
    return group_record(
        group,
        topics=placed.topics,
        model_id=placed.model_id,
        lane=placed.lane,
        store=store,
        encoding="safetensors",
        inline_limit=max(0, limit),
    )
