"""Advantages against published numbers and by property."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.trainer.tiny import group, sequence

from headrace.schemas.training import LossAggregation
from headrace.trainer.advantages import Credit, balance, batch_credits, group_advantages, population_deviation, sft_credits
from headrace.trainer.groups import TokenizedGroup, TokenizedTrajectory, TokenSequence, without_variance
from headrace.trainer.options import AdvantageOptions

ROUNDED = [0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1, 0.6]
"""One reward, added up in two orders, and read: 0.6000000000000001, 0.6, 0.6."""


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


@pytest.mark.parametrize("rewards", [[0.1] * 3, [0.97] * 16, [1e300] * 2, [5.0], [], ROUNDED, [1e6 * r for r in ROUNDED]])
@pytest.mark.parametrize("scale", [True, False])
def test_equal_rewards_give_exact_zeros(rewards: list[float], *, scale: bool):
    assert of(rewards, scale=scale) == [0.0] * len(rewards)


def credited(
    rewards: list[float], tokens: list[int], aggregation: LossAggregation = "sequence_mean_token_mean", **options: float
) -> tuple[list[float], list[float]]:
    """Of one group, a sequence a trajectory."""
    made = group(rewards, [sequence([1], [2] * n) for n in tokens])
    found = batch_credits([made], AdvantageOptions(**options), aggregation, 10.0 if aggregation == "constant_norm" else None)  # type: ignore[arg-type]
    return [c.advantage for c in found], [c.weight for c in found]


def default(groups: list[TokenizedGroup], **options: float) -> list[Credit]:
    return batch_credits(groups, AdvantageOptions(**options), "sequence_mean_token_mean", None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("b", "expected"),
    [(0.0, (1.5, -0.75)), (0.5, (2.0, -0.5)), (1.0, (3.0, 0.0)), (-0.5, (1.0, -1.0)), (-1.0, (0.0, -1.5))],
)
def test_published_balance(b: float, expected: tuple[float, float]):
    advantages, weights = credited([1, 0, 0], [4, 2, 2], balance=b)
    assert advantages == pytest.approx([expected[0], expected[1], expected[1]], abs=1e-12)
    # Published: 2/3 and 4/3, of mean 1 over the 8 tokens that the peer's loss then divides by.
    assert [8 * weight for weight in weights] == pytest.approx([2 / 3, 4 / 3, 4 / 3], abs=1e-12)


@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [
        ("token_mean", [1 / 9, 1 / 9, 1 / 9]),
        ("sequence_mean_token_mean", [1 / (3 * 4), 1 / (3 * 2), 1 / (3 * 3)]),
        ("sequence_mean_token_sum", [1 / 3, 1 / 3, 1 / 3]),
        ("constant_norm", [1 / 30, 1 / 30, 1 / 30]),
    ],
)
def test_each_aggregation_is_its_closed_form(aggregation: LossAggregation, weights: list[float]):
    """The trajectory at its group's mean (0.5) counts in every normaliser."""
    _, found = credited([1, 0, 0.5], [4, 2, 3], aggregation)
    assert found == pytest.approx(weights, abs=1e-15)


@given(data=st.lists(st.tuples(st.floats(-3, 3), st.integers(1, 9), st.floats(-2, 2)), min_size=2, max_size=8))
def test_aggregations_of_token_losses_are_what_their_names_say(data: list[tuple[float, int, float]]):
    """Token losses of a trajectory are `start`, `start` + 1, ...; the sum of weight times loss is the aggregate by its definition."""
    rewards, tokens, starts = (list(column) for column in zip(*data, strict=True))
    if max(rewards) == min(rewards):
        return
    losses = [[start + t for t in range(n)] for n, start in zip(tokens, starts, strict=True)]
    k = len(losses)
    expected: dict[LossAggregation, float] = {
        "token_mean": sum(map(sum, losses)) / sum(tokens),
        "sequence_mean_token_mean": sum(sum(own) / len(own) for own in losses) / k,
        "sequence_mean_token_sum": sum(map(sum, losses)) / k,
        "constant_norm": sum(sum(own) / 10 for own in losses) / k,
    }
    for aggregation, value in expected.items():
        _, weights = credited(rewards, tokens, aggregation)
        if weights:  # none where rewards differ by less than their mean can tell
            assert sum(w * sum(own) for w, own in zip(weights, losses, strict=True)) == pytest.approx(value, abs=1e-9)


def test_all_histories_of_a_trajectory_are_one_sequence():
    two = TokenizedTrajectory(reward=1.0, sequences=(sequence([1], [2, 2]), sequence([1], [3, 3, 3])))
    one = TokenizedTrajectory(reward=0.0, sequences=(sequence([1], [4]),))
    found = default([TokenizedGroup(group_id="g", trajectories=(two, one))])
    assert [(c.weight, c.trainable_tokens) for c in found] == [(1 / (2 * 5), 5), (1 / 2, 1)]


def test_normalisers_are_over_the_whole_batch_and_leave_out_groups_without_variance():
    groups = [
        group([0, 1], [sequence([1], [2] * 3)] * 2),
        group([5] * 3, [sequence([1], [2])] * 3),
        group([0, 2], [sequence([1], [2])] * 2),
    ]
    found = batch_credits(groups, AdvantageOptions(), "token_mean", None)
    assert [(c.group, c.weight) for c in found] == [(0, 1 / 8), (0, 1 / 8), (2, 1 / 8), (2, 1 / 8)]
    found = batch_credits(groups, AdvantageOptions(), "sequence_mean_token_sum", None)
    assert {c.weight for c in found} == {1 / 4}


def test_a_rollout_without_a_sampled_token_counts_in_the_baseline_only():
    silent = TokenSequence(token_ids=np.array([1], np.int32), trainable=np.array([False]), logprobs=np.array([np.nan], np.float32))
    made = group([3, 0, 0], [silent, sequence([1], [2]), sequence([1], [2])])
    found = default([made], scale_rewards=False, rescale=False)
    assert [(c.trajectory, c.advantage, c.weight) for c in found] == [(1, -1.0, 0.5), (2, -1.0, 0.5)]


def test_the_size_of_rewards_matters_between_groups_only_and_only_unscaled():
    groups = [group([0, 1], [sequence([1], [2, 3])] * 2), group([0, 100], [sequence([1], [2, 3])] * 2)]
    scaled = [c.advantage for c in default(groups)]
    unscaled = [c.advantage for c in default(groups, scale_rewards=False)]
    assert scaled == pytest.approx([-1, 1, -1, 1], abs=1e-5)
    assert unscaled == pytest.approx([-0.019802, 0.019802, -1.980198, 1.980198], abs=1e-6)


def test_without_rescale_advantages_are_those_of_their_group():
    groups = [group([0, 0, 1], [sequence([1], [2])] * 3), group([0, 8], [sequence([1], [2] * 5)] * 2)]
    found = [c.advantage for c in default(groups, rescale=False)]
    assert found == of([0, 0, 1]) + of([0, 8])


def test_a_trajectory_at_the_mean_of_its_group_counts():
    advantages, _ = credited([1, 0, 0.5], [2, 2, 2])
    assert advantages == pytest.approx([1.5, -1.5, 0.0], abs=1e-12)


def test_groups_without_variance_are_left_out():
    found = default([group([0.1] * 3, [sequence([1], [2])] * 3), group([0, 1], [sequence([1], [2])] * 2)])
    assert [(c.group, c.trajectory) for c in found] == [(1, 0), (1, 1)]


@pytest.mark.parametrize("rewards", [[3, 3], [7], [], ROUNDED, [0.0, 1e-9], [1e12, 1e12 + 999]])
def test_nothing_trains_where_everything_is_without_variance(rewards: list[float]):
    assert default([group(rewards, [sequence([1], [2])] * len(rewards))]) == []


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant_norm"])
@given(
    rewards=st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=9),
    tokens=st.integers(1, 50),
    b=st.floats(-0.99, 0.99),
)
def test_the_weighted_mean_size_is_one_by_the_aggregations_own_weights(
    aggregation: LossAggregation, rewards: list[float], tokens: int, b: float
):
    counts = [1 + (tokens * (i + 1)) % 7 for i in range(len(rewards))]
    advantages, weights = credited(rewards, counts, aggregation, balance=b)
    if without_variance(rewards):
        assert advantages == []
    if not advantages:  # rewards that differ by less than their mean can tell
        return
    shares = np.array(weights) * counts
    assert (np.abs(advantages) * shares).sum() / shares.sum() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("rewards", [[-1.7e308, 1.7e308], [1.7e308, *[-1.7e308] * 99], [0.0, 1e200], [0.0, 1e-8, 2e-8]])
@pytest.mark.parametrize("scale", [True, False])
def test_rewards_of_any_size_give_finite_advantages(rewards: list[float], *, scale: bool):
    with np.errstate(over="raise", invalid="raise"):
        advantages, _ = credited(rewards, [2] * len(rewards), scale_rewards=scale)
    assert np.abs(advantages).mean() == pytest.approx(1)
    assert np.all(np.isfinite(of(rewards, scale=scale)))


@pytest.mark.parametrize("balance", [0.0, 1.0, -1.0])
@pytest.mark.parametrize("scale", [True, False])
def test_rescaling_lifts_no_rounding(balance: float, *, scale: bool):
    """Rewards that differ by rounding, alone in a step or next to a group that has something to say, and a member at its group's mean."""
    apart = group([0, 1], [sequence([1], [2])] * 2)
    at_mean = group([0, 1, 0.1 + 0.2 + 0.3 - 0.1], [sequence([1], [2])] * 3)
    assert default([group(ROUNDED, [sequence([1], [2])] * 3)], scale_rewards=scale, balance=balance) == []
    assert default([apart, group(ROUNDED, [sequence([1], [2])] * 3)], scale_rewards=scale, balance=balance) == default(
        [apart], scale_rewards=scale, balance=balance
    )
    assert default([at_mean], scale_rewards=scale, balance=balance)[2].advantage == 0


def test_constant_norm_needs_its_constant():
    with pytest.raises(ValueError, match="loss_aggregation_constant above 0, not None"):
        batch_credits([group([0, 1], [sequence([1], [2])] * 2)], AdvantageOptions(), "constant_norm", None)


def test_fine_tuning_weighs_every_sampled_token_alike_whatever_the_reward():
    groups = [group([5, 5], [sequence([1], [2] * 3), sequence([1], [2])]), group([0], [sequence([1], [2] * 4)])]
    found = sft_credits(groups)
    assert [(c.group, c.trajectory, c.advantage, c.weight, c.trainable_tokens) for c in found] == [
        (0, 0, 1.0, 1 / 8, 3),
        (0, 1, 1.0, 1 / 8, 1),
        (1, 0, 1.0, 1 / 8, 4),
    ]
    assert sft_credits([]) == []


@pytest.mark.parametrize(
    ("rewards", "deviation"), [([1, 1, 1], 0.0), ([0, 1], 0.5), ([1, 2, 3, 4], 1.25**0.5), ([-1.7e308, 1.7e308], 1.7e308), ([0.1] * 3, 0.0)]
)
def test_population_deviation(rewards: list[float], deviation: float):
    assert population_deviation(np.array(rewards, dtype=np.float64)) == pytest.approx(deviation, rel=1e-12)


def test_balance_leaves_its_argument_alone():
    values = np.array([1.0, -1.0])
    balance(values, 0.5)
    assert values.tolist() == [1.0, -1.0]
