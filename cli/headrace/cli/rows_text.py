"""Packed rows of a step as text: which sequences stood in which row, and what became of the first tokens of some.

The layout is that of `headrace.trainer.rows_out`; a file of another layout is shown as its arrays. Gives up: the tokens' text, which
needs the base model's tokenizer.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from headrace.cli.figures import number
from headrace.core.packed_rows import Arrays, PackedRows, open_rows

_SEQUENCES = 40
_TOKENS = 12
"""Trained tokens shown of the first sequence of each of the first rows."""
_ROWS = 2


def print_rows(console: Console, body: bytes | None) -> None:
    """Print what a `rows.safetensors` holds; None: nothing was kept.

    Raises:
        RowsUnreadableError: safetensors is not installed, or the bytes are none.
    """
    if body is None:
        console.print("no rows were kept: set worker.report_rows to sample or all")
        return
    packed = open_rows(body)
    arrays, groups = packed.arrays, packed.groups
    if not packed.laid_out:
        table = Table("array", "type", "shape", box=None, header_style="bold")
        for name, array in sorted(arrays.items()):
            table.add_row(name, str(array.dtype), str(list(array.shape)))
        console.print(table)
        return
    kept = len(arrays["row_numbers"])
    console.print(f"\nsequences of {kept} of {packed.rows} rows", style="bold")
    console.print(_sequences(packed))
    if (more := len(arrays["sequence_groups"]) - _SEQUENCES) > 0:
        console.print(f"and {more} more sequences")
    for row in range(min(kept, _ROWS)):
        s = int(arrays["row_sequences"][row])
        trained = packed.trained(s)
        name = f"{groups[arrays['sequence_groups'][s]]}, trajectory {arrays['sequence_trajectories'][s]}"
        console.print(
            f"\nrow {arrays['row_numbers'][row]}: first {min(len(trained), _TOKENS)} of {len(trained)} trained tokens of {name}",
            style="bold",
        )
        console.print(_tokens(arrays, trained[:_TOKENS]))


def _sequences(packed: PackedRows) -> Table:
    arrays = packed.arrays
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("row", "update", "step", "rank", "group", "trajectory", "part", "tokens", "trained", "advantage", "ratio", "lag"):
        table.add_column(heading, justify="left" if heading == "group" else "right")
    for row in range(len(arrays["row_numbers"])):
        place = [str(arrays[name][row]) for name in ("row_numbers", "row_updates", "row_micro_steps", "row_ranks")]
        for s in range(arrays["row_sequences"][row], arrays["row_sequences"][row + 1]):
            if s >= _SEQUENCES:
                return table
            at = packed.trained(s)
            lags = arrays["lags"][at]
            table.add_row(
                *place,
                packed.groups[arrays["sequence_groups"][s]],
                str(arrays["sequence_trajectories"][s]),
                str(arrays["sequence_parts"][s]),
                str(arrays["sequence_tokens"][s + 1] - arrays["sequence_tokens"][s]),
                str(len(at)),
                _mean(arrays["advantages"][at]),
                _mean(arrays["ratios"][at]),
                _mean(lags[lags >= 0]),
            )
    return table


def _tokens(arrays: Arrays, at: npt.NDArray[np.int64]) -> Table:
    floats = ("advantages", "weights", "ratios", "behaviour_logprobs", "old_logprobs", "new_logprobs")
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("position", "token", "lag", "advantage", "weight", "ratio", "behaviour", "old", "new"):
        table.add_column(heading, justify="right")
    for i in at:
        lag = int(arrays["lags"][i])
        numbers = [float(arrays[name][i]) for name in floats]
        table.add_row(
            str(arrays["position_ids"][i]),
            str(arrays["token_ids"][i]),
            "-" if lag < 0 else str(lag),
            *("-" if np.isnan(value) else number(value) for value in numbers),
        )
    return table


def _mean(values: npt.NDArray[Any]) -> str:
    return number(float(values.mean(dtype=np.float64))) if len(values) else "-"
