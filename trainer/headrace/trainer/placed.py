"""Packed rows with what became of their targets, and whose they are.

Guarantees: pure functions over what rank 0 gathered; rows come update by update, micro step by micro step, rank by rank; the targets of
each sequence stand together, in the order of its sampled tokens. Limitations: padding rows of ranks that had none left.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.trainer.rows import Owner, PackedRow, PackedUpdate

if TYPE_CHECKING:  # it imports torch, which only a rank does
    from headrace.trainer.metrics import TokenStats


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedRow:
    """A row, where it was, and what its targets came to."""

    update: int
    micro_step: int
    rank: int
    row: PackedRow
    owners: Sequence[Owner]
    stats: "TokenStats"


def placed_rows(updates: Sequence[PackedUpdate], stats: "Sequence[TokenStats]", ranks: int) -> list[PlacedRow]:
    """Rows with their outcomes.

    Args:
        updates: As they were packed.
        stats: One for each row, rank by rank, each rank's in the order in which it computed them.
        ranks: Of the world.
    """
    found = []
    remaining = iter(stats)
    for rank in range(ranks):
        for u, update in enumerate(updates):
            for m, step in enumerate(update.micro_steps):
                if (row := step[rank]) is not None:
                    found.append(PlacedRow(update=u, micro_step=m, rank=rank, row=row, owners=update.owners, stats=next(remaining)))
    return sorted(found, key=lambda placed: (placed.update, placed.micro_step, placed.rank))


def sequence_blocks(row: PackedRow) -> list[slice]:
    """The targets of each sequence of a row."""
    starts = np.flatnonzero(np.diff(row.branches_N, prepend=-1)).tolist()
    return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], len(row.branches_N)], strict=True)]
