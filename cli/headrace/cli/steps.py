"""`headrace steps MODEL`: the ledger of a model as a table."""

import asyncio
from collections.abc import Sequence
from typing import Annotated

import orjson
import typer
from rich.console import Console
from rich.table import Table

from headrace.cli.arguments import Model, Project, counts, model_id, moment, number
from headrace.cli.model_history import ModelHistory, read_history
from headrace.core.settings import Settings
from headrace.core.step_range import StepRange
from headrace.schemas.state import StepRecord

Steps = Annotated[str | None, typer.Option(help="Only these: A..B, A.., ..B or A.")]
Incarnation = Annotated[str | None, typer.Option(help="Of a model that was deleted and created again: which; the current one.")]


def steps(  # noqa: PLR0917 - typer passes them by name
    model: Model,
    project: Project = None,
    steps: Steps = None,
    last: Annotated[int | None, typer.Option(min=1, help="Only the last so many.")] = None,
    incarnation: Incarnation = None,
    as_json: Annotated[bool, typer.Option("--json", help="The ledger's records, one JSON array.")] = False,
) -> None:
    """List the committed steps of a model."""
    chosen = None if steps is None else StepRange.parse(steps)
    process = Settings()

    async def read() -> ModelHistory:
        wanted = await model_id(process, project, model)
        return await read_history(process, wanted, incarnation=incarnation, steps=chosen, last=last)

    history = asyncio.run(read())
    if as_json:
        typer.echo(orjson.dumps([record.model_dump(mode="json") for record in history.records]))
        return
    if history.records:
        table = Table(box=None, header_style="bold")
        for heading, justify in _COLUMNS:
            table.add_column(heading, justify="right" if justify == "right" else "left")
        measured = _measured(history.records)
        for name in measured:
            table.add_column(name, justify="right")
        for record in history.records:
            table.add_row(*_row(record), *(number(record.metrics.get(name)) for name in measured))
        Console(soft_wrap=True, markup=False).print(table)
    else:
        typer.echo(f"{history.view.name} has committed no step{'' if chosen is None else f' in {chosen}'}", err=True)
    if history.others and incarnation is None:
        there = ", ".join(f"{each} ({count} steps)" for each, count in history.others.items())
        typer.echo(f"Other incarnations (--incarnation ID): {there}", err=True)


_MEASURED = 4

_COLUMNS = (
    ("step", "right"),
    ("version", "right"),
    ("groups", "right"),
    ("tokens", "right"),
    ("cut", "left"),
    ("job", "left"),
    ("loss", "right"),
    ("grad norm", "right"),
    ("reward mean", "right"),
    ("lag", "right"),
    ("seconds", "right"),
    ("refused", "left"),
    ("committed at", "left"),
    ("snapshot", "left"),
)


def _row(record: StepRecord) -> list[str]:

    metrics = record.metrics
    refused = counts(record.refusals)
    if alone := counts(record.trajectory_refusals):
        refused = f"{refused}{'; ' if refused else ''}trajectories: {alone}"
    return [
        str(record.step),
        str(record.policy_version_after),
        str(record.groups),
        number(metrics.get("tokens")),
        record.cut,
        record.job_id or "-",
        number(record.loss),
        number(record.grad_norm),
        number(metrics.get("reward_mean")),
        number(metrics.get("lag_mean")),
        number(seconds_of(record)),
        refused or "-",
        moment(record.committed_at),
        "yes" if record.snapshot is not None else "no",
    ]


def _measured(records: Sequence[StepRecord]) -> list[str]:
    """The first of the rollouts' own metrics: `headrace inspect` and `--json` have all."""
    return sorted({name for record in records for name in record.metrics if name.startswith("user/")})[:_MEASURED]


def seconds_of(record: StepRecord) -> float | None:
    """Of the ranks, all phases together."""
    phases = [value for name, value in record.metrics.items() if name.startswith("seconds_")]
    return sum(phases) if phases else None
