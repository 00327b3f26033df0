"""docs/jobs.md says what the code does: states, transitions, commands, settings."""

import re
from pathlib import Path

from tests.core.test_jobs import shown
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.core.settings import WorkerSettings
from headrace.schemas.jobs import TRANSITIONS, JobOptions, JobState

PAGE = (Path(__file__).parents[2] / "docs" / "jobs.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """Cells of the table of a section, without its head."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in re.findall(r"^\|.*", section, re.MULTILINE)[2:]]


def test_every_state_is_explained_and_those_that_are_final_say_so() -> None:
    said = {name.strip("`"): meaning for name, meaning in rows("States")}
    assert set(said) == {state.value for state in JobState}
    assert {name for name, meaning in said.items() if meaning.endswith("Final.")} == {
        s.value for s, after in TRANSITIONS.items() if not after
    }


def test_the_transitions_are_those_of_the_code() -> None:
    said = {(JobState[before], JobState[after]) for before, after, *_ in rows("Who moves it")}
    assert said == {(before, after) for before, to in TRANSITIONS.items() for after in to}


def test_what_shows_of_a_command_is_what_the_page_says() -> None:
    before = {"cancel": "RUNNING", "pause": "RUNNING", "resume": "PAUSED"}
    said = {asked: text for asked, text, _ in rows("What is asked of it")}
    assert set(said) == set(before)
    for request, state in before.items():
        found, requested, _ = shown(state, [request])
        assert requested == request
        assert f"`JOB_STATE_{found}`" in said[request] or (found == state and said[request].startswith("as before"))


def test_what_a_job_may_ask_for_is_all_there() -> None:
    assert [name.strip("`") for name, *_ in rows("What a job may ask for")] == list(JobOptions.model_fields)


def test_the_settings_have_the_defaults_that_the_page_says() -> None:
    said = {name.strip("`").removeprefix("worker."): float(default) for name, default, _ in rows("Time-outs")}
    assert said == {name: getattr(WorkerSettings(), name) for name in said}


def test_the_commands_of_the_page_exist_with_their_options() -> None:
    commands = re.findall(r"^headrace jobs (\w+)(.*)$", PAGE, re.MULTILINE)
    assert {name for name, _ in commands} == {"list", "show", "pause", "resume", "cancel"}
    for name, options in commands:
        text = CliRunner().invoke(app, ["jobs", name, "--help"], env={"COLUMNS": "200"}).output
        assert all(option in text for option in re.findall(r"--[a-z]+", options)), name
