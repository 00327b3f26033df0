"""`headrace compare` on two ledgers in the real broker."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.cli.recorded import SECOND, SOLVER, Recorded

Headrace = Callable[..., Any]


@pytest.fixture
def cli(headrace: Headrace, recorded: Recorded) -> Headrace:
    return lambda *arguments, **more: headrace(*arguments, **{**recorded.environment, **more})


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_settings_come_first_then_steps_then_a_summary(cli: Headrace):
    ran = cli("compare", "solver", "second", "--metric", "loss", "--metric", "reward_mean")
    settings, steps, summary, end = (rows(part) for part in ran.out.rstrip().split("\n\n"))
    assert settings == [["option", "solver", "second"], ["lora.r", "16", "4"], ["train.learning_rate", "default", "3e-05"]]
    # No step that both have ran with other options: the job's are of step 3.
    assert steps[0] == ["step", "metric", "solver", "second", "difference", "equal"]
    assert steps[1:] == [
        ["1", "loss", "0.5", "0.5", "+0", "plan"],
        ["1", "reward_mean", "0.5", "0.5", "+0"],
        ["2", "loss", "0.25", "0.5", "+0.25", "plan"],
        ["2", "reward_mean", "0.5", "0.75", "+0.25"],
        ["3", "loss", "-0.125", "-", "-", "only", "solver"],
        ["3", "reward_mean", "0.5", "-", "-"],
    ]
    assert summary[1:] == [
        ["loss", "0.375", "0.5", "+0.125", "+0.25", "2", "2"],
        ["reward_mean", "0.5", "0.625", "+0.125", "+0.25", "2", "2"],
    ]
    assert " ".join(end[0]) == "2 steps in both, 1 in one of them; weights equal bit for bit after 0"


def test_json_has_settings_steps_and_summary(cli: Headrace):
    found = cli("compare", "solver", "second", "--steps", "2..", "--json").json
    assert (found["a"], found["b"]) == (SOLVER, SECOND)
    assert [each["name"] for each in found["settings"]] == ["lora.r", "train.learning_rate"]
    assert [(pair["step"], pair["cut_a"], pair["cut_b"]) for pair in found["side_by_side"]["steps"]] == [
        (2, "groups_per_step", "groups_per_step"),
        (3, "job", None),
    ]
    names = [metric["name"] for metric in found["side_by_side"]["steps"][0]["metrics"]]
    assert names == ["loss", "grad_norm", "reward_mean", "ratio_mean", "lag_mean"]


def test_a_model_equals_itself(cli: Headrace, recorded: Recorded):
    ran = cli("compare", "solver", SOLVER, "--metric", "loss", "--prefix-b", recorded.environment["HEADRACE_TOPICS__PREFIX"])
    assert ran.out.startswith("The settings of both models are equal.")
    assert ["1", "loss", "0.5", "0.5", "+0", "groups,", "plan,", "weights"] in rows(ran.out)
    assert "3 steps in both, 0 in one of them; weights equal bit for bit after 3" in ran.out


def test_a_model_is_looked_for_under_its_own_prefix(cli: Headrace):
    ran = cli("compare", "solver", "second", "--prefix-b", "nowhere.")
    assert ran.code == 1
    assert "nowhere." in ran.err
    wrong = cli("compare", "solver", "second", "--prefix-a", "no blanks")
    assert wrong.code == 1
    assert "prefix: String should match pattern" in wrong.err


def test_no_step_in_a_range_is_said(cli: Headrace):
    ran = cli("compare", "solver", "second", "--steps", "9..")
    assert ran.code == 0
    assert ran.err == "neither has a step there\n"
