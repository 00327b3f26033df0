"""The terminal of a run: a live table where there is a terminal, else one plain line every few steps.

Limitations: it shows the last rows; the figure shows every step.
"""

import time
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from headrace.demo.history import History, mean_lag, reward
from headrace.schemas.events import StepCompleted

ROWS = 12
LINE_EVERY = 10
"""Steps between two plain lines."""
RATE_WINDOW = 10
"""Steps over which tokens/s is taken."""
_BLOCKS = " ▁▂▃▄▅▆▇█"


class Board:
    """Shows phases and steps.

    Args:
        console: Where to.
        title: Of the table.
        history: What is shown.
    """

    def __init__(self, console: Console, title: str, history: History) -> None:
        self._console = console
        self._title = title
        self._history = history
        self._began = time.monotonic()
        self._spinner = Spinner("dots")
        self._live = Live(console=console, refresh_per_second=8, transient=False) if console.is_terminal else None
        self._lines = 0

    def phase(self, text: str) -> None:
        """What is being waited for before the first step."""
        if self._live is None:
            self._console.print(f"{self._elapsed():5.1f} s  {text}", highlight=False, soft_wrap=True)
        else:
            self._spinner.update(text=Text(f" {text}", style="cyan"))
            self._live.update(self._table())

    def show(self) -> None:
        """A step, a refusal or a group came in."""
        if self._live is not None:
            if not self._history.steps:
                self.phase(f"Waiting for the first step: {self._history.arrived} groups have arrived")
            self._live.update(self._table())
        elif (done := len(self._history.steps)) > self._lines and (done % LINE_EVERY == 0 or done in {1, self._history.wanted}):
            self._lines = done
            self._console.print(f"{self._elapsed():5.1f} s  {self._plain(self._history.steps[-1])}", highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    def _plain(self, step: StepCompleted) -> str:
        rate = self._history.tokens_per_second(RATE_WINDOW)
        return (
            f"step {step.step}/{self._history.wanted}  version {step.policy_version}  reward {reward(step):.2f}  lag {mean_lag(step):.1f}  "
            f"{rate:,.0f} tokens/s  queue {self._history.queued}"
        )

    def _table(self) -> Group:
        history = self._history
        table = Table(title=self._title, title_justify="left", title_style="bold", border_style="bright_black", header_style="cyan")
        for name in ("step", "version", "reward", "", "lag", "KL", "tokens/s", "queue"):
            table.add_column(name, justify="left" if not name else "right", min_width=18 if not name else None)
        for i, step in list(enumerate(history.steps))[-ROWS:]:
            last = i == len(history.steps) - 1
            table.add_row(
                str(step.step),
                str(step.policy_version),
                f"{reward(step):.2f}",
                ProgressBar(total=1.0, completed=reward(step), width=18, complete_style="green", finished_style="green"),
                f"{mean_lag(step):.1f}",
                f"{step.metrics.get('kl_behaviour', 0.0):.4f}",
                f"{history.tokens_per_second(RATE_WINDOW):,.0f}" if last else "",
                str(history.queued) if last else "",
                style="" if last else "bright_black",
            )
        if not history.steps:
            return Group(table, self._spinner)
        footer = Text.assemble(
            (f"{len(history.steps)}/{history.wanted} steps", "bold"),
            (f"  {self._elapsed():.0f} s  {history.rejected} refused  ", "bright_black"),
            (_sparkline([reward(step) for step in history.steps], 48), "green"),
        )
        return Group(table, footer)


def _sparkline(values: list[float], width: int) -> str:
    """Values in [0, 1] as blocks, averaged down to `width` of them."""
    size = max(1, -(-len(values) // width))
    means = [sum(part) / len(part) for part in (values[i : i + size] for i in range(0, len(values), size))]
    return "".join(_BLOCKS[min(8, round(mean * 8))] for mean in means)
