"""docs/dead-letters.md says what the code does: reasons, headers, commands."""

import re
from pathlib import Path

from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.consumers.asyncapi import asyncapi_document
from headrace.schemas.dead_letters import DeadLetterResolved
from headrace.schemas.envelope import type_of
from headrace.schemas.reasons import DeadLetterReason

PAGE = (Path(__file__).parents[2] / "docs" / "dead-letters.md").read_text()


def first_column(heading: str) -> list[str]:
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [line.split("|")[1] for line in re.findall(r"^\|.*", section, re.MULTILINE)[2:]]


def test_every_reason_is_there_in_the_order_of_the_code() -> None:
    assert [cell.strip().strip("`") for cell in first_column("Reasons")] == [reason.value for reason in DeadLetterReason]


def test_every_header_is_there() -> None:
    names = re.findall(r"`([^`]+)`", "".join(first_column("The record")))
    said = {name if name.startswith("headrace") else f"headrace-error{name}" for name in names}
    assert said == set(asyncapi_document()["components"]["schemas"]["DeadLetterHeaders"]["properties"])


def test_the_record_of_what_was_done_is_named_as_it_is() -> None:
    assert f"`DeadLetterResolved` (`ce_type` `{type_of(DeadLetterResolved)}`)" in PAGE


def test_the_commands_of_the_page_exist_with_their_options() -> None:
    commands = re.findall(r"^headrace dlq (\w+)(.*)$", PAGE, re.MULTILINE)
    assert [name for name, _ in commands] == ["list", "show", "retry", "drop"]
    for name, options in commands:
        text = CliRunner().invoke(app, ["dlq", name, "--help"], env={"COLUMNS": "200"}).output
        assert all(option in text for option in re.findall(r"--[a-z]+", options)), name
