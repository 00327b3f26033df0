"""Prefix tree of token sequences: each stretch that sequences share stands once.

The sequences are sorted as byte strings, so that those with a common prefix are neighbours; the common prefix of neighbours is found
by one comparison of their arrays; a stack over those lengths (as one builds a suffix tree from a suffix array; Kasai et al. 2001)
gives the segments. No Python runs per token: the work is one sort, one comparison and one copy, all in numpy or memcmp.

Guarantees: a segment ends where sequences diverge, and nowhere else (a sequence that ends inside another's segment costs none); a
segment that branches has at least `min_shared` tokens; equal input gives equal arrays in every process. Limitations: the order in which
the sequences came (the order of their bytes stands instead). Shapes: S sequences, T tokens of the tree, G segments.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixTree:
    """A forest of segments, depth first, parents before children.

    Example: of [5, 6, 7] and [5, 6, 8, 9] the tokens are [5, 6, 7, 8, 9], the positions [0, 1, 2, 2, 3], the starts [0, 2, 3], the
    parents [-1, 0, 0] and the columns of the second sequence [0, 1, 3, 4].
    """

    token_ids_T: Ints
    position_ids_T: Ints
    starts_G: Ints
    """First column of each segment; it ends where the next one starts."""
    parents_G: Ints
    """Index of each segment's parent, smaller than its own; -1 for a root."""
    leaves_S: Ints
    """The segment that each sequence leads to; a sequence may end before it does, or in one of its ancestors."""
    lengths_S: Ints
    """Tokens of each sequence."""

    def __len__(self) -> int:
        return len(self.token_ids_T)

    def order(self) -> list[int]:
        """Sequences as they stand in the tree, depth first: neighbours share most."""
        return [int(sequence) for sequence in np.lexsort((self.lengths_S, self.leaves_S))]

    def columns(self, sequence: int) -> Ints:
        """int32[tokens of the sequence]: the column of each of its tokens."""
        stop = int(self.lengths_S[sequence])
        columns = np.empty(stop, np.int32)
        segment = int(self.leaves_S[sequence])
        while segment >= 0:
            column = int(self.starts_G[segment])
            start = int(self.position_ids_T[column])
            if start < stop:
                columns[start:stop] = np.arange(column, column + stop - start, dtype=np.int32)
                stop = start
            segment = int(self.parents_G[segment])
        return columns


def build_tree(sequences: Sequence[npt.NDArray[np.int32]], min_shared: int = 1) -> PrefixTree:
    """The prefix tree of the sequences.

    Args:
        sequences: int32[length] each, of at least one token.
        min_shared: Tokens that a segment with branches must have; a shorter shared stretch stands in each of its branches.

    Raises:
        ValueError: a sequence has no token, or `min_shared` is below 1.
    """
    if min_shared < 1:
        raise ValueError(f"a shared segment has at least 1 token, not {min_shared}")
    arrays = [np.ascontiguousarray(sequence, np.int32) for sequence in sequences]
    empty = next((s for s, array in enumerate(arrays) if not len(array)), None)
    if empty is not None:
        raise ValueError(f"sequence {empty} has no token")
    # Any order of the bytes keeps common prefixes together, so they need no swapping; equal sequences stay in order.
    keys = [array.astype("<i4", copy=False).tobytes() for array in arrays]
    order = sorted(range(len(arrays)), key=keys.__getitem__)
    # A sequence that is a prefix of the next one ends within it: only the others, the leaves, make segments.
    leaves: list[int] = []
    shared: list[int] = []  # tokens that a leaf shares with the leaf before it
    leaf_of = [0] * len(arrays)
    common = 0
    for at, s in enumerate(order):
        following = _common_prefix(arrays[s], arrays[order[at + 1]]) if at + 1 < len(order) else 0
        leaf_of[s] = len(leaves)
        if following < len(arrays[s]):  # or the next one shares with the leaf before what this one shares
            leaves.append(s)
            shared.append(common)
            common = following
    lengths = [len(arrays[s]) for s in leaves]
    return _lay_out(arrays, leaves, leaf_of, _segments(lengths, shared, min_shared))


@dataclass(frozen=True, slots=True)
class _Segments:
    """Depth first."""

    leaves_G: list[int]
    """A leaf below each segment, or the segment's own."""
    starts_G: list[int]
    """First position."""
    stops_G: list[int]
    parents_G: list[int]
    segments_L: list[int]
    """The segment in which each leaf ends."""


def _common_prefix(one: Ints, two: Ints) -> int:
    n = min(len(one), len(two))
    differs = one[:n] != two[:n]
    first = int(differs.argmax())
    return first if differs[first] else n


def _segments(lengths_L: list[int], shared_L: list[int], min_shared: int) -> _Segments:
    """The segments between the forks that stand.

    Shapes: L leaves; `shared_L` are the tokens that a leaf has in common with the one before it.
    """
    # First each fork's first and last leaf, by a stack: a fork closes at the first leaf that shares less.
    forks: list[tuple[int, int, int]] = []  # (first leaf, -last leaf, depth): sorted, a fork stands before those below it
    opened: list[tuple[int, int]] = []  # (depth, first leaf)
    for leaf in range(1, len(lengths_L) + 1):
        depth = shared_L[leaf] if leaf < len(lengths_L) else 0
        first = leaf - 1
        while opened and opened[-1][0] > depth:
            closed, first = opened.pop()
            forks.append((first, -(leaf - 1), closed))
        if depth and (not opened or opened[-1][0] < depth):
            opened.append((depth, first))
    forks.sort()
    made = _Segments([], [], [], [], [])
    path: list[tuple[int, int, int]] = []  # (last leaf, segment, stop) of the forks around the leaf at hand
    upcoming = 0
    for leaf, length in enumerate(lengths_L):
        while path and path[-1][0] < leaf:
            path.pop()
        while upcoming < len(forks) and forks[upcoming][0] == leaf:
            _, last, depth = forks[upcoming]
            upcoming += 1
            parent, start = (path[-1][1], path[-1][2]) if path else (-1, 0)
            if depth - start >= min_shared:
                path.append((-last, len(made.parents_G), depth))
                _append(made, leaf, start, depth, parent)
        parent, start = (path[-1][1], path[-1][2]) if path else (-1, 0)
        made.segments_L.append(len(made.parents_G))
        _append(made, leaf, start, length, parent)
    return made


def _append(made: _Segments, leaf: int, start: int, stop: int, parent: int) -> None:
    made.leaves_G.append(leaf)
    made.starts_G.append(start)
    made.stops_G.append(stop)
    made.parents_G.append(parent)


def _lay_out(arrays: list[Ints], leaves: list[int], leaf_of: list[int], made: _Segments) -> PrefixTree:
    """Copy the segments' tokens."""
    first_G = np.array(made.starts_G, np.int64)
    size_G = np.array(made.stops_G, np.int64) - first_G
    starts_G = np.cumsum(size_G) - size_G
    pieces = [arrays[leaves[leaf]][a:b] for leaf, a, b in zip(made.leaves_G, made.starts_G, made.stops_G, strict=True)]
    tokens = int(size_G.sum())
    return PrefixTree(
        token_ids_T=np.concatenate(pieces) if pieces else np.empty(0, np.int32),
        position_ids_T=np.arange(tokens, dtype=np.int32) + np.repeat((first_G - starts_G).astype(np.int32), size_G),
        starts_G=starts_G.astype(np.int32),
        parents_G=np.array(made.parents_G, np.int32),
        leaves_S=np.array(made.segments_L, np.int32)[np.array(leaf_of, np.int64)],
        lengths_S=np.array([len(array) for array in arrays], np.int32),
    )
