"""Prefix trees: what is shared, what sees what."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.trainer.prefix_tree import PrefixTree, build_tree

# Few different tokens, so that prefixes meet, nest, end inside each other and repeat.
forests = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=10), max_size=14)


def arrays(sequences: list[list[int]]) -> list[npt.NDArray[np.int32]]:
    return [np.array(sequence, np.int32) for sequence in sequences]


def visible(tree: PrefixTree) -> npt.NDArray[np.bool_]:
    """The dense reference mask: own segment up to the token, and all of the segments above."""
    tokens = len(tree)
    stops = [*tree.starts_G.tolist(), tokens][1:]
    mask = np.zeros((tokens, tokens), np.bool_)
    for segment, (start, stop) in enumerate(zip(tree.starts_G.tolist(), stops, strict=True)):
        mask[start:stop, start:stop] = np.tril(np.ones((stop - start, stop - start), np.bool_))
        above = int(tree.parents_G[segment])
        while above >= 0:
            mask[start:stop, tree.starts_G[above] : stops[above]] = True
            above = int(tree.parents_G[above])
    return mask


def unique_tokens(sequences: list[tuple[int, ...]], min_shared: int, owned: int = 0) -> int:
    """Tokens of the tree, one branch at a time; the first `owned` tokens of all sequences stand already."""
    leaves = [s for s in set(sequences) if not any(other != s and other[: len(s)] == s for other in sequences)]
    if len(leaves) <= 1:
        return sum(len(leaf) - owned for leaf in leaves)
    fork = 0
    while len({leaf[: fork + 1] for leaf in leaves}) == 1:
        fork += 1
    shared = fork - owned if fork - owned >= min_shared else 0
    branches = [[leaf for leaf in leaves if leaf[fork] == token] for token in {leaf[fork] for leaf in leaves}]
    return shared + sum(unique_tokens(branch, min_shared, owned + shared) for branch in branches)


@given(sequences=forests, min_shared=st.integers(1, 4))
def test_each_sequence_reads_back_from_its_columns_at_its_positions(sequences: list[list[int]], min_shared: int):
    tree = build_tree(arrays(sequences), min_shared)
    for s, sequence in enumerate(sequences):
        columns = tree.columns(s)
        assert tree.token_ids_T[columns].tolist() == sequence
        assert tree.position_ids_T[columns].tolist() == list(range(len(sequence)))


@given(sequences=forests, min_shared=st.integers(1, 4))
def test_a_token_sees_the_tokens_before_it_in_its_own_sequence_and_no_others(sequences: list[list[int]], min_shared: int):
    tree = build_tree(arrays(sequences), min_shared)
    mask = visible(tree)
    for s in range(len(sequences)):
        columns = tree.columns(s)
        for at, column in enumerate(columns.tolist()):
            assert np.flatnonzero(mask[column]).tolist() == sorted(columns[: at + 1].tolist())


@given(sequences=forests, min_shared=st.integers(1, 4))
def test_segments_branch_and_nothing_is_shared_that_is_too_short(sequences: list[list[int]], min_shared: int):
    tree = build_tree(arrays(sequences), min_shared)
    sizes = np.diff([*tree.starts_G, len(tree)])
    children = np.bincount(tree.parents_G[tree.parents_G >= 0], minlength=len(sizes))
    assert (sizes >= 1).all()
    assert (tree.parents_G < np.arange(len(sizes))).all()
    assert (children != 1).all()
    assert (sizes[children > 0] >= min_shared).all()
    assert len(tree) == unique_tokens([tuple(sequence) for sequence in sequences], min_shared)


@given(sequences=forests)
def test_each_prefix_stands_once(sequences: list[list[int]]):
    prefixes = {tuple(sequence[:n]) for sequence in sequences for n in range(1, len(sequence) + 1)}
    assert len(build_tree(arrays(sequences))) == len(prefixes)


@given(sequences=forests, seed=st.integers(0, 99))
def test_the_tree_does_not_depend_on_the_order_of_the_sequences(sequences: list[list[int]], seed: int):
    order = np.random.default_rng(seed).permutation(len(sequences))
    one, other = build_tree(arrays(sequences)), build_tree(arrays([sequences[i] for i in order]))
    assert one.token_ids_T.tolist() == other.token_ids_T.tolist()
    assert one.parents_G.tolist() == other.parents_G.tolist()
    assert all(one.columns(int(i)).tolist() == other.columns(at).tolist() for at, i in enumerate(order))


@given(sequences=forests)
def test_neighbours_in_tree_order_share_most(sequences: list[list[int]]):
    tree = build_tree(arrays(sequences))
    columns = [set(tree.columns(s).tolist()) for s in tree.order()]
    assert sorted(tree.order()) == list(range(len(sequences)))
    for at in range(1, len(columns)):
        assert len(columns[at] & columns[at - 1]) == max(len(columns[at] & before) for before in columns[:at])


def test_the_tree_of_the_docstring():
    tree = build_tree(arrays([[5, 6, 7], [5, 6, 8, 9]]))
    assert tree.token_ids_T.tolist() == [5, 6, 7, 8, 9]
    assert tree.position_ids_T.tolist() == [0, 1, 2, 2, 3]
    assert tree.starts_G.tolist() == [0, 2, 3]
    assert tree.parents_G.tolist() == [-1, 0, 0]
    assert tree.columns(1).tolist() == [0, 1, 3, 4]
    assert {array.dtype for array in (tree.token_ids_T, tree.position_ids_T, tree.starts_G, tree.parents_G)} == {np.dtype(np.int32)}


def test_a_sequence_that_ends_inside_another_costs_no_segment():
    tree = build_tree(arrays([[1, 2, 3, 4], [1, 2], [1, 2, 3, 4]]), min_shared=3)
    assert tree.starts_G.tolist() == [0]
    assert tree.columns(1).tolist() == [0, 1]


def test_a_short_fork_inside_a_long_one_is_copied_into_its_branches():
    stem = list(range(10))
    sequences = arrays([[*stem, 20, 21], [*stem, 20, 22], [*stem, 30]])
    assert build_tree(sequences, min_shared=1).parents_G.tolist().count(0) == 2
    tree = build_tree(sequences, min_shared=2)
    assert tree.parents_G.tolist() == [-1, 0, 0, 0]
    assert len(tree) == 10 + 2 + 2 + 1


def test_tokens_above_one_byte_are_told_apart():
    sequences = arrays([[256, 1], [1, 256], [65536], [256, 2]])
    tree = build_tree(sequences)
    assert len(tree) == 3 + 2 + 1
    assert [tree.token_ids_T[tree.columns(s)].tolist() for s in range(4)] == [[256, 1], [1, 256], [65536], [256, 2]]


def test_no_sequences_make_an_empty_tree():
    tree = build_tree([])
    assert len(tree) == len(tree.starts_G) == 0
    assert tree.order() == []


def test_a_sequence_without_tokens_is_refused():
    with pytest.raises(ValueError, match="sequence 1 has no token"):
        build_tree(arrays([[1], []]))
    with pytest.raises(ValueError, match="at least 1 token, not 0"):
        build_tree(arrays([[1]]), min_shared=0)
