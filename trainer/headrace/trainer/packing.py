"""Packing of an update's sequences into rows: shared prefixes once, under a hard cap, spread over the ranks.

The sequences of one tree (a group) share their prefixes. A tree that is too large for a row, or so large that ranks would stand idle
next to it, is cut between neighbouring leaves into trees of their own, which repeat what they shared; how far to cut is tried out,
and the plan whose slowest ranks need the least time is taken. The pieces are planned into rows by `headrace.trainer.bins`.

Guarantees: no row over the capacity; every sequence whole in exactly one row; every trainable token exactly one target; equal input
gives equal rows. Limitations: sharing between trees, and between the pieces of a tree that was cut. A token costs 1 + position / 8192, its
share of the weights' work and of attention: a sequence of L tokens costs L + L² / 16384. Shapes: those of `headrace.trainer.rows`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from headrace.trainer.bins import plan_bins
from headrace.trainer.prefix_tree import PrefixTree, build_tree
from headrace.trainer.rows import CreditedSequence, PackedRow, PackedUpdate

MIN_SHARED = 16
"""Shared stretches below this stand in each branch. A segment costs an attention call a layer, forward and backward, and answers
of a group often agree for a few tokens by chance ("The answer is"): a cascade of segments that would save next to nothing."""

_ATTENTION = 8192
"""Position at which a token's attention costs as much as its share of the weights."""
_FINENESS = (1, 1.25, 1.5, 2, 3, 4)
"""Pieces are tried at the size that gives every rank one, and at these fractions of it."""
_ENOUGH = 0.99
"""Share of the ranks' time that is work of whole trees, at which nothing finer is tried."""
_GAIN = 0.998
"""A finer cut must be this much faster: it repeats prefixes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Sequences (their indices) as a tree that goes into a row whole."""

    of: int
    """The `tree` of its sequences."""
    members: list[int]
    tree: PrefixTree

    @property
    def cost(self) -> float:
        return len(self.tree) + float(self.tree.position_ids_T.sum(dtype=np.int64)) / _ATTENTION


Steps = list[list[list[_Piece]]]


def pack(
    sequences: Sequence[CreditedSequence],
    *,
    capacity: int,
    ranks: int = 1,
    alone: bool = False,
    policy_version: int | None = None,
    min_shared: int = MIN_SHARED,
) -> PackedUpdate:
    """The rows of one update.

    Args:
        sequences: What trains; a sequence's index is its place in here.
        capacity: Tokens that a row may hold, shared ones counted once.
        ranks: Rows of a micro step.
        alone: A row for each sequence, for models that can't tell packed ones apart.
        policy_version: The version that trains; lags count from it, and are unknown without it.
        min_shared: Tokens that a shared stretch must have, or each branch gets its own copy.

    Raises:
        ValueError: a sequence is longer than the capacity.
    """
    for number, credited in enumerate(sequences):
        if len(credited.sequence) > capacity:
            raise ValueError(f"sequence {number} (branch {credited.branch}) has {len(credited.sequence)} tokens, a row holds {capacity}")
    steps = _steps_alone(sequences, ranks) if alone else _steps_shared(sequences, capacity, ranks, min_shared)
    return PackedUpdate(
        micro_steps=tuple(tuple(_row(sequences, held, policy_version) if held else None for held in step) for step in steps),
        capacity=capacity,
    )


def _steps_alone(sequences: Sequence[CreditedSequence], ranks: int) -> Steps:
    """Longest first, so that those of one micro step are alike."""
    order = sorted(range(len(sequences)), key=lambda n: (-len(sequences[n].sequence), n))
    rows = [[_Piece(of=sequences[n].tree, members=[n], tree=build_tree([sequences[n].sequence.token_ids]))] for n in order]
    rows += [[]] * (-len(rows) % ranks)
    return [rows[at : at + ranks] for at in range(0, len(rows), ranks)]


def _steps_shared(sequences: Sequence[CreditedSequence], capacity: int, ranks: int, min_shared: int) -> Steps:
    """The fastest of a few plans, from whole trees to finer cuts."""
    trees = _trees(sequences, min_shared)
    longest = max((len(credited.sequence) for credited in sequences), default=0)
    even = min(capacity, -(-sum(len(piece.tree) for piece in trees) // ranks))
    work = sum(piece.cost for piece in trees) / ranks
    best: Steps = []
    fastest = float("inf")
    largest = float("inf")
    for size in dict.fromkeys([capacity, *(max(longest, int(even / fineness)) for fineness in _FINENESS)]):
        if largest <= size:
            continue
        pieces = [part for piece in trees for part in _cut(sequences, piece, size, capacity, min_shared)]
        largest = max((len(piece.tree) for piece in pieces), default=0)
        plan = plan_bins([len(piece.tree) for piece in pieces], [piece.cost for piece in pieces], capacity, ranks)
        steps = [[_joined(sequences, [pieces[p] for p in held], min_shared) for held in step] for step in plan]
        slowest = sum(max(sum(piece.cost for piece in held) for held in step) for step in steps)
        if slowest < fastest * _GAIN:
            fastest, best = slowest, steps
        if work >= fastest * _ENOUGH:
            break
    return best


def _joined(sequences: Sequence[CreditedSequence], held: list[_Piece], min_shared: int) -> list[_Piece]:
    """Parts of one tree that met in a row share again."""
    parts: dict[int, list[_Piece]] = {}
    for piece in held:
        parts.setdefault(piece.of, []).append(piece)
    joined = []
    for of, pieces in parts.items():
        whole = (
            _piece(sequences, of, [member for piece in pieces for member in piece.members], min_shared) if len(pieces) > 1 else pieces[0]
        )
        # Forks that come together can make a shared stretch too short to stand.
        joined += [whole] if len(whole.tree) <= sum(len(piece.tree) for piece in pieces) else pieces
    return joined


def _piece(sequences: Sequence[CreditedSequence], of: int, members: list[int], min_shared: int) -> _Piece:
    return _Piece(of=of, members=members, tree=build_tree([sequences[n].sequence.token_ids for n in members], min_shared))


def _trees(sequences: Sequence[CreditedSequence], min_shared: int) -> list[_Piece]:
    members: dict[int, list[int]] = {}
    for number, credited in enumerate(sequences):
        members.setdefault(credited.tree, []).append(number)
    return [_piece(sequences, of, numbers, min_shared) for of, numbers in members.items()]


def _cut(sequences: Sequence[CreditedSequence], piece: _Piece, size: int, capacity: int, min_shared: int) -> Iterator[_Piece]:
    """The piece itself where it has `size` tokens at most, else the fewest runs of neighbouring leaves of that size, as even as may be.

    A run's own tree can come out a little larger than its share of the whole, because what is long enough to be shared
    depends on the forks around it: it is halved should it not fit the capacity.
    """
    if len(piece.tree) <= size or len(piece.members) == 1:
        yield piece
        return
    order = piece.tree.order()
    columns = [piece.tree.columns(leaf) for leaf in order]
    shared = [0, *(_leading(one, two) for one, two in pairwise(columns))]
    sizes = [len(own) for own in columns]
    for run in _even_runs(sizes, shared, size):
        yield from _fitting(sequences, piece.of, [piece.members[order[at]] for at in run], capacity, min_shared)


def _leading(one: npt.NDArray[np.int32], two: npt.NDArray[np.int32]) -> int:
    """Columns that two sequences share: after the first difference there is none."""
    n = min(len(one), len(two))
    return int(np.count_nonzero(one[:n] == two[:n]))


def _even_runs(sizes: list[int], shared: list[int], size: int) -> list[range]:
    """As many runs as `size` takes, at the smallest size that takes no more."""
    fewest = _runs(sizes, shared, size)
    low, high = max(sizes), size
    while low < high:
        middle = (low + high) // 2
        runs = _runs(sizes, shared, middle)
        if len(runs) <= len(fewest):
            fewest, high = runs, middle
        else:
            low = middle + 1
    return fewest


def _runs(sizes: list[int], shared: list[int], size: int) -> list[range]:
    """Runs of neighbours, each as long as `size` allows; the first of a run counts whole."""
    starts = [0]
    used = 0
    for at, (own, common) in enumerate(zip(sizes, shared, strict=True)):
        more = own - common if at > starts[-1] else own
        if at > starts[-1] and used + more > size:
            starts.append(at)
            more, used = own, 0
        used += more
    return [range(a, b) for a, b in zip(starts, [*starts[1:], len(sizes)], strict=True)]


def _fitting(sequences: Sequence[CreditedSequence], of: int, members: list[int], capacity: int, min_shared: int) -> Iterator[_Piece]:
    piece = _piece(sequences, of, members, min_shared)
    if len(piece.tree) <= capacity:
        yield piece
        return
    half = len(members) // 2
    yield from _fitting(sequences, of, members[:half], capacity, min_shared)
    yield from _fitting(sequences, of, members[half:], capacity, min_shared)


def _row(sequences: Sequence[CreditedSequence], pieces: list[_Piece], policy_version: int | None) -> PackedRow:
    """The pieces side by side."""
    columns = np.cumsum([0, *(len(piece.tree) for piece in pieces)])
    segments = np.cumsum([0, *(len(piece.tree.starts_G) for piece in pieces)])
    members = [
        (sequences[number], piece.tree.columns(leaf) + np.int32(at))
        for piece, at in zip(pieces, columns.tolist(), strict=False)
        for leaf, number in enumerate(piece.members)
    ]
    trainable = [np.flatnonzero(credited.sequence.trainable) for credited, _ in members]
    counts = [len(at) for at in trainable]

    return PackedRow(
        token_ids_T=np.concatenate([piece.tree.token_ids_T for piece in pieces]),
        position_ids_T=np.concatenate([piece.tree.position_ids_T for piece in pieces]),
        starts_G=np.concatenate([piece.tree.starts_G + np.int32(at) for piece, at in zip(pieces, columns.tolist(), strict=False)]),
        parents_G=np.concatenate([_shifted(piece.tree.parents_G, at) for piece, at in zip(pieces, segments.tolist(), strict=False)]),
        predictors_N=np.concatenate([own[at - 1] for (_, own), at in zip(members, trainable, strict=True)]),
        targets_N=np.concatenate([credited.sequence.token_ids[at] for (credited, _), at in zip(members, trainable, strict=True)]),
        branches_N=np.repeat(np.array([credited.branch for credited, _ in members], np.int32), counts),
        logprobs_N=np.concatenate([credited.sequence.logprobs[at] for (credited, _), at in zip(members, trainable, strict=True)]),
        advantages_N=np.repeat(np.array([credited.advantage for credited, _ in members], np.float32), counts),
        weights_N=np.repeat(np.array([credited.weight for credited, _ in members], np.float32), counts),
        lags_N=np.concatenate([_lags(credited, at, policy_version) for (credited, _), at in zip(members, trainable, strict=True)]),
        sequence_tokens=sum(len(credited.sequence) for credited, _ in members),
        sequences=len(members),
    )


def _shifted(parents_G: npt.NDArray[np.int32], by: int) -> npt.NDArray[np.int32]:
    return np.where(parents_G >= 0, parents_G + np.int32(by), np.int32(-1))


def _lags(credited: CreditedSequence, at: npt.NDArray[np.int64], policy_version: int | None) -> npt.NDArray[np.int32]:
    """int32[len(at)]: versions between each token's and the policy's; -1 where a version is unknown or newer than the policy."""
    if policy_version is None:
        return np.full(len(at), -1, np.int32)
    of_sequence = -1 if credited.version is None else credited.version
    versions = np.full(len(at), of_sequence, np.int32)
    if credited.sequence.policy_versions is not None:
        own = credited.sequence.policy_versions[at]
        versions = np.where(own >= 0, own, versions)
    return np.where(versions >= 0, np.maximum(policy_version - versions, -1), -1).astype(np.int32)
