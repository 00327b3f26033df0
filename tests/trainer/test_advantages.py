"""Advantages against published numbers and by property."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.trainer.tiny import group, sequence

from headrace.trainer.advantages import balance, batch_credits, group_advantages
from headrace.trainer.options import AdvantageOptions


def of(rewards: list[float], *, scale: bool = True) -> list[float]:
    return group_advantages(np.array(rewards, dtype=np.float64), scale=scale).tolist()


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0, 1], [-0.999998, 0.999998]),
        ([0, 0, 1], [-0.707105, -0.707105, 1.414211]),
        ([1, 2, 3, 4], [-1.341640, -0.447213, 0.447213, 1.341640]),
        ([0, 1e-9], [-0.00049975, 0.00049975]),
    ],
)
def test_published_advantages(rewards: list[float], expected: list[float]):
    assert of(rewards) == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize("rewards", [[0.1] * 3, [0.97] * 16, [1e300] * 2, [5.0], []])
@pytest.mark.parametrize("scale", [True, False])
def test_equal_rewards_give_exact_zeros(rewards: list[float], *, scale: bool):
    assert of(rewards, scale=scale) == [0.0] * len(rewards)


def credited(rewards: list[float], tokens: list[int], **options: float) -> tuple[list[float], list[float]]:
    made = group(rewards, [sequence([1], [2] * n) for n in tokens])
    found = batch_credits([made], AdvantageOptions(**options))  # type: ignore[arg-type]
    return [c.advantage for c in found], [c.weight for c in found]


@pytest.mark.parametrize(
    ("b", "expected"),
    [(0.0, (1.5, -0.75)), (0.5, (2.0, -0.5)), (1.0, (3.0, 0.0)), (-0.5, (1.0, -1.0)), (-1.0, (0.0, -1.5))],
)
def test_published_balance(b: float, expected: tuple[float, float]):
    advantages, weights = credited([1, 0, 0], [4, 2, 2], balance=b)
    assert advantages == pytest.approx([expected[0], expected[1], expected[1]], abs=1e-6)
    assert weights == pytest.approx([2 / 3, 4 / 3, 4 / 3], abs=1e-6)


def test_the_size_of_rewards_matters_between_groups_only_and_only_unscaled():
    groups = [group([0, 1], [sequence([1], [2, 3])] * 2), group([0, 100], [sequence([1], [2, 3])] * 2)]
    scaled = [c.advantage for c in batch_credits(groups, AdvantageOptions())]
    unscaled = [c.advantage for c in batch_credits(groups, AdvantageOptions(scale_rewards=False))]
    assert scaled == pytest.approx([-1, 1, -1, 1], abs=1e-5)
    assert unscaled == pytest.approx([-0.019802, 0.019802, -1.980198, 1.980198], abs=1e-6)


def test_a_trajectory_at_the_mean_of_its_group_counts():
    advantages, _ = credited([1, 0, 0.5], [2, 2, 2])
    assert advantages == pytest.approx([1.5, -1.5, 0.0], abs=1e-6)


def test_groups_without_variance_are_left_out():
    found = batch_credits([group([0.1] * 3, [sequence([1], [2])] * 3), group([0, 1], [sequence([1], [2])] * 2)], AdvantageOptions())
    assert [(c.group, c.trajectory) for c in found] == [(1, 0), (1, 1)]


def test_nothing_trains_where_everything_is_without_variance():
    assert batch_credits([group([3, 3], [sequence([1], [2])] * 2)], AdvantageOptions()) == []


@given(
    rewards=st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=9),
    tokens=st.integers(1, 50),
    b=st.floats(-0.99, 0.99),
)
def test_weighted_mean_size_is_one(rewards: list[float], tokens: int, b: float):
    counts = [1 + (tokens * (i + 1)) % 7 for i in range(len(rewards))]
    advantages, weights = credited(rewards, counts, balance=b)
    if max(rewards) == min(rewards):
        assert advantages == []
        return
    n = np.array(counts)
    assert (np.abs(advantages) * weights * n).sum() / n.sum() == pytest.approx(1)
    assert (np.array(weights) * n).sum() / n.sum() == pytest.approx(1)


def test_balance_leaves_its_argument_alone():
    values = np.array([1.0, -1.0])
    balance(values, 0.5)
    assert values.tolist() == [1.0, -1.0]
