"""`headrace config show`: the effective settings, and where each comes from."""

from typing import Annotated

import orjson
import typer
from rich.console import Console
from rich.table import Table

from headrace.core.settings import Settings, setting_rows

app = typer.Typer(help="Settings of this process.", no_args_is_help=True, add_completion=False)


@app.callback()
def config() -> None:
    """Settings of this process."""


@app.command()
def show(as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False) -> None:
    """Print the effective settings; secrets are masked."""
    rows = setting_rows(Settings())
    if as_json:
        typer.echo(orjson.dumps({row.path: {"value": row.value, "source": row.source} for row in rows}))
        return
    table = Table("setting", "value", "from", box=None, header_style="bold")
    for row in rows:
        value = "" if row.value is None else str(row.value)
        table.add_row(row.path, value, row.source, style=None if row.source != "default" else "dim")
    Console(soft_wrap=True, markup=False).print(table)
