"""A model's steps as curves and bars that a page can draw, however many there are. Pure.

Guarantees: at most `points` buckets of consecutive steps, each with mean, lowest and highest value, so that a spike is not lost. Gives up:
steps that do not have the metric; they are left out, and the curve goes over them.
"""

import re
from collections.abc import Iterable, Sequence
from itertools import islice

from headrace.gateway.dashboard.answers import Bucket, Curve, LagBar, Lags, VersionAt
from headrace.gateway.tables import StepEntry

LAG_STEPS = 50
"""Latest steps whose tokens make the bars."""
_NAMES_FROM = 20
_LAG = re.compile(r"lag_tokens_(\d+|16_up|unknown)")


def curve(entries: Sequence[StepEntry], metric: str, points: int) -> Curve:
    """A metric over the steps.

    Args:
        entries: In step order.
        metric: Its name.
        points: Buckets at most.
    """
    having = [(entry, entry.metrics[metric]) for entry in entries if metric in entry.metrics]
    size = max(1, -(-len(having) // points))
    buckets = []
    for at in range(0, len(having), size):
        stretch = having[at : at + size]
        values = [value for _, value in stretch]
        last = stretch[-1][0]
        buckets.append(
            Bucket(
                first=stretch[0][0].step,
                last=last.step,
                at=last.committed_at,
                mean=sum(values) / len(values),
                low=min(values),
                high=max(values),
            )
        )
    return Curve(metric=metric, points=buckets)


def metric_names(entries: Sequence[StepEntry]) -> list[str]:
    """What the latest steps have, without the parts that the lag histogram shows."""
    names = {name for entry in islice(reversed(entries), _NAMES_FROM) for name in entry.metrics}
    return sorted(name for name in names if "_lag_" not in name and not name.startswith("lag_tokens_"))


def versions(entries: Sequence[StepEntry], points: int) -> list[VersionAt]:
    """When versions came, evenly thinned; the first and the last are among them."""
    size = max(1, -(-len(entries) // points))
    kept = list(entries[::size])
    if entries and kept[-1] is not entries[-1]:
        kept.append(entries[-1])
    return [VersionAt(version=entry.step, at=entry.committed_at) for entry in kept]


def lags(entries: Sequence[StepEntry]) -> Lags:
    """Tokens by lag over the latest steps, with the mean ratio and the effective share by tokens."""
    latest = entries[-LAG_STEPS:]
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
