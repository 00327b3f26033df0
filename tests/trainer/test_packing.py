"""Packed rows: completeness, what sees what, targets, cap, ranks, digest."""

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.trainer.groups import TokenSequence
from headrace.trainer.packing import pack
from headrace.trainer.rows import CreditedSequence, PackedRow, PackedUpdate


def credited(token_ids: Sequence[int], trained: Sequence[int], branch: int = 0, tree: int = 0, **fields: Any) -> CreditedSequence:
    """With log-probabilities that tell branch and position."""
    trainable = np.zeros(len(token_ids), np.bool_)
    trainable[list(trained)] = True
    versions = fields.pop("policy_versions", None)
    return CreditedSequence(
        sequence=TokenSequence(
            token_ids=np.array(token_ids, np.int32),
            trainable=trainable,
            logprobs=np.where(trainable, -(branch * 1000.0 + np.arange(len(token_ids))), np.nan).astype(np.float32),
            policy_versions=None if versions is None else np.array(versions, np.int32),
        ),
        tree=tree,
        branch=branch,
        **{"advantage": branch + 0.5, "weight": 1 / (branch + 1), **fields},
    )


@st.composite
def batches(draw: st.DrawFn) -> list[CreditedSequence]:
    """Forests whose sequences nest, end inside each other and repeat; the last token trains, so that each leaves a target."""
    made = []
    for branch in range(draw(st.integers(0, 20))):
        token_ids = draw(st.lists(st.integers(0, 2), min_size=2, max_size=12))
        trained = draw(st.sets(st.integers(1, len(token_ids) - 1))) | {len(token_ids) - 1}
        made.append(credited(token_ids, sorted(trained), branch, draw(st.integers(0, 3))))
    return made


def seen(row: PackedRow) -> np.ndarray:
    """bool[T, T], the dense reference mask: own segment up to the token, and all of the segments above."""
    stops = [*row.starts_G[1:].tolist(), len(row)]
    mask = np.zeros((len(row), len(row)), np.bool_)
    for segment, (start, stop) in enumerate(zip(row.starts_G.tolist(), stops, strict=True)):
        mask[start:stop, start:stop] = np.tril(np.ones((stop - start, stop - start), np.bool_))
        above = int(row.parents_G[segment])
        assert above < segment
        while above >= 0:
            mask[start:stop, row.starts_G[above] : stops[above]] = True
            above = int(row.parents_G[above])
    return mask


def targets(update: PackedUpdate) -> list[tuple[int, tuple[int, ...], int, float, float, float]]:
    """Of each target: branch, the tokens its predictor sees in order of position, token, log-probability, advantage, weight."""
    found = []
    for row in update.rows:
        mask = seen(row)
        for n in range(len(row.targets_N)):
            context = np.flatnonzero(mask[row.predictors_N[n]])
            context = context[np.argsort(row.position_ids_T[context], kind="stable")]
            assert row.position_ids_T[context].tolist() == list(range(len(context)))
            found.append(
                (
                    int(row.branches_N[n]),
                    tuple(row.token_ids_T[context].tolist()),
                    int(row.targets_N[n]),
                    float(row.logprobs_N[n]),
                    float(row.advantages_N[n]),
                    float(row.weights_N[n]),
                )
            )
    return sorted(found)


def wanted(batch: list[CreditedSequence]) -> list[tuple[int, tuple[int, ...], int, float, float, float]]:
    return sorted(
        (
            c.branch,
            tuple(c.sequence.token_ids[:at].tolist()),
            int(c.sequence.token_ids[at]),
            float(c.sequence.logprobs[at]),
            float(np.float32(c.advantage)),
            float(np.float32(c.weight)),
        )
        for c in batch
        for at in np.flatnonzero(c.sequence.trainable)
    )


@given(batch=batches(), capacity=st.integers(12, 60), ranks=st.integers(1, 4), min_shared=st.integers(1, 4), alone=st.booleans())
def test_every_target_stands_once_behind_its_own_prefix(
    batch: list[CreditedSequence], capacity: int, ranks: int, min_shared: int, *, alone: bool
):
    update = pack(batch, capacity=capacity, ranks=ranks, min_shared=min_shared, alone=alone)
    # The last token trains, so each sequence is read back whole from what its last predictor sees.
    assert targets(update) == wanted(batch)
    assert update.targets == sum(c.sequence.trainable_tokens for c in batch)
    assert update.capacity == capacity
    assert all(0 < len(row) <= capacity for row in update.rows)
    assert all(len(step) == ranks and any(row is not None for row in step) for step in update.micro_steps)
    assert sum(row.sequences for row in update.rows) == len(batch)
    assert sum(row.sequence_tokens for row in update.rows) == sum(len(c.sequence) for c in batch)
    if alone:
        assert sum(1 for _ in update.rows) == len(batch)
        assert all(len(row.starts_G) == 1 for row in update.rows)


@given(batch=batches(), ranks=st.integers(1, 3))
def test_equal_input_has_an_equal_digest(batch: list[CreditedSequence], ranks: int):
    assert pack(batch, capacity=30, ranks=ranks).digest() == pack(list(batch), capacity=30, ranks=ranks).digest()


def group(tree: int, prompt: int, answers: Sequence[int], seed: int = 0, first: int = 0) -> list[CreditedSequence]:
    """A prompt of so many tokens and answers of these lengths."""
    rng = np.random.default_rng([seed, tree])
    stem = rng.integers(0, 1000, prompt).tolist()
    return [
        credited([*stem, *rng.integers(0, 1000, n).tolist()], range(prompt, prompt + n), first + i, tree) for i, n in enumerate(answers)
    ]


def test_the_digest_does_not_depend_on_the_seed_of_hashes():
    script = (
        "from tests.trainer.test_packing import group\n"
        "from headrace.trainer.packing import pack\n"
        "batch = [s for tree in range(6) for s in group(tree, 40, [30, 50, 20, 60], first=tree * 4)]\n"
        "print(pack(batch, capacity=256, ranks=2).digest())"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", script], env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    batch = [s for tree in range(6) for s in group(tree, 40, [30, 50, 20, 60], first=tree * 4)]
    assert runs[0] == runs[1] == pack(batch, capacity=256, ranks=2).digest().encode() + b"\n"


def test_another_batch_has_another_digest():
    batch = group(0, 20, [5, 6])
    digests = {pack(batch, capacity=c).digest() for c in (100, 28)} | {pack(batch[:1], capacity=100).digest()}
    assert len(digests) == 3


def test_a_prompt_stands_once_for_its_group_and_groups_share_nothing():
    (step,) = pack(group(0, 100, [10, 20, 30]) + group(1, 100, [10], first=3), capacity=1000).micro_steps
    assert step[0] is not None
    assert len(step[0]) == 100 + 60 + 110
    assert step[0].sequence_tokens == 3 * 100 + 60 + 110
    assert sorted(step[0].parents_G.tolist()).count(-1) == 2
    same = [credited([1] * 30 + [2], [30], 0, tree=0), credited([1] * 30 + [2], [30], 1, tree=1)]
    assert [len(row) for row in pack(same, capacity=1000).rows] == [62]


def test_shared_turns_nest():
    prompt, turn = list(range(100, 130)), list(range(200, 220))
    batch = [
        credited([*prompt, *turn, 1], [50], 0),
        credited([*prompt, *turn, 2], [50], 1),
        credited([*prompt, 3], [30], 2),
    ]
    (row,) = pack(batch, capacity=1000).rows
    assert len(row) == 30 + 20 + 1 + 1 + 1
    assert sorted(row.parents_G.tolist()) == [-1, 0, 0, 1, 1] or sorted(row.parents_G.tolist()) == [-1, 0, 0, 2, 2]


def test_a_few_tokens_in_common_are_not_worth_a_segment():
    batch = [credited([*range(15), 50 + i], [15], i) for i in range(2)]
    assert [len(row) for row in pack(batch, capacity=100).rows] == [32]
    assert [len(row) for row in pack(batch, capacity=100, min_shared=15).rows] == [17]


def test_one_sampled_token_trains_two_sequences_with_advantages_of_their_own():
    batch = [credited([*range(20), 5, 6], [20, 21], 0, advantage=1.0), credited([*range(20), 5, 6], [20, 21], 1, advantage=-1.0)]
    (row,) = pack(batch, capacity=100).rows
    assert len(row) == 22
    assert row.predictors_N.tolist() == [19, 20, 19, 20]
    assert row.targets_N.tolist() == [5, 6, 5, 6]
    assert row.branches_N.tolist() == [0, 0, 1, 1]
    assert row.advantages_N.tolist() == [1, 1, -1, -1]
    assert row.logprobs_N.tolist() == [-20, -21, -1020, -1021]


def test_one_column_predicts_where_sequences_part():
    (row,) = pack([credited([*range(20), 5], [20], 0), credited([*range(20), 6], [20], 1)], capacity=100).rows
    assert row.predictors_N.tolist() == [19, 19]
    assert row.targets_N.tolist() == [5, 6]


def test_a_group_too_large_for_a_row_is_cut_between_answers_into_even_trees():
    update = pack(group(0, 40, [20] * 12), capacity=128)
    assert sorted(len(row) for row in update.rows) == [120, 120, 120]
    assert targets(update) == wanted(group(0, 40, [20] * 12))


def test_a_group_is_cut_for_ranks_that_would_stand_idle():
    batch = group(0, 40, [60] * 8)
    assert [len(row) for row in pack(batch, capacity=4096, ranks=1).rows] == [520]
    (step,) = pack(batch, capacity=4096, ranks=4).micro_steps
    assert [len(row) for row in step if row is not None] == [160] * 4


def test_groups_are_cut_where_whole_ones_would_leave_rows_half_empty():
    # Two groups do not fit one row: whole, they would take two micro steps of two thirds.
    batch = [s for tree in range(16) for s in group(tree, 20, [65] * 4, first=4 * tree)]
    update = pack(batch, capacity=448, ranks=8)
    whole = -(-16 * 280 // (448 * 8))
    assert len(update.micro_steps) == whole == 2
    slowest = sum(max(len(row) for row in step if row is not None) for step in update.micro_steps)
    assert slowest <= 2 * 300


def test_rows_of_one_micro_step_cost_alike():
    rng = np.random.default_rng(5)
    batch = [s for tree in range(48) for s in group(tree, 50, rng.integers(20, 200, 8).tolist(), first=8 * tree)]
    update = pack(batch, capacity=4096, ranks=4)
    for step in update.micro_steps:
        costs = [len(row) + row.position_ids_T.sum() / 8192 for row in step if row is not None]
        assert len(costs) == 4
        assert max(costs) < 1.02 * sum(costs) / 4


def test_alone_each_sequence_is_a_row_and_like_lengths_meet():
    update = pack(group(0, 10, [5, 1, 4, 2, 3]), capacity=100, ranks=2, alone=True)
    assert [[None if row is None else len(row) for row in step] for step in update.micro_steps] == [[15, 14], [13, 12], [11, None]]


def test_lags_count_from_each_tokens_own_version_else_the_sequences():
    batch = [
        credited(range(4), [1, 2, 3], 0, tree=0, version=7, policy_versions=[-1, 5, -1, 9]),
        credited(range(4), [1, 2, 3], 1, tree=1, version=6),
        credited(range(4), [3], 2, tree=2),
        credited(range(4), [2, 3], 3, tree=3, policy_versions=[-1, -1, 4, -1]),
        credited(range(4), [3], 4, tree=4, version=12),
    ]
    rows = list(pack(batch, capacity=100, policy_version=9).rows)
    lags = {b: [int(lag) for row in rows for lag in row.lags_N[row.branches_N == b]] for b in range(5)}
    assert lags == {0: [4, 2, 0], 1: [3, 3, 3], 2: [-1], 3: [5, -1], 4: [-1]}
    assert all((row.lags_N == -1).all() for row in pack(batch, capacity=100).rows)


def test_arrays_have_the_types_of_the_contract():
    (row,) = pack(group(0, 20, [5, 6]), capacity=100, policy_version=3).rows
    integers = (
        row.token_ids_T,
        row.position_ids_T,
        row.starts_G,
        row.parents_G,
        row.predictors_N,
        row.targets_N,
        row.branches_N,
        row.lags_N,
    )
    assert {array.dtype for array in integers} == {np.dtype(np.int32)}
    assert {array.dtype for array in (row.logprobs_N, row.advantages_N, row.weights_N)} == {np.dtype(np.float32)}


def test_a_sequence_longer_than_a_row_is_refused_by_name():
    with pytest.raises(ValueError, match=r"sequence 1 \(branch 8\) has 25 tokens, a row holds 24"):
        pack([*group(0, 20, [4]), credited(range(25), [3], 8)], capacity=24)


def test_no_sequences_no_micro_steps():
    assert pack([], capacity=10, ranks=4).micro_steps == ()
    assert pack([], capacity=10, ranks=4, alone=True).micro_steps == ()
