"""Two runs side by side, step by step: what was configured differently, and what came of it. Pure; the ledger is read by `ledger`.

Guarantees: every step of either run is there, in order; a number that one of the two lacks is None, never 0; digests say whether the
same groups, the same plan and the same weights was behind a step. Limitations: statistics; differences are B minus A, nothing is tested.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from headrace.core.ledger import ranges_text
from headrace.schemas.state import StepRecord
from headrace.schemas.training import SftConfig

METRICS = (
    "loss",
    "grad_norm",
    "reward_mean",
    "ratio_mean",
    "clip_fraction",
    "ess",
    "kl_behaviour",
    "kl_old",
    "kl_reference",
    "entropy",
    "lag_mean",
    "learning_rate",
)
"""What is compared unless asked otherwise, where at least one of the two has it."""

_ABSENT = "absent"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionDifference:
    """An option that the two have with different values."""

    name: str
    """Path, as `train.learning_rate`."""
    a: Any
    """JSON; `absent` where the settings of this one do not have it at all."""
    b: Any
    steps: str | None = None
    """Where they differ, as `1..4, 7`; None: throughout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricPair:
    """A number of both runs."""

    name: str
    a: float | None
    b: float | None
    difference: float | None
    """B minus A; None where one is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPair:
    """The same step of both runs; where one has no such step its `cut` is None, and so are its numbers."""

    step: int
    cut_a: str | None
    cut_b: str | None
    metrics: tuple[MetricPair, ...]
    same_groups: bool
    """Lane and offsets are equal. Says nothing where the two read different topics."""
    same_plan: bool
    same_weights: bool
    """The weights after the step are equal bit for bit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSummary:
    """A metric over the steps where both runs have it."""

    name: str
    steps: int
    mean_a: float
    mean_b: float
    mean_difference: float
    largest_difference: float
    """By size, with its sign."""
    largest_at: int
    """Step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySide:
    """Both runs."""

    config: tuple[OptionDifference, ...]
    steps: tuple[StepPair, ...]
    summary: tuple[MetricSummary, ...]
    same_weights_through: int | None
    """The last of the steps from the first on that left equal weights in both; None: not even the first."""


def side_by_side(a: Sequence[StepRecord], b: Sequence[StepRecord], metrics: Sequence[str] | None = None) -> SideBySide:
    """Set two ledgers side by side.

    Args:
        a: Steps of one model or fork, one record a step.
        b: Those of the other.
        metrics: `loss`, `grad_norm` and names in `StepRecord.metrics`; None: `METRICS`. What neither has is left out.
    """
    of_a, of_b = {record.step: record for record in a}, {record.step: record for record in b}
    steps = sorted(of_a.keys() | of_b.keys())
    names = [
        name
        for name in (METRICS if metrics is None else metrics)
        if any(metric(record, name) is not None for record in (*of_a.values(), *of_b.values()))
    ]
    pairs = tuple(_pair(step, of_a.get(step), of_b.get(step), names) for step in steps)
    through = None
    for pair in pairs:
        if not pair.same_weights:
            break
        through = pair.step
    return SideBySide(
        config=_step_differences(of_a, of_b),
        steps=pairs,
        summary=tuple(summary for name in names if (summary := _summary(name, pairs)) is not None),
        same_weights_through=through,
    )


def metric(record: StepRecord, name: str) -> float | None:
    """A number of a step by name; None if it has none."""
    if name in {"loss", "grad_norm"}:
        own: float | None = getattr(record, name)
        return own
    return record.metrics.get(name)


def option_differences(a: BaseModel, b: BaseModel) -> tuple[OptionDifference, ...]:
    """Fields of two settings that differ, by path, in the order of the first."""
    of_a, of_b = dict(_flat(a.model_dump(mode="json"))), dict(_flat(b.model_dump(mode="json")))
    return tuple(
        OptionDifference(name=name, a=of_a.get(name, _ABSENT), b=of_b.get(name, _ABSENT))
        for name in dict.fromkeys([*of_a, *of_b])
        if of_a.get(name, _ABSENT) != of_b.get(name, _ABSENT)
    )


def _step_differences(of_a: Mapping[int, StepRecord], of_b: Mapping[int, StepRecord]) -> tuple[OptionDifference, ...]:
    """Of the options that steps ran with, where both runs have the step; equal differences of several steps are one."""
    both = sorted(of_a.keys() & of_b.keys())
    found: dict[tuple[str, str], tuple[OptionDifference, list[int]]] = {}
    for step in both:
        for difference in (
            *_prefixed("config", option_differences(of_a[step].config, of_b[step].config)),
            *_sft_differences(of_a[step].sft, of_b[step].sft),
        ):
            values = repr((difference.a, difference.b))
            found.setdefault((difference.name, values), (difference, []))[1].append(step)
    return tuple(
        OptionDifference(name=difference.name, a=difference.a, b=difference.b, steps=None if steps == both else ranges_text(steps))
        for difference, steps in found.values()
    )


def _prefixed(prefix: str, differences: tuple[OptionDifference, ...]) -> Iterator[OptionDifference]:
    return (OptionDifference(name=f"{prefix}.{each.name}", a=each.a, b=each.b) for each in differences)


def _sft_differences(a: SftConfig | None, b: SftConfig | None) -> Iterator[OptionDifference]:
    if a is not None and b is not None:
        yield from _prefixed("sft", option_differences(a, b))
    elif a is not b:
        values = [None if each is None else each.model_dump(mode="json") for each in (a, b)]
        yield OptionDifference(name="sft", a=values[0], b=values[1])


def _flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _pair(step: int, a: StepRecord | None, b: StepRecord | None, names: Sequence[str]) -> StepPair:
    found = []
    for name in names:
        of_a, of_b = (None if record is None else metric(record, name) for record in (a, b))
        if of_a is not None or of_b is not None:
            difference = None if of_a is None or of_b is None else of_b - of_a
            found.append(MetricPair(name=name, a=of_a, b=of_b, difference=difference))
    return StepPair(
        step=step,
        cut_a=None if a is None else a.cut,
        cut_b=None if b is None else b.cut,
        metrics=tuple(found),
        same_groups=a is not None and b is not None and (a.lane, a.offsets) == (b.lane, b.offsets),
        same_plan=a is not None and b is not None and a.plan_digest == b.plan_digest,
        same_weights=a is not None and b is not None and a.weights.digest == b.weights.digest,
    )


def _summary(name: str, pairs: Sequence[StepPair]) -> MetricSummary | None:
    found = [
        (pair.step, each.a, each.b, each.difference)
        for pair in pairs
        for each in pair.metrics
        if each.name == name and each.a is not None and each.b is not None and each.difference is not None
    ]
    if not found:
        return None
    largest_at, _, _, largest = max(found, key=lambda each: abs(each[3]))
    mean_a, mean_b = (sum(values) / len(found) for values in zip(*((a, b) for _, a, b, _ in found), strict=True))
    return MetricSummary(
        name=name,
        steps=len(found),
        mean_a=mean_a,
        mean_b=mean_b,
        mean_difference=mean_b - mean_a,
        largest_difference=largest,
        largest_at=largest_at,
    )
