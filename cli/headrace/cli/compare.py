"""`headrace compare A B`: two models side by side, as a model and its shadow."""

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.model_names import Project, model_id
from headrace.cli.steps import Steps

if TYPE_CHECKING:
    from headrace.cli.histories import History
    from headrace.core.settings import Settings

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
    import orjson  # noqa: PLC0415  (`headrace --help` does not wait for it)
    from rich.console import Console  # noqa: PLC0415

    from headrace.cli.side_by_side_text import print_options, print_side_by_side  # noqa: PLC0415
    from headrace.core.settings import Settings  # noqa: PLC0415
    from headrace.core.side_by_side import option_differences, side_by_side  # noqa: PLC0415
    from headrace.core.step_range import StepRange  # noqa: PLC0415

    chosen = None if steps is None else StepRange.parse(steps)
    process = Settings()
    here = [_under(process, prefix) for prefix in (prefix_a, prefix_b)]

    async def read() -> "list[History]":
        from headrace.cli.histories import read_history  # noqa: PLC0415

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


def _under(process: "Settings", prefix: str | None) -> "Settings":
    """The settings with other topics."""
    if prefix is None:
        return process
    return process.model_copy(update={"topics": type(process.topics).model_validate({**process.topics.model_dump(), "prefix": prefix})})
