"""Packing of token sequences into rows under a hard cap: first-fit decreasing.

Guarantees: no row over `capacity` tokens; every sequence in exactly one row; equal input gives an equal plan, whose digest names
it. Gives up: shared prefixes (each sequence stands whole), and optimality: first-fit decreasing is within 11/9 OPT + 6/9 rows
(Dósa 2007). Shapes: R rows, L tokens of a row (the longest row's length), S sequences. Positions restart at 0 with each sequence,
which is how the model tells them apart; padding has branch -1 and is never trainable.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.trainer.advantages import Credit
from headrace.trainer.groups import TokenizedGroup, TokenSequence

_ROUND = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """All rows of a step."""

    token_ids_RL: npt.NDArray[np.int32]
    position_ids_RL: npt.NDArray[np.int32]
    branches_RL: npt.NDArray[np.int32]
    """Index of the sequence in the batch; -1 for padding."""
    trainable_RL: npt.NDArray[np.bool_]
    logprobs_RL: npt.NDArray[np.float32]
    """Behaviour policy; NaN where missing or not sampled."""
    advantages_RL: npt.NDArray[np.float32]
    weights_RL: npt.NDArray[np.float32]

    @property
    def rows(self) -> int:
        """R."""
        return len(self.token_ids_RL)

    @property
    def tokens(self) -> int:
        """Tokens that are not padding."""
        return int(np.count_nonzero(self.branches_RL >= 0))

    @property
    def trainable_tokens(self) -> int:
        """The loss's denominator."""
        return int(np.count_nonzero(self.trainable_RL))

    def digest(self) -> str:
        """SHA-256 over all arrays: equal plans train equally."""
        sha = hashlib.sha256(repr(self.token_ids_RL.shape).encode())
        for array in (
            self.token_ids_RL,
            self.position_ids_RL,
            self.branches_RL,
            self.trainable_RL,
            self.logprobs_RL,
            self.advantages_RL,
            self.weights_RL,
        ):
            sha.update(np.ascontiguousarray(array).tobytes())
        return sha.hexdigest()


def first_fit_decreasing(lengths_S: Sequence[int], capacity: int) -> list[list[int]]:
    """Rows as lists of sequence indices, longest first.

    Raises:
        ValueError: a sequence is longer than the capacity.
    """
    rows: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(lengths_S)), key=lambda i: (-lengths_S[i], i)):
        length = lengths_S[index]
        if length > capacity:
            raise ValueError(f"sequence {index} has {length} tokens, a row holds {capacity}")
        row = next((r for r, space in enumerate(free) if space >= length), None)
        if row is None:
            rows.append([])
            free.append(capacity)
            row = len(rows) - 1
        rows[row].append(index)
        free[row] -= length
    return rows


def pack(groups: Sequence[TokenizedGroup], credited: Sequence[Credit], capacity: int | None, *, alone: bool) -> PackedRows:
    """Rows of everything that trains.

    Args:
        groups: The batch.
        credited: Which trajectories train, and how much; the order of the sequences.
        capacity: Tokens of a row; None: the longest sequence, rounded up to a multiple of 64.
        alone: One sequence a row, for models that can't tell packed ones apart.
    """
    sequences: list[tuple[TokenSequence, Credit]] = [
        (sequence, credit) for credit in credited for sequence in groups[credit.group].trajectories[credit.trajectory].sequences
    ]
    lengths_S = [len(sequence) for sequence, _ in sequences]
    longest = max(lengths_S, default=1)
    chosen = capacity or -(-longest // _ROUND) * _ROUND
    rows = [[i] for i in range(len(sequences))] if alone else first_fit_decreasing(lengths_S, chosen)
    width = max((sum(lengths_S[i] for i in row) for row in rows), default=0)
    shape = (len(rows), width)
    packed = PackedRows(
        token_ids_RL=np.zeros(shape, np.int32),
        position_ids_RL=np.zeros(shape, np.int32),
        branches_RL=np.full(shape, -1, np.int32),
        trainable_RL=np.zeros(shape, np.bool_),
        logprobs_RL=np.full(shape, np.nan, np.float32),
        advantages_RL=np.zeros(shape, np.float32),
        weights_RL=np.zeros(shape, np.float32),
    )
    for r, row in enumerate(rows):
        at = 0
        for index in row:
            sequence, credit = sequences[index]
            here = (r, slice(at, at + len(sequence)))
            packed.token_ids_RL[here] = sequence.token_ids
            packed.position_ids_RL[here] = np.arange(len(sequence))
            packed.branches_RL[here] = index
            packed.trainable_RL[here] = sequence.trainable
            packed.logprobs_RL[here] = sequence.logprobs
            packed.advantages_RL[here] = np.where(sequence.trainable, credit.advantage, 0.0)
            packed.weights_RL[here] = np.where(sequence.trainable, credit.weight, 0.0)
            at += len(sequence)
        # Padding goes on from the last sequence: it comes after everything and nobody reads it, and rows of one sequence each then
        # need no mask at all. Bounded, because a model may have no more positions than its longest sequence.
        packed.position_ids_RL[r, at:] = np.minimum(packed.position_ids_RL[r, at - 1] + 1 + np.arange(width - at), longest - 1)
    return packed
