"""Packed rows: what one forward and backward pass of one rank sees.

A row holds a forest of segments. A segment is a stretch of tokens that some sequences share; the tokens of a sequence are the segments on
the way from a root to where the sequence ends. Segments stand parents first, and positions continue from the parent's last one, so a token
sees the tokens of its own segment up to itself and all tokens of its segment's ancestors, and nothing else. What trains is a list
next to the tokens: one target for each sampled token of each sequence, with the column that predicts it, so a token that two
sequences share can predict two different ones.

Guarantees: plain frozen numpy data, no torch. Shapes: T tokens of a row, G segments, N targets. There is no padding.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.trainer.groups import TokenSequence

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditedSequence:
    """A sequence with what its sampled tokens are worth."""

    sequence: TokenSequence
    tree: int
    """Sequences of one tree (a group) may share prefixes."""
    branch: int
    """Its number in the batch: what a sequence-level ratio is taken over."""
    advantage: float
    weight: float
    """Coefficient of each sampled token's loss in the update's loss: every normaliser is in it."""
    version: int | None = None
    """Policy version that sampled it, where its tokens do not say their own; None: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Where a sequence comes from, as indices in the groups of the step."""

    group: int
    trajectory: int
    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """One row."""

    token_ids_T: Ints
    position_ids_T: Ints
    starts_G: Ints
    """First column of each segment; it ends where the next one starts."""
    parents_G: Ints
    """Index of each segment's parent, smaller than its own; -1 for a root."""
    predictors_N: Ints
    """Column whose logits predict the target: the sequence's token before it."""
    targets_N: Ints
    """Token ids."""
    branches_N: Ints
    logprobs_N: Floats
    """Behaviour policy; NaN where missing."""
    advantages_N: Floats
    weights_N: Floats
    lags_N: Ints
    """Versions between the one that sampled the token and the one that trains; -1 where unknown."""
    sequence_tokens: int
    """Tokens of its sequences, each counted whole: T without sharing."""
    sequences: int

    def __len__(self) -> int:
        return len(self.token_ids_T)

    @property
    def arrays(self) -> tuple[npt.NDArray[np.generic], ...]:
        """All arrays, in one order."""
        return (
            self.token_ids_T,
            self.position_ids_T,
            self.starts_G,
            self.parents_G,
            self.predictors_N,
            self.targets_N,
            self.branches_N,
            self.logprobs_N,
            self.advantages_N,
            self.weights_N,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedUpdate:
    """The rows of one optimizer update: a grid of micro steps by ranks."""

    micro_steps: tuple[tuple[PackedRow | None, ...], ...]
    """In each micro step a row for each rank; None where a rank has none left: it makes a pass of weight zero."""
    capacity: int
    """Tokens that a row may hold."""
    trajectories: int = 0
    """Rollouts that train in it."""
    owners: tuple[Owner, ...] = ()
    """Of each branch that the rows number."""

    @property
    def rows(self) -> Iterator[PackedRow]:
        """All rows, micro step by micro step, rank by rank."""
        return (row for step in self.micro_steps for row in step if row is not None)

    @property
    def targets(self) -> int:
        """Sampled tokens that train."""
        return sum(len(row.targets_N) for row in self.rows)

    def digest(self) -> str:
        """SHA-256 over the grid and all arrays: equal plans train equally."""
        sha = hashlib.sha256(repr([[row is not None for row in step] for step in self.micro_steps]).encode())
        for row in self.rows:
            for array in row.arrays:
                sha.update(repr(array.shape).encode())
                sha.update(np.ascontiguousarray(array).tobytes())
        return sha.hexdigest()
