"""`headrace demo`: a small agent gets better while its trajectories travel over a real Kafka."""

import signal
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from headrace.core.settings import Settings

_STEPS = {"vault": 100, "smollm2": 3}


class Model(StrEnum):
    """What is trained."""

    VAULT = "vault"
    SMOLLM2 = "smollm2"


def demo(  # noqa: PLR0917 - typer passes them by name
    model: Annotated[Model, typer.Option(help="vault: a tiny model learns to use a tool; smollm2: LoRA on a real one.")] = Model.VAULT,
    seed: Annotated[int, typer.Option(min=0, help="Of base model, agents and training.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps; 100 for vault, 3 for smollm2.")] = None,
    lag: Annotated[int, typer.Option(min=0, help="Policy versions that a rollout may be behind when it is trained on.")] = 1,
    bootstrap_servers: Annotated[str | None, typer.Option(help="A Kafka to use; otherwise the configured one, or one is started.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the figure.")] = Path("headrace-demo"),
    keep: Annotated[bool, typer.Option("--keep", help="Leave topics and files to look at.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object with the numbers on the last line.")] = False,
) -> None:
    """Show an agent getting better over a real Kafka: one worker and two agents, each a process."""
    from headrace.demo.options import DemoOptions  # noqa: PLC0415 - `headrace --help` does not wait for it
    from headrace.demo.session import Session  # noqa: PLC0415

    settings = Settings()
    if bootstrap_servers is not None:
        kafka = settings.kafka.model_copy(update={"bootstrap_servers": bootstrap_servers})
        settings = settings.model_copy(update={"kafka": kafka})
    options = DemoOptions(model=model.value, seed=seed, steps=steps or _STEPS[model.value], lag=lag, keep=keep, out=out.absolute())
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, so that both end everything in order
    result = Session(options, settings, Console()).run()
    if json:
        typer.echo(result.summary.model_dump_json())
