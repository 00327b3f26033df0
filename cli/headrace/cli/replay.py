"""`headrace replay`: committed steps run again, as they were or as a fork; and `headrace replay groups`."""

import asyncio
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.model_names import Project, model_id
from headrace.cli.replay_groups import groups

if TYPE_CHECKING:
    from headrace.cli.replay_output import Output
    from headrace.consumers.replay.session import Outcome, Question
    from headrace.core.settings import Settings

app = typer.Typer(help="Run committed steps again: to the same bits, or as a fork.", invoke_without_command=True)
app.command()(groups)


@app.callback()
def replay(  # noqa: PLR0917 - typer passes them by name
    context: typer.Context,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Id or name.")] = None,
    steps: Annotated[str | None, typer.Option(help="A..B, A.., ..B or A; both ends belong to it.")] = None,
    project: Project = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="OPTION=VALUE", help="Train otherwise: learning_rate=1e-4, optimizer.beta1=0.8; may be given again."),
    ] = None,
    exclude: Annotated[list[str] | None, typer.Option(metavar="GROUP_ID", help="Train without this group; may be given again.")] = None,
    ranks: Annotated[int | None, typer.Option(min=1, max=1024, help="World size; the ledger's unless given.")] = None,
    publish_to: Annotated[str | None, typer.Option(metavar="NAME", help="Go on with the outcome as a new model of the project.")] = None,
    to: Annotated[Path | None, typer.Option(help="New folder for the weights after the last step.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on the standard output, progress beside it.")] = False,
) -> None:
    """Run steps again. Exit code 0 only if all are equal to the ledger; a fork's need not be."""
    if context.invoked_subcommand is not None:
        return
    from headrace.cli.replay_output import Output  # noqa: PLC0415  (`headrace --help` does not wait for it)
    from headrace.consumers.replay.changes import Asked  # noqa: PLC0415
    from headrace.consumers.replay.session import Question  # noqa: PLC0415
    from headrace.consumers.worker.rerun import CannotRerunError  # noqa: PLC0415
    from headrace.core.settings import Settings  # noqa: PLC0415
    from headrace.core.step_range import StepRange  # noqa: PLC0415

    for name, value in (("--model", model), ("--steps", steps)):
        if value is None:
            raise typer.BadParameter("it is needed: which steps of which model?", param_hint=name)
    settings = Settings()
    question = Question(
        model_id=asyncio.run(model_id(settings, project, str(model))),
        steps=StepRange.parse(str(steps)),
        changes=Asked.parse(set_ or ()),
        exclude=frozenset(exclude or ()),
        ranks=ranks,
        publish=None if publish_to is None else (project or "default", publish_to),
        keep=None if to is None else to.absolute(),
    )
    output = Output(question, as_json=as_json)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: ranks and files go in order
    try:
        outcome = asyncio.run(_answer(settings, question, output))
    except CannotRerunError:
        output.judge()  # what has run is worth knowing
        raise
    output.end(outcome)
    if not (question.forks or outcome.equal):
        raise typer.Exit(1)


async def _answer(settings: "Settings", question: "Question", output: "Output") -> "Outcome":
    from headrace.consumers.replay.session import answer  # noqa: PLC0415 - as above

    return await answer(settings, question, opened=output.opened, ran=output.ran)
