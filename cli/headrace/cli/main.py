"""The entry point: collects the commands and turns errors meant for people into one line on stderr.

Exit codes: 0 done, 1 an error that the message explains, 2 wrong usage, 130 interrupted.
"""

import sys

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape

from headrace.cli import config, dlq, jobs, models, replay, tokens, topics
from headrace.cli.compare import compare
from headrace.cli.demo import demo
from headrace.cli.docs import docs
from headrace.cli.doctor import doctor
from headrace.cli.engine import engine
from headrace.cli.gateway import gateway
from headrace.cli.inspect_step import inspect
from headrace.cli.lineage import lineage
from headrace.cli.produce import produce
from headrace.cli.steps import steps
from headrace.cli.up import up
from headrace.cli.worker import worker
from headrace.core.errors import HeadraceError

app = typer.Typer(
    name="headrace",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command()(up)
app.add_typer(docs, name="docs")
app.command()(doctor)
app.add_typer(topics.app, name="topics")
app.add_typer(models.app, name="models")
app.add_typer(jobs.app, name="jobs")
app.add_typer(dlq.app, name="dlq")
app.command()(steps)
app.command()(inspect)
app.command()(lineage)
app.command()(compare)
app.add_typer(replay.app, name="replay")
app.add_typer(config.app, name="config")
app.command()(produce)
app.command()(worker)
app.command()(engine)
app.command()(gateway)
app.add_typer(tokens.app, name="tokens")
app.command()(demo)


@app.callback()
def headrace() -> None:
    """Reinforcement-learning training backend for LLM agents, on Kafka."""


def main() -> None:
    """Run the command line."""
    console = Console(stderr=True)
    try:
        app()
    except HeadraceError as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, markup=True, soft_wrap=True)
        sys.exit(1)
    except ValidationError as error:
        console.print("[bold red]error:[/] the settings are not valid:", highlight=False)
        for fault in error.errors(include_url=False, include_input=False):
            console.print(
                f"  {'.'.join(str(part) for part in fault['loc'])}: {fault['msg']}", highlight=False, markup=False, soft_wrap=True
            )
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
