"""docs/ledger.md and the schemas name the same fields with the same types, and every command and option that it shows exists."""

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.cli.steps import COLUMNS as STEP_COLUMNS
from headrace.core.side_by_side import METRICS
from headrace.schemas.state import (
    Fingerprint,
    Rebased,
    ReportedGroup,
    ReportedTrajectory,
    StartFrom,
    StepRecord,
    StepReport,
    TrainingScalars,
)
from headrace.schemas.weights import WeightsRef

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "ledger.md").read_text()
TRAINING = (ROOT / "docs" / "training.md").read_text()


def table_of(kind: type[BaseModel]) -> list[tuple[str, str]]:
    """Names and types in the first table of fields behind the place that names the schema."""
    after = PAGE[PAGE.index(f"\n`{kind.__name__}`") if f"\n`{kind.__name__}`" in PAGE else PAGE.index(f"a `{kind.__name__}`") :]
    table = re.search(r"\| field \| type \| what it is \|\n\|[-|]+\|\n((?:\|.*\n)+)", after)
    assert table is not None
    return [(name, said) for name, said in re.findall(r"^\| `(\w+)` \| (.*?) \| .+\. ?\|$", table[1], re.MULTILINE)]


def type_of(part: dict[str, Any]) -> str:
    """How the page writes the type of a field, from its JSON Schema."""
    match part:
        case {"$ref": str(ref)}:
            return f"`{ref.rpartition('/')[2]}`"
        case {"anyOf": kinds}:
            return " or ".join("null" if each.get("type") == "null" else type_of(each) for each in kinds)
        case {"enum": values}:
            return ", ".join(f"`{value}`" for value in values)
        case {"type": "array", "items": items}:
            return f"list of {type_of(items)}"
        case {"type": "object", "additionalProperties": values}:
            return f"map to {type_of(values)}"
    words = {"integer": "int", "number": "float", "string": "string", "boolean": "bool"}
    return "time" if part.get("format") == "date-time" else words[part["type"]]


@pytest.mark.parametrize(
    "kind", [StepRecord, WeightsRef, Fingerprint, TrainingScalars, Rebased, StartFrom, StepReport, ReportedGroup, ReportedTrajectory]
)
def test_every_field_is_there_in_the_order_of_the_schema_with_its_type(kind: type[BaseModel]):
    fields = kind.model_json_schema()["properties"]
    assert table_of(kind) == [(name, type_of(part)) for name, part in fields.items()]


def test_metrics_that_are_compared_are_those_of_the_code_and_are_explained():
    (said,) = re.findall(r"without `--metric` it is ((?:`\w+`(?:, | and )?)+)", PAGE)
    assert tuple(re.findall(r"`(\w+)`", said)) == METRICS
    assert all(f"`{name}`" in TRAINING for name in METRICS)


def test_every_command_and_its_options_exist():
    sections = re.split(r"^### headrace (\w+)$", PAGE.split("\n## Commands\n")[1].split("\n## ")[0], flags=re.MULTILINE)
    assert sections[1::2] == ["steps", "inspect", "lineage", "compare"]
    for command, section in zip(sections[1::2], sections[2::2], strict=True):
        shown = CliRunner().invoke(app, [command, "--help"], terminal_width=200)
        assert shown.exit_code == 0
        for option in {"--json", "--project", *re.findall(r"(?<![\w-])--[a-z][a-z-]+", section)} - {"--set"}:
            assert option in shown.output, (command, option)


def test_samples_have_the_headings_that_the_commands_print():
    source = {name: (ROOT / "cli" / "headrace" / "cli" / f"{name}.py").read_text() for name in ("steps", "inspect_step", "lineage")}
    samples = re.findall(r"^```\n\$ headrace (\w+) .*\n((?:.*\n)*?)```$", PAGE, re.MULTILINE)
    assert {command for command, _ in samples} == {"steps", "inspect", "lineage", "compare"}
    (steps,) = [text.splitlines()[0] for command, text in samples if command == "steps"]
    assert re.split(r" {2,}", steps.strip()) == list(STEP_COLUMNS)
    (inspect,) = [text for command, text in samples if command == "inspect"]
    for heading in (
        "config (options that are not named have their defaults)",
        "metrics",
        "digests",
        "fingerprint",
        "groups (",
        "seconds",
        "packed rows",
    ):
        assert f"\n{heading}" in inspect
        assert f'"{heading}' in source["inspect_step"] or f"\\n{heading}" in source["inspect_step"]


def test_links_lead_somewhere():
    headings = {re.sub(r"[^a-z0-9 -]", "", line.lower()).replace(" ", "-") for line in re.findall(r"^#+ (.*)$", PAGE, re.MULTILINE)}
    elsewhere = {re.sub(r"[^a-z0-9 -]", "", line.lower()).replace(" ", "-") for line in re.findall(r"^#+ (.*)$", TRAINING, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGE)) <= headings
    assert set(re.findall(r"\]\(training\.md#([^)]+)\)", PAGE)) <= elsewhere
    for link in re.findall(r"\]\(([^)#]+)", PAGE):
        assert (ROOT / "docs" / link).exists(), link
