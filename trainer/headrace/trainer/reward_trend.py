"""`scale_learning_rate_by_reward_std_dev`: the rate follows the trend of the rewards' deviation inside groups.

A straight line y = m x + c is fitted by least squares through (x = step, y = reward deviation) of the model's steps so far; the rate
is multiplied by (m x_last + c) / c, the line's value now over its value at step 0. Where rewards spread less and less, the rate falls.

Guarantees: the state is six sums (`RewardTrend`), so it is part of the model's state and does not grow; the line is solved in exact
rational arithmetic on these sums, so no cancellation decides; the multiplier is finite, never negative, and 1 where there is no line
to speak of: fewer than two points, one step only, or a value at step 0 that is not above rounding errors. Limitations: an upper bound (a
line that starts near 0 multiplies by much; `learning_rate` bounds the rate itself); digits, where a trend begins at a step in the
millions, since the sums are float64 (a model's begins at its first step).
"""

import math
import sys
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from headrace.schemas.state import RewardTrend
from headrace.trainer.advantages import population_deviation
from headrace.trainer.groups import TokenizedGroup

# The sums are float64: after many steps their last digits are noise, and a line through the origin must not get a start out of them.
_NOISE = Fraction(1, 10**9)


def reward_deviation(groups: Sequence[TokenizedGroup]) -> float | None:
    """Mean over groups of the population standard deviation of raw rewards; None where no group has a trajectory."""
    deviations = [
        population_deviation(np.array([trajectory.reward for trajectory in group.trajectories], dtype=np.float64))
        for group in groups
        if group.trajectories
    ]
    # Divided before it is summed: deviations near the end of float64 must not overflow.
    return math.fsum(deviation / len(deviations) for deviation in deviations) if deviations else None


def add(trend: RewardTrend, step: int, deviation: float) -> RewardTrend:
    """With one more point; as it was where the point or a sum would not be finite."""
    sums = {
        "x": trend.x + step,
        "y": trend.y + deviation,
        "xx": trend.xx + float(step) * step,
        "xy": trend.xy + step * deviation,
        "last_x": float(step),
    }
    if not all(math.isfinite(value) for value in sums.values()):
        return trend
    return RewardTrend(n=trend.n + 1, **sums)


def multiplier(trend: RewardTrend) -> float:
    """What the rate is multiplied by: max(0, (m x_last + c) / c) if n > 1 and c > 0, else 1."""
    n, x, y, xx, xy, last = (Fraction(value) for value in (trend.n, trend.x, trend.y, trend.xx, trend.xy, trend.last_x))
    spread = n * xx - x * x
    if n < 2 or spread <= 0:
        return 1.0
    slope = (n * xy - x * y) / spread
    start = (y - slope * x) / n
    if start <= _NOISE * (abs(y) + abs(slope * x)) / n:
        return 1.0
    try:
        return max(0.0, float((slope * last + start) / start))
    except OverflowError:
        return sys.float_info.max
