"""docs/replay.md and the code name the same things: names of expressions, and options of the commands that are shown."""

import re
import shlex
from pathlib import Path

from typer.main import get_command

from headrace.cli.app import load_command
from headrace.cli.replay import app as replay_app
from headrace.consumers.replay.where import FOLDERS, NUMBERS, TEXTS, Where

PAGE = (Path(__file__).parents[2] / "docs" / "replay.md").read_text()


def section(heading: str) -> str:
    return PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def test_the_table_of_names_has_each_name_of_an_expression() -> None:
    cells = re.findall(r"^\| (`.+?`) \| (?:trajectory|group|both) \|", section("Expressions"), re.MULTILINE)
    names = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    assert sorted(names) == sorted([*NUMBERS, *TEXTS, *(f"{folder}.NAME" for folder in FOLDERS)])


def test_the_expressions_that_are_shown_are_read() -> None:
    shown = re.findall(r"--where '(.+?)'", PAGE) + re.findall(r"`(\d <[^`]+)`", PAGE)
    assert len(shown) == 2
    for text in shown:
        Where.parse(text)


def test_the_commands_that_are_shown_have_the_options_they_are_given() -> None:
    lines = re.findall(r"^(headrace replay .+)$", PAGE, re.MULTILINE)
    assert len(lines) == 6
    for line in lines:
        words = shlex.split(line.partition(" | ")[0])[1:]
        command = load_command(words.pop(0))
        while words and words[0] in getattr(command, "commands", ()):
            command = command.commands[words.pop(0)]  # type: ignore[attr-defined]  # it has them
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known


def test_the_tables_of_options_have_those_that_choose() -> None:
    groups = get_command(replay_app).commands["groups"]  # type: ignore[attr-defined]  # it is a group
    options = {option for parameter in groups.params for option in parameter.opts if option.startswith("--")}
    named = set(re.findall(r"`(--[a-z-]+)", section("Groups")))
    assert options - named == {"--project", "--model"}
