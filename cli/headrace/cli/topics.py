"""`headrace topics apply|show`: the topics of the settings' prefix."""

import asyncio
from typing import Annotated

import orjson
import typer
from rich.console import Console
from rich.table import Table

from headrace.core import topic_admin
from headrace.core.settings import Settings
from headrace.core.topic_admin import TopicReport

app = typer.Typer(help="Create the topics, and see where they differ.", no_args_is_help=True, add_completion=False)

AsJson = Annotated[bool, typer.Option("--json", help="One JSON array.")]


@app.command()
def apply(as_json: AsJson = False) -> None:
    """Create missing topics and put their settings right. Partition counts are never changed: another count is an error."""
    done = {"missing": "created", "differs": "changed", "equal": "unchanged"}
    _print(asyncio.run(topic_admin.apply(Settings())), done, as_json)


@app.command()
def show(as_json: AsJson = False) -> None:
    """Compare the topics with the settings. Exit code 1 if one is missing or differs."""
    reports = asyncio.run(topic_admin.show(Settings()))
    _print(reports, {}, as_json)
    if any(report.state != "equal" for report in reports):
        raise typer.Exit(1)


def _print(reports: list[TopicReport], words: dict[str, str], as_json: bool) -> None:

    if as_json:
        typer.echo(
            orjson.dumps(
                [
                    {
                        "topic": report.topic,
                        "state": words.get(report.state, report.state),
                        "partitions": report.partitions,
                        "wanted_partitions": report.wanted_partitions,
                        "differences": report.differences,
                    }
                    for report in reports
                ]
            )
        )
        return
    table = Table("topic", "partitions", "key", "state", "was → must be", box=None, header_style="bold")
    for report in reports:
        count = report.wanted_partitions if report.partitions is None else report.partitions
        differences = [f"{d.name}: {d.found} → {d.wanted}" for d in report.differences]
        if report.spec.lane and report.partitions not in {None, report.wanted_partitions}:
            differences.append(f"partitions: {report.partitions} → {report.wanted_partitions} (topics.partitions)")
        table.add_row(report.topic, str(count), report.spec.key, words.get(report.state, report.state), "\n".join(differences))
    Console(soft_wrap=True, markup=False).print(table)
