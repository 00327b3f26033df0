"""`headrace steps MODEL`: the ledger of a model as a table."""

import asyncio
from collections.abc import Sequence
from typing import Annotated

import orjson
import typer

from headrace.cli.arguments import Model, Project, counts, model_id, moment, number, print_table
from headrace.cli.model_history import ModelHistory, read_history
from headrace.core.ledger import StepRange
from headrace.core.settings import Settings
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
        measured = _measured(history.records)
        rows = [[*_row(record), *(number(record.metrics.get(name)) for name in measured)] for record in history.records]
        print_table([*COLUMNS, *measured], rows, important=_IMPORTANT, right=_RIGHT.union(measured))
    else:
        typer.echo(f"{history.view.name} has committed no step{'' if chosen is None else f' in {chosen}'}", err=True)
    if history.others and incarnation is None:
        there = ", ".join(f"{each} ({count} steps)" for each, count in history.others.items())
        typer.echo(f"Other incarnations (--incarnation ID): {there}", err=True)


_MEASURED = 4

COLUMNS = (
    "step", "version", "groups", "tokens", "cut", "job", "loss", "grad norm", "reward mean", "lag", "seconds", "refused",
    "committed at", "snapshot",
)  # fmt: skip
_IMPORTANT = ("step", "reward mean", "loss", "groups", "tokens", "lag", "seconds", "grad norm", "job", "refused", "committed at", "cut")
_RIGHT = frozenset({"step", "version", "groups", "tokens", "loss", "grad norm", "reward mean", "lag", "seconds"})


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
