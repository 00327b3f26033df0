"""`headrace docs`: documents that are generated from the code and checked in, and the check that they are up to date.

Exit codes: 0 written or up to date, 1 with `--check` when files differ (each is named).
"""

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.reference import reference_pages
from headrace.consumers.asyncapi import asyncapi_yaml
from headrace.gateway.app import openapi_json
from headrace.schemas.envelope import json_schema_files

app = typer.Typer(help="Generate the AsyncAPI and OpenAPI documents and the JSON Schemas.", no_args_is_help=True, add_completion=False)

_Check = Annotated[bool, typer.Option("--check", help="Write nothing; exit with 1 and name the files that differ.")]


@app.command()
def asyncapi(out: Annotated[Path, typer.Option(help="The YAML file.")] = Path("schemas/asyncapi.yaml"), check: _Check = False) -> None:
    """Every topic with its key, messages and operations, as AsyncAPI 3.0."""
    _settle({out: asyncapi_yaml()}, stale=[], check=check)


@app.command()
def openapi(out: Annotated[Path, typer.Option(help="The JSON file.")] = Path("schemas/openapi.json"), check: _Check = False) -> None:
    """Every path of the gateway, as OpenAPI 3.1."""
    _settle({out: openapi_json()}, stale=[], check=check)


@app.command()
def jsonschema(out: Annotated[Path, typer.Option(help="The folder.")] = Path("schemas/json"), check: _Check = False) -> None:
    """One JSON Schema a record; files of removed records are deleted."""
    files = {out / name: content for name, content in json_schema_files().items()}
    _settle(files, stale=sorted(set(out.glob("*.json")) - files.keys()), check=check)


@app.command()
def reference(out: Annotated[Path, typer.Option(help="The folder.")] = Path("docs/reference"), check: _Check = False) -> None:
    """The reference pages of the documentation: settings, records, topics, commands."""
    files = {out / name: content for name, content in reference_pages().items()}
    _settle(files, stale=sorted(set(out.glob("*.md")) - files.keys()), check=check)


def _settle(files: dict[Path, str], *, stale: list[Path], check: bool) -> None:
    """Make the files what they should be, or say which are not."""
    differing = [path for path, content in files.items() if not path.is_file() or path.read_bytes() != content.encode()]
    if check:
        for path in differing:
            typer.echo(f"{path}: {'differs' if path.exists() else 'missing'}", err=True)
        for path in stale:
            typer.echo(f"{path}: no such record any more", err=True)
        if differing or stale:
            typer.echo("Run `make docs` and commit the result.", err=True)
            raise typer.Exit(1)
        return
    for path in differing:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(files[path].encode())
    for path in stale:
        path.unlink()
    typer.echo(f"{len(files)} generated, {len(differing)} changed, {len(stale)} removed")
