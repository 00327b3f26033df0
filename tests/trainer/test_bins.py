"""The plan of bins: cap, completeness, even micro steps, number of micro steps."""

import numpy as np
import pytest
from benchmarks import mixes
from hypothesis import given
from hypothesis import strategies as st

from headrace.trainer.bins import fewest_bins, plan_bins, sync_efficiency


@given(
    tokens=st.lists(st.integers(1, 50), max_size=60),
    capacity=st.integers(50, 120),
    ranks=st.integers(1, 5),
    seed=st.integers(0, 9),
)
def test_every_item_stands_once_under_the_cap_and_ranks_have_equal_numbers_of_micro_steps(
    tokens: list[int], capacity: int, ranks: int, seed: int
):
    costs = np.random.default_rng(seed).random(len(tokens)) * tokens
    plan = plan_bins(tokens, costs.tolist(), capacity, ranks)
    bins = [held for step in plan for held in step]
    assert sorted(item for held in bins for item in held) == list(range(len(tokens)))
    assert all(sum(tokens[i] for i in held) <= capacity for held in bins)
    assert all(len(step) == ranks for step in plan)
    assert all(any(step) for step in plan)
    assert all(bins) or max(map(len, bins)) == 1
    assert len(plan) * ranks >= fewest_bins(tokens, capacity)
    assert plan == plan_bins(tokens, costs.tolist(), capacity, ranks)


@given(tokens=st.lists(st.integers(1, 30), min_size=1, max_size=6), capacity=st.integers(30, 50))
def test_the_bound_is_never_above_the_best_packing(tokens: list[int], capacity: int):
    def best(rest: list[int], room: tuple[int, ...]) -> int:
        if not rest:
            return len(room)
        open_bin = best(rest[1:], (*room, capacity - rest[0]))
        fits = [best(rest[1:], (*room[:b], r - rest[0], *room[b + 1 :])) for b, r in enumerate(room) if r >= rest[0]]
        return min([open_bin, *fits])

    assert -(-sum(tokens) // capacity) <= fewest_bins(tokens, capacity) <= best(tokens, ())


@pytest.mark.parametrize("mix", mixes.STEPS)
@pytest.mark.parametrize("fill", [0.95, 0.985])
@pytest.mark.parametrize("seed", range(4))
def test_512_samples_go_into_the_fewest_micro_steps_with_ranks_even_at_each(mix: str, seed: int, fill: float):
    lengths_I = mixes.lengths(mix, seed, fill)
    costs_I = mixes.costs(lengths_I)
    plan = plan_bins(lengths_I.tolist(), costs_I.tolist(), mixes.CAPACITY, mixes.RANKS)
    assert len(plan) == -(-int(lengths_I.sum()) // (mixes.CAPACITY * mixes.RANKS)) == mixes.STEPS[mix]
    assert max(int(lengths_I[held].sum()) for step in plan for held in step) <= mixes.CAPACITY
    assert sync_efficiency(plan, costs_I.tolist()) >= 0.98


@pytest.mark.parametrize(("mix", "seed"), [("lognormal", 0), ("bimodal", 20), ("groups of 8", 5), ("groups of 8", 12)])
def test_bins_that_must_be_filled_to_the_last_thousandth_are(mix: str, seed: int):
    lengths_I = mixes.lengths(mix, seed, 0.999)
    plan = plan_bins(lengths_I.tolist(), mixes.costs(lengths_I).tolist(), mixes.CAPACITY, mixes.RANKS)
    assert len(plan) == mixes.STEPS[mix]
    assert max(int(lengths_I[held].sum()) for step in plan for held in step) <= mixes.CAPACITY


def test_a_micro_step_is_levelled_where_there_is_room():
    lengths_I = mixes.lengths("bimodal", 3, 0.95)
    costs = mixes.costs(lengths_I).tolist()
    assert sync_efficiency(plan_bins(lengths_I.tolist(), costs, mixes.CAPACITY, mixes.RANKS), costs) >= 0.997


def test_like_costs_meet_in_one_micro_step():
    # Two long items and six short ones on two ranks: the long ones side by side, not one after the other.
    plan = plan_bins([10, 10, 4, 4, 4, 4, 1, 1], [100, 100, 4, 4, 4, 4, 1, 1], 10, 2)
    assert [sorted(held) for held in plan[0]] == [[0], [1]]
    assert sync_efficiency(plan, [100, 100, 4, 4, 4, 4, 1, 1]) == 1.0


def test_ranks_beside_a_costly_item_are_filled_up_because_they_wait_anyway():
    tokens = [100, 9, 11, 21, 29, 13, 13, 8, 6, 16, 41, 7, 30, 8, 8]
    plan = plan_bins(tokens, [300.0, *map(float, tokens[1:])], 100, 3)
    assert [len(step) for step in plan] == [3, 3]
    assert min(sum(tokens[i] for i in held) for held in plan[0]) >= 95


def test_a_rank_stays_without_work_only_where_there_are_fewer_items_than_bins():
    assert plan_bins([5, 5], [5.0, 5.0], 10, 4) == [[[0], [1], [], []]]
    # The first micro steps could take all but one item at no cost: yet no rank idles in the last.
    plan = plan_bins([7, 1, 5, 9, 8, 7], [14.0, 2.0, 10.0, 45.0, 8.0, 35.0], 10, 2)
    assert all(len(held) == 1 for step in plan for held in step)


def test_items_of_which_no_two_fit_together_take_a_bin_each():
    assert fewest_bins([6, 6, 6, 3], 10) == 3
    assert len(plan_bins([6, 6, 6, 3], [6.0, 6.0, 6.0, 3.0], 10, 1)) == 3


def test_no_items_no_micro_steps():
    assert plan_bins([], [], 8, 2) == []


def test_what_can_not_be_planned_is_refused_by_name():
    with pytest.raises(ValueError, match="item 1 has 9 tokens, a row holds 8"):
        plan_bins([3, 9], [1.0, 1.0], 8, 1)
    with pytest.raises(ValueError, match="at least one rank, not 0"):
        plan_bins([3], [1.0], 8, 0)
    with pytest.raises(ValueError, match="2 items have 1 costs"):
        plan_bins([3, 3], [1.0], 8, 1)
