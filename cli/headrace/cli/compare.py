"""`headrace compare A B`: two models side by side; the same tables for a fork (`replay`)."""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.table import Table

from headrace.cli.arguments import Project, model_id, number
from headrace.cli.model_history import ModelHistory, read_history
from headrace.cli.steps import Steps
from headrace.core.ledger import StepRange
from headrace.core.settings import Settings
from headrace.core.side_by_side import OptionDifference, SideBySide, option_differences, side_by_side

Metrics = Annotated[list[str] | None, typer.Option("--metric", help="Only this metric; may be given again.")]


def compare(  # noqa: PLR0917 - typer passes them by name
    a: Annotated[str, typer.Argument(metavar="A", help="Id, or name in the project.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Id, or name in the project.")],
    project: Project = None,
    steps: Steps = None,
    metric: Metrics = None,
    prefix_a: Annotated[str | None, typer.Option(help="Topic prefix of A, where it is not that of the settings.")] = None,
    prefix_b: Annotated[str | None, typer.Option(help="Topic prefix of B, as of a shadow.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Set two models side by side: settings that differ, then the metrics of each step."""
    chosen = None if steps is None else StepRange.parse(steps)
    process = Settings()
    here = [_under(process, prefix) for prefix in (prefix_a, prefix_b)]

    async def read() -> list[ModelHistory]:

        found = []
        for where, name in zip(here, (a, b), strict=True):
            found.append(await read_history(where, await model_id(where, project, name), steps=chosen))
        return found

    of_a, of_b = asyncio.run(read())
    settings = option_differences(of_a.view.settings, of_b.view.settings)
    found = side_by_side(of_a.records, of_b.records, metric)
    if as_json:
        typer.echo(orjson.dumps({"a": of_a.view.model_id, "b": of_b.view.model_id, "settings": settings, "side_by_side": found}))
        return
    # An option of the model that its steps all ran with has been said.
    said = {(each.name.removeprefix("train."), repr((each.a, each.b))) for each in settings}
    found = replace(
        found,
        config=tuple(
            each
            for each in found.config
            if each.steps is not None or (each.name.removeprefix("config."), repr((each.a, each.b))) not in said
        ),
    )
    names = (of_a.view.name, of_b.view.name) if of_a.view.name != of_b.view.name else (f"A {of_a.view.name}", f"B {of_b.view.name}")
    console = Console(soft_wrap=True, markup=False, highlight=False)
    if settings:
        print_options(console, settings, *names)
    else:
        console.print("The settings of both models are equal.\n")
    if found.steps:
        print_side_by_side(console, found, *names)
    else:
        typer.echo("neither has a step there", err=True)


def _under(process: Settings, prefix: str | None) -> Settings:
    """The settings with other topics."""
    if prefix is None:
        return process
    return process.model_copy(update={"topics": type(process.topics).model_validate({**process.topics.model_dump(), "prefix": prefix})})


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
