"""Two runs side by side as text: what was configured differently, the numbers of each step, and a summary."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from headrace.cli.figures import number
from headrace.core.side_by_side import OptionDifference, SideBySide


def print_side_by_side(console: Console, found: SideBySide, a: str, b: str) -> None:
    """Print the whole of it.

    Args:
        console: Where to; long lines must not wrap there.
        found: The two runs.
        a: What the first is called.
        b: What the second is called.
    """
    print_options(console, found.config, a, b, "steps")
    _print_steps(console, found, a, b)
    _print_summary(console, found, a, b)


def print_options(console: Console, differences: Iterable[OptionDifference], a: str, b: str, where: str = "") -> None:
    """Options that differ, one a row; `where` heads a column that says in which steps they do."""
    table = Table("option", a, b, *([where] if where else []), box=None, header_style="bold")
    for difference in differences:
        steps = [difference.steps or "all"] if where else []
        table.add_row(difference.name, _said(difference.a), _said(difference.b), *steps)
    if table.row_count:
        console.print(table)
        console.print()


def _print_steps(console: Console, found: SideBySide, a: str, b: str) -> None:
    table = _table(("step", "metric"), (a, b, "difference"), ("equal",))
    for pair in found.steps:
        equal = [name for name, is_so in (("groups", pair.same_groups), ("plan", pair.same_plan), ("weights", pair.same_weights)) if is_so]
        said = ", ".join(equal)
        if pair.cut_a is None or pair.cut_b is None:
            said = f"only {b if pair.cut_a is None else a}"
        for i, metric in enumerate(pair.metrics):
            numbers = (number(metric.a), number(metric.b), number(metric.difference, sign=True))
            table.add_row(str(pair.step), metric.name, *numbers, said if i == 0 else "")
        if not pair.metrics:
            table.add_row(str(pair.step), "-", "-", "-", "-", said)
    console.print(table)


def _print_summary(console: Console, found: SideBySide, a: str, b: str) -> None:
    if found.summary:
        console.print()
        means = (f"mean {a}", f"mean {b}", "difference", "largest", "at step", "steps")
        table = _table(("metric",), means, ())
        for each in found.summary:
            numbers = (number(each.mean_a), number(each.mean_b), number(each.mean_difference, sign=True))
            table.add_row(each.name, *numbers, number(each.largest_difference, sign=True), str(each.largest_at), str(each.steps))
        console.print(table)
    both = [pair for pair in found.steps if pair.cut_a is not None and pair.cut_b is not None]
    equal = sum(pair.same_weights for pair in both)
    console.print(f"\n{len(both)} steps in both, {len(found.steps) - len(both)} in one of them; weights equal bit for bit after {equal}")


def _table(left: Iterable[str], right: Iterable[str], last: Iterable[str]) -> Table:
    table = Table(box=None, header_style="bold")
    for heading in left:
        table.add_column(heading)
    for heading in right:
        table.add_column(heading, justify="right")
    for heading in last:
        table.add_column(heading)
    return table


def _said(value: Any) -> str:  # noqa: ANN401 - JSON
    return "default" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
