"""The figure of a run: reward, lag and KL over the steps, as a PNG.

Limitations: a picture only; matplotlib's Agg backend needs no display.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.demo.history import mean_lag, reward
from headrace.schemas.events import StepCompleted

INK, SOFT, GRID = "#1f2933", "#7b8794", "#e4e7eb"
BLUE, ORANGE, GREEN = "#2563eb", "#d97706", "#059669"
SMOOTHED = 10
"""Steps of the running mean."""


def save_figure(steps: Sequence[StepCompleted], path: Path, title: str) -> None:
    """Draw and write; the folder is made if missing."""
    import matplotlib as mpl  # noqa: PLC0415 - 1 s that the rest of the demo does not wait for

    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    at = [step.step for step in steps]
    figure, (top, middle, bottom) = plt.subplots(
        3, 1, figsize=(9, 7.5), sharex=True, height_ratios=(3, 1.2, 1.2), layout="constrained", facecolor="white"
    )
    figure.suptitle(title, fontsize=14, fontweight="bold", color=INK, x=0.01, ha="left")

    rewards = [reward(step) for step in steps]
    top.plot(at, rewards, color=BLUE, alpha=0.3, linewidth=1, marker=".", markersize=4, label="each step")
    top.plot(at, _running_mean(rewards), color=BLUE, linewidth=2.2, label=f"mean of the last {min(SMOOTHED, len(steps))}")
    top.set_ylim(-0.03, 1.03)
    top.legend(loc="lower right", frameon=False, labelcolor=INK)
    _dress(top, "mean reward")

    lags = [mean_lag(step) for step in steps]
    top_lags = [max(step.lag_histogram, default=0) for step in steps]
    middle.fill_between(at, top_lags, step="mid", color=ORANGE, alpha=0.18, linewidth=0, label="largest in the batch")
    middle.plot(at, lags, color=ORANGE, linewidth=1.6, label="mean")
    middle.set_ylim(0, max(1.0, *top_lags) * 1.25)
    middle.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    middle.legend(loc="upper right", ncols=2, frameon=False, labelcolor=INK)
    _dress(middle, "lag (versions)")

    bottom.plot(at, [step.metrics.get("kl_behaviour", 0.0) for step in steps], color=GREEN, linewidth=1.4)
    bottom.set_ylim(bottom=0)
    _dress(bottom, "KL")
    bottom.set_xlabel("step", color=INK)
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    bottom.set_xlim(min(at), max(at) + (1 if len(at) == 1 else 0))

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=144)
    plt.close(figure)


def _dress(axes: Any, label: str) -> None:  # noqa: ANN401 - matplotlib's axes are untyped here
    axes.set_ylabel(label, color=INK)
    axes.grid(visible=True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=SOFT, length=0)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)


def _running_mean(values: Sequence[float]) -> list[float]:
    """Mean of the last `SMOOTHED` values at each place, of fewer at the start."""
    return [sum(window) / len(window) for window in (values[max(0, i - SMOOTHED + 1) : i + 1] for i in range(len(values)))]
