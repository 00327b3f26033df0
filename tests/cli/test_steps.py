"""`headrace steps` and `headrace inspect` on a ledger in the real broker, with reports in a real store."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import save
from tests.cli.recorded import SOLVER, Recorded

from headrace.cli.inspect_step import print_rows
from headrace.core import reports
from headrace.core.reports import RowsUnreadableError, read_report
from headrace.schemas.state import StepRecord
from headrace.trainer.rows_out import LAYOUT

Headrace = Callable[..., Any]


@pytest.fixture
def cli(headrace: Headrace, recorded: Recorded) -> Headrace:
    return lambda *arguments, **more: headrace(*arguments, **{**recorded.environment, **more})


def cells(line: str) -> list[str]:
    return [cell for cell in line.split("  ") if cell.strip()]


def test_steps_are_a_table_with_a_row_for_each(cli: Headrace):
    ran = cli("steps", "solver")
    heading, *rows = ran.out.rstrip().splitlines()
    assert [cell.strip() for cell in cells(heading)] == [
        "step", "version", "groups", "tokens", "cut", "job", "loss", "grad norm", "reward mean", "lag", "seconds", "refused",
        "committed at", "snapshot",
    ]  # fmt: skip
    assert [[cell.strip() for cell in cells(row)] for row in rows] == [
        ["1", "1", "1", "96", "groups_per_step", "-", "0.5", "1", "0.5", "0.25", "0.75", "-", "2026-11-30T08:00:01Z", "yes"],
        ["2", "2", "1", "96", "groups_per_step", "-", "0.25", "1", "0.5", "0.25", "0.75", "-", "2026-11-30T08:00:02Z", "no"],
        ["3", "3", "1", "96", "job", "job-7", "-0.125", "1", "0.5", "0.25", "0.75", "stale 1; trajectories: too_long 1",
         "2026-11-30T08:00:03Z", "no"],
    ]  # fmt: skip
    assert ran.err == "Other incarnations (--incarnation ID): old (2 steps)\n"


def test_ranges_the_last_and_another_incarnation_choose_among_steps(cli: Headrace):
    def shown(*options: str) -> list[tuple[str, int]]:
        return [(each["incarnation"], each["step"]) for each in cli("steps", SOLVER, "--json", *options).json]

    assert shown() == [("new", 1), ("new", 2), ("new", 3)]
    assert shown("--steps", "2..") == [("new", 2), ("new", 3)]
    assert shown("--last", "1") == [("new", 3)]
    assert shown("--steps", "..2", "--last", "1") == [("new", 2)]
    assert shown("--incarnation", "old") == [("old", 1), ("old", 2)]


def test_json_is_the_ledgers_records_as_they_stand(cli: Headrace, recorded: Recorded):
    found = [StepRecord.model_validate(each) for each in cli("steps", "solver", "--json").json]
    assert tuple(found) == recorded.steps


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("steps", "nobody"), "there is no model"),
        (("steps", "solver", "--steps", "x"), "'x' is no range of steps"),
        (("steps", "solver", "--incarnation", "older"), "has no incarnation older; there are old (2 steps), new (3 steps)"),
        (("inspect", "solver", "9"), "solver has no step 9: `headrace steps solver` lists those there are"),
        (("inspect", "solver", "1", "--rows"), "no report was kept"),
    ],
)
def test_what_is_not_there_is_said_in_one_line(cli: Headrace, arguments: tuple[str, ...], said: str):
    ran = cli(*arguments)
    assert ran.code == 1
    assert said in ran.err
    assert ran.err.count("\n") == 1


def test_no_step_in_a_range_is_said_and_no_error(cli: Headrace):
    ran = cli("steps", "second", "--steps", "7..")
    assert (ran.code, ran.out, ran.err) == (0, "", "second has committed no step in 7..\n")


def test_a_step_is_shown_with_its_report(cli: Headrace, recorded: Recorded):
    out = cli("inspect", "solver", "3").out
    said = dict(re.findall(r"^  (\S.*?) {2,}(.+?) *$", out, re.MULTILINE))
    assert said["version"] == "2 → 3"
    assert said["groups"] == f"1, at offset {recorded.offsets['g3']} of lane {recorded.steps[2].lane}"
    assert (said["job"], said["loss"], said["attempt"]) == ("job-7", "-0.125", "attempt-3")
    assert (said["learning_rate"], said["ppo"]) == ("0.0001", "True")
    assert "epsilon" not in said
    assert said["torch"] == "2.9.0"
    assert out.split("\nmetrics\n")[1].split()[:6] == ["tokens", "96", "reward_mean", "0.5", "lag_mean", "0.25"]
    made = recorded.steps[2]
    assert said["weights"] == f"{made.weights.digest}  {made.weights.uri}"
    assert "snapshot" not in said
    assert said["plan"] == made.plan_digest
    assert f"g3     {recorded.offsets['g3']}" in out
    assert "0 1      -0.5 0.5" in out
    refused = [line.split() for line in out.split("rejected since the step before (5)")[1].splitlines() if line]
    assert refused[1][:5] == ["refused", "-", str(recorded.offsets["refused"]), "-", "stale"]
    assert refused[2][:5] == ["g3", "2", str(recorded.offsets["g3"]), "-", "too_long"]
    assert " ".join(refused[3]) == "and 3 more, in the topic training-events"
    assert said["store"] == "0.0625"
    assert said["kept"] == "none kept (worker.report_rows)"


def test_a_step_without_a_report_is_shown_from_the_ledger(cli: Headrace):
    ran = cli("inspect", "solver", "1")
    assert ran.code == 0
    assert "all" in ran.out
    assert "at its default" in ran.out
    assert "no report was kept: the ledger names none for this step" in ran.out


def test_inspect_as_json_has_record_and_report(cli: Headrace, recorded: Recorded):
    both = cli("inspect", "solver", "3", "--json").json
    assert StepRecord.model_validate(both["record"]) == recorded.steps[2]
    assert both["report"] == read_report(recorded.store, recorded.steps[2].report).model_dump(mode="json")
    assert both["report_problem"] is None
    without = cli("inspect", "solver", "1", "--json").json
    assert without["report"] is None
    assert without["report_problem"].startswith("no report was kept")


def test_rows_are_listed_by_sequence_and_some_token_by_token(cli: Headrace):
    out = cli("inspect", "solver", "2", "--rows").out
    assert "sample, in file://" in out
    sequences, first, last = (part.splitlines() for part in out.split("\nsequences of 2 of 5 rows\n")[1].split("\n\n"))
    assert [line.split() for line in sequences[1:]] == [
        ["0", "0", "0", "0", "g2", "0", "0", "3", "2", "0.5", "1.0333", "2"],
        ["0", "0", "0", "0", "g2", "4", "1", "2", "1", "0.5", "1.0889", "2"],
        ["3", "1", "1", "1", "other", "1", "0", "41", "40", "0.5", "1.5667", "2"],
    ]
    assert first[0] == "row 0: first 2 of 2 trained tokens of g2, trajectory 0"
    # Context is left out; what the sampler did not say is no number.
    assert first[2].split() == ["1", "101", "2", "0.5", "0.25", "1.0222", "-", "-1.5", "-1.25"]
    assert last[0] == "row 3: first 12 of 40 trained tokens of other, trajectory 1"
    assert len(last) == 2 + 12


def test_where_no_rows_were_kept_inspect_says_what_to_set(cli: Headrace):
    assert "no rows were kept: set worker.report_rows to sample or all" in cli("inspect", "solver", "3", "--rows").out


def test_rows_of_another_layout_are_shown_as_arrays_and_what_is_none_is_refused():
    console = Console(record=True, width=200)
    print_rows(console, save({"a": np.zeros((2, 3), np.float32)}))
    assert ["a", "float32", "[2,", "3]"] in [line.split() for line in console.export_text().splitlines()]
    with pytest.raises(RowsUnreadableError, match="the rows are no safetensors file"):
        print_rows(console, b"no rows")


def test_the_layout_is_the_trainers():
    assert reports.LAYOUT == LAYOUT
