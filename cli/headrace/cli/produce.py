"""`headrace produce FILE.jsonl`: groups from a file into the log, one a line; or examples for supervised fine-tuning."""

import asyncio
import logging
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, BinaryIO

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from headrace.cli.arguments import Project, model_id, plain
from headrace.core.job_views import outcome_messages, trained_nothing
from headrace.core.jobs import wait_until_over
from headrace.core.settings import Settings
from headrace.producers import DeliveryError, InvalidGroupError, TrajectoryProducer
from headrace.producers.examples import BadLine, GoodLine, decode_example, parcels, read_groups
from headrace.producers.producer import Delivery
from headrace.schemas.codec import decode_group
from headrace.schemas.jobs import JobState
from headrace.schemas.training import SftConfig


def produce(
    file: Annotated[str, typer.Argument(metavar="FILE", help="One JSON group a line; `-` reads standard input.")],
    model: Annotated[str, typer.Option("--model", "-m", help="Id or name.")],
    project: Project = None,
    job: Annotated[
        bool, typer.Option("--job", help="Ask for one training step on exactly these groups; nothing is sent if a line is bad.")
    ] = False,
    job_id: Annotated[str | None, typer.Option(help="Id of the job; sending it again with the same id and file is safe.")] = None,
    *,
    sft: Annotated[
        bool,
        typer.Option("--sft", help='A job that imitates: lines are {"messages": [...], "tools": [...]}, or groups. Implies --job.'),
    ] = False,
    epochs: Annotated[int | None, typer.Option(help="With --sft: how often each example is trained on; 1.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="With --sft: examples of one optimizer update; 2.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="With --sft: 5e-5.")] = None,
    wait: Annotated[float, typer.Option(min=0, help="Of a job: seconds to wait for its end; 0 returns when the job is in the log.")] = 60,
) -> None:
    """Send groups from a file. The exit code is 1 if a line is bad, or if the job failed or trained nothing; each reason is printed."""
    if job_id is not None and not (job or sft):
        raise typer.BadParameter("it names a job, but the groups go into the stream: add --job or --sft", param_hint="--job-id")
    examples = _sft_config(sft=sft, epochs=epochs, batch_size=batch_size, learning_rate=learning_rate)
    if file != "-" and not Path(file).is_file():
        raise typer.BadParameter(f"{file} is no file", param_hint="FILE")
    logging.getLogger("headrace.producers").setLevel(logging.CRITICAL)  # each failure is printed with its line instead
    settings = Settings()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    progress = Progress(*columns, console=Console(stderr=True), transient=True)

    async def run() -> _Sender:
        async with TrajectoryProducer(settings, model_id=await model_id(settings, project, model)) as producer:
            sender = _Sender(producer, progress)
            await sender.send_all(stream, size, job=job or sft, job_id=job_id, sft=examples)
            return sender

    size = None if file == "-" else Path(file).stat().st_size
    with progress, nullcontext(sys.stdin.buffer) if file == "-" else Path(file).open("rb") as stream:
        sender = asyncio.run(run())
    if sender.job_id is not None:
        typer.echo(f"job {sender.job_id}")
    typer.echo(f"sent {sender.sent}, bad {sender.bad}, failed {sender.failed}")
    if sender.bad or sender.failed:
        if job or sft:
            typer.echo("the job was not submitted", err=True)
        raise typer.Exit(1)
    if sender.job_id is not None and wait and not _told_of_end(settings, sender.job_id, wait):
        raise typer.Exit(1)


def _told_of_end(settings: Settings, job_id: str, seconds: float) -> bool:
    """Wait for the job's end and print what came of it; whether that is no failure."""
    document = asyncio.run(wait_until_over(settings, job_id, seconds))
    if document is None:
        typer.echo(f"no worker has read the job within {seconds:g} s: is one running (`headrace worker`)? It stays in the log", err=True)
        return True
    for message in outcome_messages(document):
        typer.echo(plain(message), err=True)
    match document.state:
        case JobState.COMPLETED:
            metrics = document.metrics
            shown = ", ".join(f"{name} {metrics[name]:.4g}" for name in ("loss", "reward_mean", "trainable_tokens") if name in metrics)
            typer.echo(f"step {document.step}" + (f": {shown}" if shown else ""))
            return not trained_nothing(document)
        case JobState.FAILED | JobState.CANCELLED:
            typer.echo(plain(f"the job ended as {document.state}: {document.error_message}"), err=True)
            return False
        case _:
            why = f": {document.waiting_for}" if document.waiting_for else ""
            typer.echo(f"the job is {document.state} after {seconds:g} s{why}; `headrace jobs show {job_id}` shows its state", err=True)
            return True


def _sft_config(*, sft: bool, **options: float | None) -> SftConfig | None:
    """The job's options; the others keep their defaults."""
    given = {name: value for name, value in options.items() if value is not None}
    if not sft:
        if given:
            raise typer.BadParameter("--" + ", --".join(name.replace("_", "-") for name in given) + " need --sft")
        return None
    try:
        return SftConfig.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0]).replace("_", "-")
        raise typer.BadParameter(first["msg"], param_hint=f"--{name}") from None


class _Sender:
    """Sends lines and keeps count. Each failure is printed with its line when it happens."""

    def __init__(self, producer: TrajectoryProducer, progress: Progress) -> None:
        self._producer = producer
        self._progress = progress
        self.sent = self.bad = self.failed = 0
        self.job_id: str | None = None

    async def send_all(self, stream: BinaryIO, size: int | None, *, job: bool, job_id: str | None, sft: SftConfig | None) -> None:
        """Every line; the groups of a job are held until the last line is read."""
        bar = self._progress.add_task("sending", total=size)
        held = []
        async for line in self._good_lines(stream, bar, sft=sft is not None):
            if job:
                held.append(line)
                continue
            try:
                delivery = await self._producer.submit(line.group)
            except InvalidGroupError as error:
                self._say_bad(line.number, str(error))
            else:
                delivery.add_done_callback(partial(self._delivered, line.number))
        await self._producer.flush()
        if job and not self.bad:
            job_id = job_id or str(uuid.uuid4())
            groups = [line.group for line in held] if sft is None else [*parcels(held, job_id)]
            try:
                self.job_id = await self._producer.submit_job(groups, job_id=job_id, sft=sft)
                self.sent = len(held)
            except (InvalidGroupError, DeliveryError) as error:
                self.failed = len(held)
                self._progress.console.print(str(error), markup=False, highlight=False, soft_wrap=True)

    async def _good_lines(self, stream: BinaryIO, bar: TaskID, *, sft: bool) -> AsyncIterator[GoodLine]:

        lines = read_groups(stream, decode=decode_example if sft else decode_group)
        while (line := await asyncio.to_thread(next, lines, None)) is not None:
            self._progress.update(bar, completed=line.end)
            if isinstance(line, BadLine):
                self._say_bad(line.number, f"{line.path}: {line.detail}" if line.path else line.detail)
            else:
                yield line

    def _delivered(self, number: int, delivery: Delivery) -> None:
        if error := delivery.exception():
            self.failed += 1
            self._print(number, str(error))
        else:
            self.sent += 1

    def _say_bad(self, number: int, why: str) -> None:
        self.bad += 1
        self._print(number, why)

    def _print(self, number: int, why: str) -> None:
        self._progress.console.print(f"line {number}: {why}", markup=False, highlight=False, soft_wrap=True)
