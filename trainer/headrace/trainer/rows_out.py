"""The packed rows of a step as a file: what the model saw of each token, and what each token counted for.

One safetensors file of flat arrays. `x_R` means one entry for each kept row; where lengths differ, cumulative ones say who owns what:
row r has the sequences `row_sequences[r]` to `row_sequences[r + 1]`, and sequence s the tokens `sequence_tokens[s]` to
`sequence_tokens[s + 1]`.

    rows R       row_numbers, row_updates, row_micro_steps, row_ranks   int32[R]      where in the step each was
                 row_columns, row_segments, row_sequences               int64[R + 1]  cumulative lengths
    columns C    column_token_ids, column_position_ids                  int32[C]      what went through the model, shared stretches once
    segments G   segment_starts, segment_parents                        int32[G]      first column and parent, both counted in the row
    sequences S  sequence_groups                                        int32[S]      index in `groups` of the metadata
                 sequence_trajectories                                  int32[S]      index in the group as it was sent
                 sequence_parts                                         int32[S]      which of the trajectory's sequences
                 sequence_tokens                                        int64[S + 1]  cumulative lengths
    tokens T     token_ids, position_ids                                int32[T]      each sequence whole, context included
                 trainable                                              bool[T]
                 predictors                                             int32[T]      column of the row that predicted it, -1: not trained
                 lags                                                   int32[T]      policy versions, -1: unknown or not trained
                 advantages, weights, ratios, behaviour_logprobs, old_logprobs, new_logprobs, float32[T], NaN where not trained

`advantages` are those that were used, a KL penalty included; `weights` what a token's loss was multiplied by in the update's; `ratios`
exp(new - old) at the level that the loss took them, before any clipping; a log-probability that the sampler did not say is NaN. The
metadata has `layout` (`headrace.rows.v1`), `model_id`, `incarnation`, `step`, `attempt`, `rows` (how many the step had), and `groups`, a
JSON list of ids.

Guarantees: `sample` takes the same rows whenever a step is run again; numbers are copied from those of the training, which is not
touched. Limitations: padding rows of ranks that had none left, and sequences without a trainable token.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from safetensors.numpy import save_file

from headrace.schemas.state import ROWS_FILE
from headrace.trainer.groups import TokenSequence
from headrace.trainer.metrics import TokenStats
from headrace.trainer.placed import PlacedRow, placed_rows, sequence_blocks
from headrace.trainer.plan import StateKey, StepPlan
from headrace.trainer.rows import Owner, PackedUpdate

LAYOUT = "headrace.rows.v1"
SAMPLE = 8
"""Rows of a sample."""

Arrays = dict[str, npt.NDArray[Any]]


def write_rows(
    folder: Path, plan: StepPlan, key: StateKey, updates: Sequence[PackedUpdate], stats: Sequence[TokenStats], *, ranks: int, seed: int
) -> None:
    """Write the rows that the plan asks for into a new folder; nothing where it asks for none, or nothing trained.

    Args:
        folder: Is made.
        plan: Of the step; `report_rows` says which rows.
        key: The state that the step made.
        updates: As they were trained.
        stats: One for each row, rank by rank, each rank's in the order in which it trained them.
        ranks: Of the world.
        seed: Of the step.
    """
    if plan.report_rows == "none":
        return
    placed = placed_rows(updates, stats, ranks)
    if not placed:
        return
    numbers = np.arange(len(placed))
    if plan.report_rows == "sample" and len(placed) > SAMPLE:
        numbers = np.sort(np.random.default_rng(seed).choice(len(placed), SAMPLE, replace=False))
    kept = [placed[number] for number in numbers]
    tensors = _rows(kept, numbers) | _sequences(kept, plan)
    metadata = {
        "layout": LAYOUT,
        "model_id": key.model_id,
        "incarnation": key.incarnation,
        "step": str(key.step),
        "attempt": str(key.attempt),
        "rows": str(len(placed)),
        "groups": orjson.dumps([group.group_id for group in plan.groups]).decode(),
    }
    folder.mkdir(parents=True)
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / ROWS_FILE, metadata)


def _rows(kept: Sequence[PlacedRow], numbers: npt.NDArray[np.int64]) -> Arrays:
    return {
        "row_numbers": numbers.astype(np.int32),
        "row_updates": _ints(placed.update for placed in kept),
        "row_micro_steps": _ints(placed.micro_step for placed in kept),
        "row_ranks": _ints(placed.rank for placed in kept),
        "row_columns": _cumulative(len(placed.row) for placed in kept),
        "row_segments": _cumulative(len(placed.row.starts_G) for placed in kept),
        "row_sequences": _cumulative(len(sequence_blocks(placed.row)) for placed in kept),
        "column_token_ids": np.concatenate([placed.row.token_ids_T for placed in kept]),
        "column_position_ids": np.concatenate([placed.row.position_ids_T for placed in kept]),
        "segment_starts": np.concatenate([placed.row.starts_G for placed in kept]),
        "segment_parents": np.concatenate([placed.row.parents_G for placed in kept]),
    }


def _sequences(kept: Sequence[PlacedRow], plan: StepPlan) -> Arrays:
    owners: list[Owner] = []
    tokens: list[Arrays] = []
    for placed in kept:
        for block in sequence_blocks(placed.row):
            owner = placed.owners[int(placed.row.branches_N[block.start])]
            owners.append(owner)
            tokens.append(_tokens(plan.groups[owner.group].trajectories[owner.trajectory].sequences[owner.sequence], placed, block))
    return {
        "sequence_groups": _ints(owner.group for owner in owners),
        "sequence_trajectories": _ints(plan.groups[owner.group].indices[owner.trajectory] for owner in owners),
        "sequence_parts": _ints(owner.sequence for owner in owners),
        "sequence_tokens": _cumulative(len(each["token_ids"]) for each in tokens),
        **{name: np.concatenate([each[name] for each in tokens]) for name in tokens[0]},
    }


def _tokens(sequence: TokenSequence, placed: PlacedRow, block: slice) -> Arrays:
    at = np.flatnonzero(sequence.trainable)
    stats = placed.stats

    def spread(values_N: npt.NDArray[Any], dtype: type, missing: float) -> npt.NDArray[Any]:
        spread_T: npt.NDArray[Any] = np.full(len(sequence), missing, dtype)
        spread_T[at] = values_N[block]
        return spread_T

    return {
        "token_ids": sequence.token_ids.astype(np.int32),
        "position_ids": np.arange(len(sequence), dtype=np.int32),
        "trainable": sequence.trainable.astype(np.bool_),
        "predictors": spread(placed.row.predictors_N, np.int32, -1),
        "lags": spread(placed.row.lags_N, np.int32, -1),
        "advantages": spread(stats.advantages_N, np.float32, np.nan),
        "weights": spread(stats.weights_N, np.float32, np.nan),
        "ratios": spread(stats.ratio_N, np.float32, np.nan),
        "behaviour_logprobs": spread(stats.behaviour_N, np.float32, np.nan),
        "old_logprobs": spread(stats.old_N, np.float32, np.nan),
        "new_logprobs": spread(stats.new_N, np.float32, np.nan),
    }


def _ints(values: Iterable[int]) -> npt.NDArray[np.int32]:
    return np.fromiter(values, np.int32)


def _cumulative(lengths: Iterable[int]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.fromiter(lengths, np.int64))])
