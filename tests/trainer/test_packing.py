"""Packed rows: cap, completeness, positions, digest."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.trainer.tiny import group, random_groups, sequence

from headrace.trainer.advantages import batch_credits
from headrace.trainer.options import AdvantageOptions
from headrace.trainer.packing import PackedRows, first_fit_decreasing, pack


def packed(lengths: list[int], capacity: int | None = None, *, alone: bool = False) -> PackedRows:
    made = group([float(i) for i in range(len(lengths))], [sequence([7], range(n - 1)) for n in lengths])
    return pack([made], batch_credits([made], AdvantageOptions()), capacity, alone=alone)


@given(lengths=st.lists(st.integers(1, 40), max_size=60), capacity=st.integers(40, 90))
def test_first_fit_decreasing_holds_the_cap_and_places_each_once(lengths: list[int], capacity: int):
    rows = first_fit_decreasing(lengths, capacity)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= capacity for row in rows)
    # Never two rows that would fit into one.
    fills = sorted(sum(lengths[i] for i in row) for row in rows)
    assert len(fills) < 2 or fills[0] + fills[1] > capacity


def test_a_sequence_over_the_cap_is_refused():
    with pytest.raises(ValueError, match="has 9 tokens, a row holds 8"):
        first_fit_decreasing([3, 9], 8)


@given(lengths=st.lists(st.integers(2, 30), min_size=2, max_size=20), alone=st.booleans())
def test_rows_hold_every_token_once_with_positions_that_restart(lengths: list[int], *, alone: bool):
    rows = packed(lengths, 32, alone=alone)
    assert rows.tokens == sum(lengths)
    assert rows.trainable_tokens == sum(lengths) - len(lengths)
    seen = set()
    for r in range(rows.rows):
        here = rows.branches_RL[r][rows.branches_RL[r] >= 0]
        for branch in dict.fromkeys(here.tolist()):
            assert branch not in seen
            seen.add(branch)
            at = rows.branches_RL[r] == branch
            n = int(at.sum())
            assert rows.position_ids_RL[r][at].tolist() == list(range(n))
            assert rows.token_ids_RL[r][at].tolist() == [7, *range(n - 1)]
    assert len(seen) == len(lengths)
    assert not rows.trainable_RL[rows.branches_RL < 0].any()
    assert rows.position_ids_RL.max(initial=0) < max(lengths)
    if alone:
        assert rows.rows == len(lengths)


def test_advantages_and_weights_stand_on_trainable_tokens_only():
    rows = packed([4, 4])
    assert (rows.advantages_RL[rows.trainable_RL] != 0).all()
    assert (rows.advantages_RL[~rows.trainable_RL] == 0).all()
    assert (rows.weights_RL[~rows.trainable_RL] == 0).all()


def test_the_digest_names_the_plan():
    def digest(seed: int, capacity: int | None = None) -> str:
        groups = random_groups(seed)
        return pack(groups, batch_credits(groups, AdvantageOptions()), capacity, alone=False).digest()

    assert digest(1) == digest(1)
    assert len({digest(1), digest(2), digest(1, 40)}) == 3


def test_no_sequences_no_rows():
    assert pack([], [], None, alone=False).rows == 0
