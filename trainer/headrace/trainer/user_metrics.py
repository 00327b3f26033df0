"""What rollouts measured themselves: `Trajectory.metrics`, averaged over a step as `user/NAME`.

The mean of a name is over the trajectories of the step's groups that have it: those that reward_mean is over, so groups without variance
count and rejected members do not. True is 1, false is 0.

Guarantees: a pure function of the step's groups, so a step that is run again has the same numbers; finite numbers only; at most `NAMES`
names of at most `LENGTH` characters in a trajectory and in a step, the first in the order of the alphabet. What is left out, a number that
float64 can't hold included, is counted: `user_metrics_dropped`, in (trajectory, name) pairs. Limitations: no metrics of groups.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

NAMES = 64
LENGTH = 64


@dataclass(frozen=True, slots=True)
class UserMetrics:
    """Of one trajectory, within the bounds."""

    values: tuple[tuple[str, float], ...] = ()
    dropped: int = 0

    @classmethod
    def of(cls, metrics: Mapping[str, float]) -> "UserMetrics":
        """As they were sent; bools and integers, too."""
        if not metrics:
            return NO_METRICS
        kept = [(name, value) for name in sorted(metrics) if (value := _finite(metrics[name])) is not None and _fits(name)][:NAMES]
        return cls(tuple(kept), len(metrics) - len(kept))


NO_METRICS = UserMetrics()


def averaged(trajectories: Iterable[UserMetrics]) -> dict[str, float]:
    """The metrics of a step; none where no trajectory has any."""
    found: dict[str, list[float]] = {}
    dropped = 0
    for trajectory in trajectories:
        dropped += trajectory.dropped
        for name, value in trajectory.values:
            found.setdefault(name, []).append(value)
    names = sorted(found)
    dropped += sum(len(found[name]) for name in names[NAMES:])
    # Divided first: numbers near the end of float64 must not overflow their sum.
    means = {f"user/{name}": math.fsum(value / len(found[name]) for value in found[name]) for name in names[:NAMES]}
    return means | ({"user_metrics_dropped": float(dropped)} if dropped else {})


def _finite(value: float) -> float | None:
    try:
        return number if math.isfinite(number := float(value)) else None
    except OverflowError:  # an integer of hundreds of digits
        return None


def _fits(name: str) -> bool:
    return 0 < len(name) <= LENGTH and name.isprintable()
