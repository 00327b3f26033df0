"""Ways to do one thing, measured against each other in one run.

Guarantees: the sides take turns, so that a noisy machine slows both; medians over the rounds, with the extremes next to them.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates of one side, one for each round; higher is better."""

    name: str
    unit: str
    per_round: Sequence[float]

    @property
    def median(self) -> float:
        """The middle round."""
        return statistics.median(self.per_round)

    def row(self) -> str:
        """A line of a Markdown table."""
        return f"| {self.name} | {self.median:,.1f} {self.unit} | {min(self.per_round):,.1f} | {max(self.per_round):,.1f} |"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What was compared, what came out, and what it must reach."""

    title: str
    command: str
    ours: Rates
    reference: Rates
    target: float
    notes: str = ""

    @property
    def ratios(self) -> list[float]:
        """Ours over the reference, round by round: both sides of a round saw the same machine."""
        return [a / b for a, b in zip(self.ours.per_round, self.reference.per_round, strict=True)]

    @property
    def ratio(self) -> float:
        """The median of the rounds' ratios."""
        return statistics.median(self.ratios)

    def line(self) -> str:
        """For the terminal."""
        verdict = "reached" if self.ratio >= self.target else "MISSED"
        return f"{self.title}: {self.ratio:.2f} ({min(self.ratios):.2f} to {max(self.ratios):.2f}), target {self.target:g}: {verdict}"

    def markdown(self) -> str:
        """For the results file."""
        return (
            f"## {self.title}\n\n`{self.command}`\n\n"
            f"| side | median | min | max |\n|---|---|---|---|\n{self.reference.row()}\n{self.ours.row()}\n\n"
            f"Ratio **{self.ratio:.2f}** (median of {len(self.ratios)} rounds, {min(self.ratios):.2f} to {max(self.ratios):.2f}); "
            f"target ≥ {self.target:g}.\n{self.notes}\n"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Several ways to do one thing, and what ours must reach."""

    title: str
    command: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    """The first is ours."""
    verdict: str
    reached: bool
    notes: str = ""

    def line(self) -> str:
        """For the terminal."""
        return f"{self.title}: {self.verdict}: {'reached' if self.reached else 'MISSED'}"

    def markdown(self) -> str:
        """For the results file."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        outcome = "reached" if self.reached else "missed"
        return f"## {self.title}\n\n`{self.command}`\n\n{table}\n\n{self.verdict}: **{outcome}**.\n{self.notes}\n"
