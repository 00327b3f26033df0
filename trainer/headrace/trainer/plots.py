"""Heat maps of packed tensors as PNG files, for `plot_tensors`: what the rows of a step hold, at a look.

One file a tensor, a line of pixels a row: tokens, positions, segments, and of the targets (drawn at the column that predicts them) the
behaviour policy's log-probabilities, advantages and weights. Guarantees: drawing changes nothing of the step; at most `ROWS` rows are
drawn, the first ones, and the title says of how many. Limitations: targets that share a column; the last one is drawn.
"""

from collections.abc import Sequence
from itertools import chain, islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace.trainer.rows import PackedRow, PackedUpdate

ROWS = 64


def plot_rows(updates: Sequence[PackedUpdate], folder: Path) -> list[Path]:
    """Draw the rows of a step.

    Args:
        updates: Its updates, at least one row in all.
        folder: Made if missing; gets `tokens.png`, `positions.png`, `segments.png`, `logprobs.png`, `advantages.png`, `weights.png`.

    Returns:
        The files.
    """
    # The object interface: pyplot would keep state, and look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - heavy, and seldom asked for
    from matplotlib.figure import Figure  # noqa: PLC0415 - as above
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415 - as above

    total = sum(1 for update in updates for _ in update.rows)
    rows = list(islice(chain.from_iterable(update.rows for update in updates), ROWS))
    width = max(len(row) for row in rows)
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, lines in _tensors(rows).items():
        image = np.full((len(rows), width), np.nan)
        for r, line in enumerate(lines):
            image[r, : len(line)] = line
        figure = Figure(figsize=(12, 1.5 + 0.12 * len(rows)), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        # No smoothing: a pixel is a token.
        drawn = axes.imshow(image, aspect="auto", interpolation="nearest", cmap="RdBu" if name == "advantages" else "viridis")
        if name == "advantages" and np.isfinite(image).any():
            bound = float(np.nanmax(np.abs(image))) or 1.0
            drawn.set_clim(-bound, bound)
        axes.set(xlabel="token of the row", ylabel="row", title=f"{name}: {len(rows)} of {total} rows")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        figure.colorbar(drawn)
        files.append(folder / f"{name}.png")
        figure.savefig(files[-1], dpi=120, format="png")
    return files


def _tensors(rows: Sequence[PackedRow]) -> dict[str, list[npt.NDArray[np.float64]]]:
    return {
        "tokens": [row.token_ids_T.astype(np.float64) for row in rows],
        "positions": [row.position_ids_T.astype(np.float64) for row in rows],
        "segments": [_segments(row).astype(np.float64) for row in rows],
        "logprobs": [_at_predictors(row, row.logprobs_N) for row in rows],
        "advantages": [_at_predictors(row, row.advantages_N) for row in rows],
        "weights": [_at_predictors(row, row.weights_N) for row in rows],
    }


def _segments(row: PackedRow) -> npt.NDArray[np.int64]:
    return np.repeat(np.arange(len(row.starts_G)), np.diff(np.append(row.starts_G, len(row))))


def _at_predictors(row: PackedRow, values_N: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    line = np.full(len(row), np.nan)
    line[row.predictors_N] = np.where(np.isfinite(values_N), values_N, np.nan)
    return line
