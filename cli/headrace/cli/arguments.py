"""How commands name models, and how they print tables, numbers, times and text of others.

Guarantees: text that others sent (ids, messages, payloads) is escaped before it reaches a terminal (`plain`); a table is whole in a
pipe or a file. In a narrow terminal it leaves out its least important columns and names them.
"""

import uuid
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from headrace.core.model_names import find_model
from headrace.core.models import model_id_of
from headrace.core.settings import Settings
from headrace.schemas.reasons import RejectionReason


def plain(text: str) -> str:
    r"""Without what a terminal would obey: characters that are not printable are escaped (`\x1b`)."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


_LISTED = 8


def number(value: float | None, *, sign: bool = False) -> str:
    """Five significant digits; whole numbers below a million as they are."""
    if value is None:
        return "-"
    whole = value == int(value) and abs(value) < 1e6
    return f"{value:{'+' if sign else ''}{'.0f' if whole else '.5g'}}"


def moment(value: datetime) -> str:
    """UTC, to the second."""
    return f"{value.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def counts(values: Mapping[RejectionReason, int]) -> str:
    """`stale 2, duplicate 1`."""
    return ", ".join(f"{name} {count}" for name, count in values.items() if count)


def numbers(values: Sequence[float | None]) -> str:
    """The first few of a list, and how many more there are."""
    more = f" … {len(values) - _LISTED} more" if len(values) > _LISTED else ""
    return " ".join(number(value) for value in values[:_LISTED]) + more


Project = Annotated[str | None, typer.Option("--project", "-p", help="Project of the model; any.")]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="Id or name; PROJECT/NAME where several projects have the name.")]


async def model_id(process: Settings, project: str | None, model: str) -> str:
    """The id as it is, or that of the name, of a deleted model too.

    With a project nothing is read: whether there is such a model shows when it is.

    Raises:
        UnknownModelError: no model has the name, or several have it.
    """
    if project is not None:
        return derived_id(process, project, model)
    try:
        return str(uuid.UUID(model))
    except ValueError:
        return (await find_model(process, model, deleted=True)).model_id


def derived_id(process: Settings, project: str, model: str) -> str:
    """The id as it is, or that of the name in a project. Nothing is read."""
    try:
        return str(uuid.UUID(model))
    except ValueError:
        return model_id_of(process.account, project, model)


_SEPARATOR = 2
_WRAPPED = 24
"""Columns of a terminal that a wrapping column needs."""


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, important: Sequence[str], right: Collection[str] = ()) -> None:
    """Print a table whose last column wraps.

    Args:
        columns: Headings.
        rows: Cells, already escaped.
        important: Headings that a narrow terminal keeps longest, most important first.
        right: Headings of columns that are aligned right.
    """
    console = Console(markup=False, highlight=False)
    widths = {cells[0]: max(map(cell_len, cells)) for cells in zip(columns, *rows, strict=True)}
    shown = list(columns)
    if not console.is_terminal:
        console.width = sum(widths.values()) + _SEPARATOR * len(columns)
    else:
        widths[columns[-1]] = min(widths[columns[-1]], _WRAPPED)
        order = [*important, *(name for name in columns if name not in important)]
        while len(shown) > 1 and sum(widths[name] + _SEPARATOR for name in shown) > console.width:
            shown.remove(order.pop())
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in shown:
        last = name == columns[-1]
        table.add_column(name, justify="right" if name in right else "left", no_wrap=not last, overflow="fold")
    for row in rows:
        table.add_row(*(cell for name, cell in zip(columns, row, strict=True) if name in shown))
    console.print(table)
    if left_out := [name for name in columns if name not in shown]:
        console.print(f"Not shown in this narrow terminal, but in a pipe and with --json: {', '.join(left_out)}", style="dim")
