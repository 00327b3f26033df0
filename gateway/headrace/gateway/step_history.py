"""The committed steps of one model's life, as much of them as a gateway holds in memory. Pure.

The latest `RECENT` steps are held whole. Of each before them stay what names it (its time, job, weights, place in the ledger), in columns,
and of its metrics what a curve needs: mean, lowest and highest over at most `BUCKETS` stretches of steps, which grow as the run does. What
else there is to know of an old step is read from the ledger at its offset (`ledger_reading`).
Guarantees: about 150 bytes for each old step, and a bounded number for the rest, however long the run is; a spike of a metric is in the
curve for ever (lowest and highest as float32). Limitations: curves of metrics beyond `_NAMES`; the exact values of an old step without
reading it.

Old steps whole, read from the ledger at the offsets that the tables have of them.

Guarantees: what is answered is the committed record of that very step. Limitations: steps that retention took (the ledger is kept for ever
unless someone changed that); they are left out.
"""

import re
import uuid
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from headrace.core.fetching import fetch_offsets
from headrace.core.kafka import client_options
from headrace.core.kept import open_kept
from headrace.core.reading import OffsetLostError
from headrace.core.settings import Settings
from headrace.schemas.reasons import RejectionReason
from headrace.schemas.state import StepRecord
from headrace.schemas.weights import WeightsRef

RECENT = 64
BUCKETS = 128
_NAMES = 256
_HEX = re.compile(r"[0-9a-f]{64}")


_Old = bytes | tuple[str, str, str | None]
"""Digest and attempt of the weights, and the job's id, in 48 or 64 bytes; where one of them is of another form, (URI, digest, job)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BriefStep:
    """What is held of every step."""

    step: int
    incarnation: str
    job_id: str | None
    committed_at: datetime
    weights: WeightsRef
    hot_load_deployment: str | None
    hot_load_identity: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEntry(BriefStep):
    """A step whole, as far as any page or answer has use for it."""

    metrics: Mapping[str, float]
    report: WeightsRef | None
    groups: int
    updates: int
    cut: str
    refusals: dict[RejectionReason, int]
    trajectory_refusals: dict[RejectionReason, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A metric over consecutive steps."""

    first: int
    last: int
    at: datetime
    """Of the last."""
    count: int
    """Steps that have the metric."""
    total: float
    low: float
    high: float


class StepHistory:
    """Steps in their order.

    Args:
        incarnation: Of the model; another life of it is another history.
        partition: Of the ledger.
    """

    def __init__(self, incarnation: str, partition: int) -> None:
        self.incarnation = incarnation
        self.partition = partition
        self.recent: deque[StepEntry] = deque()
        """Whole, in order."""
        self._numbers, self._offsets, self._moments = array("q"), array("q"), array("d")
        """Of all steps; what is below is of those that are not recent."""
        self._old: list[_Old] = []
        self._folder = ""
        self._snapshots: dict[int, tuple[str | None, str]] = {}
        self._metrics = _Thinned()
        self._names: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def first_step(self) -> int:
        """The number of the first; 0: there is none."""
        return self._numbers[0] if self._numbers else 0

    @property
    def last(self) -> StepEntry | None:
        """The latest."""
        return self.recent[-1] if self.recent else None

    @property
    def numbers(self) -> list[int]:
        """Of all steps."""
        return self._numbers.tolist()

    def append(self, record: StepRecord, offset: int) -> None:
        """The next step; one that is there already is passed over, since a mirrored topic may have it twice."""
        if self._numbers and self._numbers[-1] >= record.step:
            return
        if record.metrics.keys() != self._names.keys():
            self._names = {name: i for i, name in enumerate(record.metrics)}
        values = array("d", (record.metrics[name] for name in self._names))
        entry = replace(entry_of(record), metrics=_Metrics(self._names, values))
        self.recent.append(entry)
        self._numbers.append(entry.step)
        self._offsets.append(offset)
        self._moments.append(entry.committed_at.timestamp())
        if len(self.recent) > RECENT:
            self._let_go(self.recent.popleft())

    def find(self, step: int) -> BriefStep | None:
        """A step by its number."""
        at = self._index(step)
        return None if at is None else self._at(at)

    def of_job(self, job_id: str) -> BriefStep | None:
        """The step that a job made."""
        for entry in reversed(self.recent):
            if entry.job_id == job_id:
                return entry
        packed = _uuid(job_id)
        for at in range(len(self._old) - 1, -1, -1):
            old = self._old[at]
            if (old[48:] == packed) if isinstance(old, bytes) else (old[2] == job_id):
                return self._at(at)
        return None

    def of_snapshot(self, identity: str, deployments: tuple[str, ...]) -> BriefStep | None:
        """The step that wrote a snapshot of this name for one of these deployments."""
        for entry in reversed(self.recent):
            if entry.hot_load_identity == identity and entry.hot_load_deployment in deployments:
                return entry
        wanted = {(deployment, identity) for deployment in deployments}
        return next((self.find(step) for step, found in reversed(self._snapshots.items()) if found in wanted), None)

    def moments(self) -> list[tuple[int, datetime]]:
        """(number, when it was committed) of all steps."""
        return [(number, _moment(at)) for number, at in zip(self._numbers, self._moments, strict=True)]

    def offsets_of(self, steps: list[int]) -> dict[int, int]:
        """Where the ledger has steps, by offset; those that there are not are left out."""
        found = ((step, self._index(step)) for step in steps)
        return {self._offsets[at]: step for step, at in found if at is not None}

    def stretches(self, metric: str) -> Iterator[Stretch]:
        """A metric from the first step to the last; stretches without it are left out."""
        for first, last, count, total, low, high in self._metrics.buckets(metric):
            at = _moment(self._moments[last])
            yield Stretch(first=self._numbers[first], last=self._numbers[last], at=at, count=count, total=total, low=low, high=high)
        for entry in self.recent:
            value = entry.metrics.get(metric)
            if value is not None:
                at, step = entry.committed_at, entry.step
                yield Stretch(first=step, last=step, at=at, count=1, total=value, low=value, high=value)

    def _index(self, step: int) -> int | None:
        at = bisect_left(self._numbers, step)
        return at if at < len(self._numbers) and self._numbers[at] == step else None

    def _at(self, at: int) -> BriefStep:
        if at >= len(self._old):
            return self.recent[at - len(self._old)]
        step, old = self._numbers[at], self._old[at]
        deployment, identity = self._snapshots.get(step, (None, None))
        return BriefStep(
            step=step,
            incarnation=self.incarnation,
            job_id=_job_of(old),
            committed_at=_moment(self._moments[at]),
            weights=_weights_of(old, f"{self._folder}/{step:08d}-"),
            hot_load_deployment=deployment,
            hot_load_identity=identity,
        )

    def _let_go(self, entry: StepEntry) -> None:
        """Keep of a step what stays of it."""
        if not self._old:
            self._folder = entry.weights.uri.rpartition("/")[0]
        self._old.append(_packed(entry, f"{self._folder}/{entry.step:08d}-"))
        if entry.hot_load_identity is not None:
            self._snapshots[entry.step] = (entry.hot_load_deployment, entry.hot_load_identity)
        self._metrics.add(entry.metrics)


def entry_of(record: StepRecord) -> StepEntry:
    """What a ledger record says."""
    return StepEntry(
        step=record.step,
        incarnation=record.incarnation,
        job_id=record.job_id,
        committed_at=record.committed_at,
        metrics=record.metrics,
        weights=record.weights,
        report=record.report,
        groups=record.groups,
        updates=record.updates,
        cut=record.cut,
        hot_load_deployment=record.options.hot_load_deployment,
        hot_load_identity=record.hot_load_identity,
        refusals=record.refusals,
        trajectory_refusals=record.trajectory_refusals,
    )


class _Metrics(Mapping[str, float]):
    """A step's metrics in an array; the names are shared by the steps that have the same ones."""

    __slots__ = ("_names", "_values")

    def __init__(self, names: dict[str, int], values: "array[float]") -> None:
        self._names = names
        self._values = values

    def __getitem__(self, name: str) -> float:
        return self._values[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _Series:
    """One metric, by bucket."""

    __slots__ = ("counts", "highs", "lows", "totals")

    def __init__(self) -> None:
        self.counts, self.totals, self.lows, self.highs = array("I"), array("d"), array("f"), array("f")

    def add(self, bucket: int, count: int, total: float, low: float, high: float) -> None:
        for column in (self.counts, self.totals, self.lows, self.highs):
            column.extend([0] * (bucket + 1 - len(column)))
        is_first = not self.counts[bucket]
        self.counts[bucket] += count
        self.totals[bucket] += total
        self.lows[bucket] = low if is_first else min(low, self.lows[bucket])
        self.highs[bucket] = high if is_first else max(high, self.highs[bucket])

    def rows(self) -> Iterator[tuple[int, int, float, float, float]]:
        """(bucket, count, total, low, high) of those that have any."""
        for bucket, row in enumerate(zip(self.counts, self.totals, self.lows, self.highs, strict=True)):
            if row[0]:
                yield bucket, *row


class _Thinned:
    """Metrics of steps over stretches of equal length, which is doubled when there are too many."""

    def __init__(self) -> None:
        self._width = 1
        self._steps = 0
        self._series: dict[str, _Series] = {}

    def add(self, metrics: Mapping[str, float]) -> None:
        if self._steps == BUCKETS * self._width:
            self._width *= 2
            self._series = {name: _halved(series) for name, series in self._series.items()}
        bucket = self._steps // self._width
        self._steps += 1
        for name, value in metrics.items():
            series = self._series.get(name)
            if series is None and len(self._series) < _NAMES:
                series = self._series[name] = _Series()
            if series is not None:
                series.add(bucket, 1, value, value, value)

    def buckets(self, metric: str) -> Iterator[tuple[int, int, int, float, float, float]]:
        """(place of the first step, of the last, count, total, low, high)."""
        series = self._series.get(metric)
        for bucket, count, total, low, high in series.rows() if series is not None else ():
            yield bucket * self._width, min((bucket + 1) * self._width, self._steps) - 1, count, total, low, high


def _halved(series: _Series) -> _Series:
    found = _Series()
    for bucket, count, total, low, high in series.rows():
        found.add(bucket // 2, count, total, low, high)
    return found


def _moment(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)


def _packed(entry: StepEntry, stem: str) -> _Old:
    """What names an old step: digest and attempt of its weights, and the job, where they are what a worker and a gateway make of them."""
    weights, attempt, job = entry.weights, _uuid(entry.weights.uri.removeprefix(stem)), _uuid(entry.job_id or "")
    if attempt is None or not _HEX.fullmatch(weights.digest) or (entry.job_id is not None and job is None):
        return weights.uri, weights.digest, entry.job_id
    return bytes.fromhex(weights.digest) + attempt + (job or b"")


def _uuid(text: str) -> bytes | None:
    try:
        found = uuid.UUID(text)
    except ValueError:
        return None
    return found.bytes if str(found) == text else None


def _job_of(old: _Old) -> str | None:
    if not isinstance(old, bytes):
        return old[2]
    return str(uuid.UUID(bytes=old[48:])) if len(old) > 48 else None


def _weights_of(old: _Old, stem: str) -> WeightsRef:
    if not isinstance(old, bytes):
        return WeightsRef(uri=old[0], digest=old[1])
    return WeightsRef(uri=f"{stem}{uuid.UUID(bytes=old[32:48])}", digest=old[:32].hex())


async def whole_steps(settings: Settings, history: StepHistory, steps: Iterable[int]) -> dict[int, StepEntry]:
    """Steps by their numbers: those that are held, the others from the ledger.

    Raises:
        HeadraceError: Kafka does not answer, or a record can't be read.
    """
    wanted = set(steps)
    found = {entry.step: entry for entry in history.recent if entry.step in wanted}
    places = history.offsets_of([step for step in wanted if step not in found])
    options, topic = client_options(settings.kafka, "headrace-gateway"), settings.topic_names.steps
    try:
        records = await fetch_offsets(options, topic, history.partition, places)
    except OffsetLostError as error:
        records = await fetch_offsets(options, topic, history.partition, places.keys() - set(error.missing))
    for record in records.values():
        step = open_kept(record, (StepRecord,))
        if isinstance(step, StepRecord):
            found[step.step] = entry_of(step)
    return found
