"""`headrace doctor`: what is there, what is missing, what to do."""

from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import orjson
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headrace.core import checkup
from headrace.core.checkup import Finding
from headrace.core.errors import install_advice
from headrace.core.settings import Settings

TRAINER_PACKAGES = ("torch", "transformers", "deepspeed", "peft")


class Role(StrEnum):
    """What this machine is for."""

    WORKER = "worker"
    PRODUCER = "producer"


def doctor(
    role: Annotated[Role, typer.Option("--for", help="A producer needs no trainer packages and no base models.")] = Role.WORKER,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array.")] = False,
) -> None:
    """Check Python, Kafka, topics, store, Java, trainer packages, devices and base models. Exit code 1 if something needed is missing."""
    settings = Settings()
    findings = [*checkup.check_python(), *checkup.check_kafka(settings), *checkup.check_store(settings), *checkup.check_java(settings)]
    if role is Role.WORKER:
        findings += [*_packages(), *_devices(), *checkup.check_base_models(settings), *checkup.check_models(settings)]
    if as_json:
        typer.echo(orjson.dumps([{"name": f.name, "state": _state(f), "detail": f.detail, "advice": f.advice} for f in findings]))
    else:
        table = Table.grid(padding=(0, 2))
        for overflow in ("ellipsis", "ellipsis", "fold"):
            table.add_column(overflow=overflow)
        for finding in findings:
            state = _state(finding)
            style = {"ok": "green", "missing": "bold red"}.get(state, "yellow")
            advice = f"\n→ {finding.advice}" if finding.advice else ""
            table.add_row(f"[{style}]{state}[/]", finding.name, _plain(finding.detail + advice))
        Console().print(table)
    if any(_state(finding) == "missing" for finding in findings):
        raise typer.Exit(1)


def _state(finding: Finding) -> str:
    if finding.ok:
        return "ok"
    return "missing" if finding.needed else "absent"


def _plain(text: str) -> str:

    return escape(text)


def _packages() -> list[Finding]:

    findings = []
    for name in TRAINER_PACKAGES:
        try:
            findings.append(Finding(name=name, ok=True, detail=version(name)))
        except PackageNotFoundError:
            findings.append(Finding(name=name, ok=False, detail="not installed", advice=install_advice("trainer")))
    return findings


def _devices() -> list[Finding]:
    """What a rank would train on. Importing torch takes seconds and is the only way to know that it works."""
    try:
        import torch  # noqa: PLC0415 - it takes seconds
    except (ImportError, OSError) as error:
        return [Finding(name="devices", ok=False, detail=f"torch can't be imported: {error}", advice=install_advice("trainer"))]
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    cpu = f"CPU, {torch.get_num_threads()} threads (float32)"
    return [Finding(name="devices", ok=True, detail=", ".join(gpus) or cpu)]
