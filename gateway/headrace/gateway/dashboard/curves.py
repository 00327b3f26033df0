"""A model's steps as curves and bars that a page can draw, however many there are. Pure.

Guarantees: at most `points` buckets of consecutive steps, from the first to the last, each with mean, lowest and highest value, so that a
spike is not lost. Limitations: steps that do not have the metric; they are left out, and the curve goes over them; of a long run, more
points than `step_history` holds stretches.
"""

import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import islice

from headrace.gateway.dashboard.answers import Bucket, Curve, LagBar, Lags, VersionAt
from headrace.gateway.step_history import StepEntry, StepHistory, Stretch

LAG_STEPS = 50
"""Latest steps whose tokens make the bars."""
_NAMES_FROM = 20
_LAG = re.compile(r"lag_tokens_(\d+|16_up|unknown)")


def curve(history: StepHistory, metric: str, points: int) -> Curve:
    """A metric over the steps.

    Args:
        history: Of the model.
        metric: Its name.
        points: Buckets at most.
    """
    having = list(history.stretches(metric))
    size = max(1, -(-len(having) // points))
    return Curve(metric=metric, points=[_bucket(having[at : at + size]) for at in range(0, len(having), size)])


def _bucket(stretches: Sequence[Stretch]) -> Bucket:
    return Bucket(
        first=stretches[0].first,
        last=stretches[-1].last,
        at=stretches[-1].at,
        mean=sum(each.total for each in stretches) / sum(each.count for each in stretches),
        low=min(each.low for each in stretches),
        high=max(each.high for each in stretches),
    )


def metric_names(entries: Iterable[StepEntry]) -> list[str]:
    """What the latest steps have, without the parts that the lag histogram shows."""
    names = {name for entry in islice(reversed(list(entries)), _NAMES_FROM) for name in entry.metrics}
    return sorted(name for name in names if name.startswith("user/") or not ("_lag_" in name or name.startswith("lag_tokens_")))


def versions(moments: Sequence[tuple[int, datetime]], points: int) -> list[VersionAt]:
    """When versions came, evenly thinned; the first and the last are among them."""
    size = max(1, -(-len(moments) // points))
    kept = list(moments[::size])
    if moments and kept[-1] is not moments[-1]:
        kept.append(moments[-1])
    return [VersionAt(version=version, at=at) for version, at in kept]


def lags(entries: Iterable[StepEntry]) -> Lags:
    """Tokens by lag over the latest steps, with the mean ratio and the effective share by tokens."""
    latest = list(entries)[-LAG_STEPS:]
    names = {found[1] for entry in latest for name in entry.metrics if (found := _LAG.fullmatch(name))}
    return Lags(steps=len(latest), bars=[_bar(name, latest) for name in sorted(names, key=_order)])


def _bar(lag: str, entries: Iterable[StepEntry]) -> LagBar:
    tokens = 0.0
    sums: dict[str, float] = {}
    weights: dict[str, float] = {}
    for entry in entries:
        count = entry.metrics.get(f"lag_tokens_{lag}", 0.0)
        tokens += count
        for name in ("ratio_mean", "ess"):
            value = entry.metrics.get(f"{name}_lag_{lag}")
            if value is not None:
                sums[name] = sums.get(name, 0.0) + value * count
                weights[name] = weights.get(name, 0.0) + count
    means = {name: sums[name] / weights[name] for name in sums if weights[name]}
    return LagBar(lag=lag.replace("16_up", "16+"), tokens=tokens, ratio=means.get("ratio_mean"), ess=means.get("ess"))


def _order(lag: str) -> int:
    return int(lag) if lag.isdigit() else 16 if lag == "16_up" else 17
