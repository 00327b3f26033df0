"""The `headrace` command: a table of subcommands, each imported when it is called.

Guarantees: `headrace --help` imports no command, so that it stays fast; shell completion knows every command and option.
"""

from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

_COMMANDS = {
    "init": ("init", "Write a configuration, a tiny base model and sample groups into a folder."),
    "up": ("up", "Start Kafka (and S3) on this machine and keep them until Ctrl-C."),
    "env": ("up", "Print the `export` lines of the services that `headrace up` runs."),
    "doctor": ("doctor", "Check Python, Kafka, topics, store, Java, trainer packages, devices and base models."),
    "topics": ("topics", "Create the topics, and see where they differ."),
    "models": ("models", "Create, list, show, resume, export and delete models."),
    "produce": ("produce", "Send groups from a file, as a stream or as a training job."),
    "worker": ("serve", "Train what arrives and publish weights."),
    "engine": ("serve", "Serve every model of a base model to OpenAI clients."),
    "gateway": ("serve", "Serve both hosted APIs, inference and the dashboard over HTTP."),
    "tokens": ("tokens", "Create, list and revoke the gateway's tokens."),
    "jobs": ("jobs", "List, show, pause, resume and cancel training jobs."),
    "steps": ("steps", "List the committed steps of a model."),
    "inspect": ("inspect_step", "Show everything that is recorded of one step."),
    "lineage": ("lineage", "Show which groups a version was trained on, or which versions a group influenced."),
    "compare": ("compare", "Show two models side by side."),
    "replay": ("replay", "Run committed steps again: to the same bits, or as a fork."),
    "dlq": ("dlq", "List, show, retry and drop records that could not be read."),
    "config": ("config", "Show the settings of this process."),
    "docs": ("docs", "Generate the API documents and the reference pages."),
    "demo": ("demo", "Watch an agent learn over a real Kafka."),
}


def command_names() -> list[str]:
    """Every subcommand, in the order of `--help`."""
    return list(_COMMANDS)


def load_command(name: str) -> Any:  # noqa: ANN401 - typer's command types are those of the click that it brings
    """Import a subcommand: a `typer.Typer` called `app` in its module, or the function of its name."""
    module = import_module(f"headrace.cli.{_COMMANDS[name][0]}")
    found: typer.Typer | None = getattr(module, "app", None)
    if found is None:
        found = typer.Typer(add_completion=False)
        found.command(name)(getattr(module, name))
    command = typer.main.get_command(found)
    command.name = name
    return command


class _Commands(TyperGroup):
    """Lists the subcommands without importing them."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002, ANN401 - the signature is click's
        return list(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002, ANN401 - the signature is click's
        return TyperCommand(cmd_name, help=_COMMANDS[cmd_name][1]) if cmd_name in _COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401 - the signature is click's
        name, command, rest = super().resolve_command(ctx, args)
        return name, None if name is None or command is None else load_command(name), rest


app = typer.Typer(cls=_Commands, name="headrace", no_args_is_help=True, pretty_exceptions_enable=False)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"headrace {version('headrace')}")
        raise typer.Exit


@app.callback()
def headrace(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Reinforcement-learning training backend for LLM agents, on Kafka."""
