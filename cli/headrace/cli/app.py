"""All commands of `headrace`."""

import typer

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
