"""The trend of the rewards' deviation against least squares, and where there is no line to speak of."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.trainer.tiny import group, sequence

from headrace.schemas.state import RewardTrend
from headrace.trainer.reward_trend import add, multiplier, reward_deviation


def trend(points: list[tuple[int, float]]) -> RewardTrend:
    found = RewardTrend()
    for step, deviation in points:
        found = add(found, step, deviation)
    return found


@given(start=st.integers(0, 1000), deviations=st.lists(st.floats(0.01, 5), min_size=2, max_size=30))
def test_the_multiplier_is_the_fitted_line_now_over_its_start(start: int, deviations: list[float]):
    steps = np.arange(start, start + len(deviations), dtype=np.float64)
    # Centred, so that the fit here keeps its digits.
    slope = float(((steps - steps.mean()) * (np.array(deviations) - np.mean(deviations))).sum() / ((steps - steps.mean()) ** 2).sum())
    at_zero = float(np.mean(deviations) - slope * steps.mean())
    got = multiplier(trend([(start + i, y) for i, y in enumerate(deviations)]))
    if abs(at_zero) < 1e-6 * (np.mean(deviations) + abs(slope) * steps.mean()):
        return  # float64 can't tell its sign
    expected = max(0.0, (slope * float(steps[-1]) + at_zero) / at_zero) if at_zero > 0 else 1.0
    assert got == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_a_falling_deviation_lowers_the_rate_and_a_rising_one_raises_it():
    # y = 0.5 - 0.1 x: at step 3 0.2 of 0.5.
    assert multiplier(trend([(1, 0.4), (2, 0.3), (3, 0.2)])) == pytest.approx(0.4, rel=1e-9)
    assert multiplier(trend([(1, 0.6), (2, 0.7)])) == pytest.approx(0.7 / 0.5, rel=1e-9)


def test_a_line_below_zero_stops_the_rate_and_does_not_turn_it_around():
    assert multiplier(trend([(0, 1.0), (1, 0.0), (2, 0.0), (3, 0.0), (4, -3.0)])) == 0.0


@pytest.mark.parametrize(
    "points",
    [
        [],
        [(1, 0.3)],
        [(5, 0.3), (5, 0.9)],  # one step only: no line
        [(2, 0.1), (3, 1.0)],  # starts below 0
        [(1, 0.1), (2, 0.2), (3, 0.1 + 0.2)],  # through the origin, but for rounding
        [(1, 0.0), (2, 0.0)],
    ],
)
def test_without_a_line_to_speak_of_the_rate_stays(points: list[tuple[int, float]]):
    assert multiplier(trend(points)) == 1.0


@pytest.mark.parametrize("deviation", [math.nan, math.inf, 1.7e308])
def test_a_point_that_is_not_finite_or_overflows_a_sum_leaves_the_trend(deviation: float):
    before = trend([(1, 0.4), (2, 0.3)])
    assert add(before, 3, deviation) == before


@given(points=st.lists(st.tuples(st.integers(0, 10**12), st.floats(0, 1e300)), max_size=20))
def test_any_points_give_a_finite_state_and_multiplier(points: list[tuple[int, float]]):
    found = trend(points)
    assert RewardTrend.model_validate_json(found.model_dump_json()) == found
    assert 0 <= multiplier(found) < math.inf


def test_the_deviation_of_a_batch_is_the_mean_over_groups_that_have_a_trajectory():
    groups = [
        group([0, 1], [sequence([1], [2])] * 2),
        group([0.1] * 3, [sequence([1], [2])] * 3),
        group([], []),
        group([7], [sequence([1], [2])]),
    ]
    assert reward_deviation(groups) == pytest.approx(0.5 / 3, abs=1e-15)
    assert reward_deviation([group([], [])]) is None
    assert reward_deviation([group([-1.7e308, 1.7e308], [sequence([1], [2])] * 2)] * 3) == pytest.approx(1.7e308)
