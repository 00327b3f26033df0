"""`headrace config show`: the effective settings, and where each comes from."""

from typing import Annotated

import typer

app = typer.Typer(help="Settings of this process.", no_args_is_help=True)


@app.callback()
def config() -> None:
    """Settings of this process."""


@app.command()
def show(as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False) -> None:
    """Print the effective settings; secrets are masked."""
    import orjson  # noqa: PLC0415  (`headrace --help` does not wait for it)
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    from headrace.core.settings import Settings  # noqa: PLC0415
    from headrace.core.settings_report import setting_rows  # noqa: PLC0415

    rows = setting_rows(Settings())
    if as_json:
        typer.echo(orjson.dumps({row.path: {"value": row.value, "source": row.source} for row in rows}))
        return
    table = Table("setting", "value", "from", box=None, header_style="bold")
    for row in rows:
        value = "" if row.value is None else str(row.value)
        table.add_row(row.path, value, row.source, style=None if row.source != "default" else "dim")
    Console(soft_wrap=True, markup=False).print(table)
