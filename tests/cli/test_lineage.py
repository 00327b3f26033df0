"""`headrace lineage` on a ledger in the real broker."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from tests.cli.recorded import SOLVER, Recorded

Headrace = Callable[..., Any]


@pytest.fixture
def cli(headrace: Headrace, recorded: Recorded) -> Headrace:
    return lambda *arguments, **more: headrace(*arguments, **{**recorded.environment, **more})


def test_a_version_has_the_groups_of_its_step(cli: Headrace, recorded: Recorded):
    found = cli("lineage", "solver", "--version", "2", "--json").json
    (version,) = found["versions"]
    assert found["model_id"] == SOLVER
    assert (version["version"], version["step"], version["source"], version["problem"]) == (2, 2, "report", None)
    (group,) = version["groups"]
    assert (group["group_id"], group["offset"], group["producer"]) == ("g2", recorded.offsets["g2"], "agent-1")
    assert [(each["tokens"], each["reward"]) for each in group["trajectories"]] == [(40, 0.0), (41, 1.0)]


def test_all_versions_up_to_one_are_listed_and_summed(cli: Headrace, recorded: Recorded):
    versions = cli("lineage", "solver", "--version", "3", "--all", "--json").json["versions"]
    assert [(each["version"], each["source"], [g["group_id"] for g in each["groups"]]) for each in versions] == [
        (1, "log", ["g1"]),
        (2, "report", ["g2"]),
        (3, "report", ["g3"]),
    ]
    ran = cli("lineage", "solver", "--version", "3", "--all")
    rows = [line.split() for line in ran.out.splitlines()]
    assert rows[1] == ["1", "groups_per_step", "g1", str(recorded.offsets["g1"]), "agent-1", "-", "-", "-"]
    assert rows[3] == ["3", "job", "g3", str(recorded.offsets["g3"]), "agent-1", "2", "81", "0", "1"]
    assert "3 groups; as far as reports say 4 trajectories, 162 tokens" in ran.out
    assert ran.err == "version 1: no report was kept: the ledger names none for this step\n"


def test_a_trained_group_is_shown_with_the_versions_that_rest_on_it(cli: Headrace, recorded: Recorded):
    found = cli("lineage", "solver", "--group", "g2", "--json").json
    assert (found["status"], found["step"], found["version"], found["versions"]) == ("trained", 2, 2, [2, 3])
    out = cli("lineage", "solver", "--group", "g3").out
    assert "g3 was trained on in step 3, job job-7, which made version 3" in out
    assert f"offset {recorded.offsets['g3']} of lane {recorded.steps[0].lane}, sent by agent-1" in out
    assert "version 3 rests on it" in out
    assert "versions 2..3 rest on it" in cli("lineage", "solver", "--group", "g2").out
    assert "trajectory 2 was refused alone: too_long: 9,000 tokens" in out


def test_what_waits_and_what_was_only_sent_is_said_with_its_offset(cli: Headrace, recorded: Recorded):
    assert (
        f"waits waits at offset {recorded.offsets['waits']}, in the bucket of the stream"
        in cli("lineage", "solver", "--group", "waits").out
    )
    sent = cli("lineage", "solver", "--group", "late")
    assert f"late is at offset {recorded.offsets['late']}, for the stream, beyond what its owner has committed: it waits" in sent.out
    assert sent.code == 0


def test_a_refused_group_comes_with_its_reason_from_report_or_event(cli: Headrace, recorded: Recorded):
    of_report = cli("lineage", "solver", "--group", "refused").out
    assert of_report.splitlines()[0] == "refused was refused"
    assert f"refused at offset {recorded.offsets['refused']}: stale: 9 versions old" in of_report
    (of_event,) = cli("lineage", "solver", "--group", "refused-late", "--json").json["refusals"]
    assert (of_event["offset"], of_event["reason"]) == (900, "stale")


def test_an_unknown_group_ends_with_code_1(cli: Headrace):
    ran = cli("lineage", "solver", "--group", "nobody")
    assert ran.code == 1
    assert "nobody is unknown: it was not trained on, is not among the refused, and does not wait" in ran.out


def test_an_incarnation_that_has_ended_has_its_own_lineage(cli: Headrace):
    found = cli("lineage", "solver", "--version", "2", "--incarnation", "old", "--json").json
    assert [each["version"] for each in found["versions"]] == [2]
    assert cli("lineage", "solver", "--group", "waits", "--incarnation", "old").code == 1


def test_a_fork_says_what_it_begins_with(cli: Headrace):
    (version,) = cli("lineage", "fork", "--version", "1", "--json").json["versions"]
    assert (version["forked"]["forked_from"], version["forked"]["step"], version["groups"]) == (SOLVER, 2, [])
    out = cli("lineage", "fork", "--version", "1").out
    assert ["1", "forked", "-", "(none)", "-", "-", "-", "-", "-"] in [line.split() for line in out.splitlines()]
    assert f"version 1 is a fork of model {SOLVER} after its step 2: `headrace lineage {SOLVER} --version 2 --all`" in out
    shown = cli("inspect", "fork", "1").out
    assert re.search(rf"^  forked_from +{SOLVER}$", shown, re.MULTILINE)


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ((), 2, "give one of the two"),
        (("--version", "1", "--group", "g"), 2, "give one of the two"),
        (("--group", "g", "--all"), 2, "it needs --version"),
        (("--version", "4"), 1, "solver has no version 4: its latest is 3, and 0 is its base model"),
    ],
)
def test_what_can_not_be_asked_is_refused(cli: Headrace, options: tuple[str, ...], code: int, said: str):
    ran = cli("lineage", "solver", *options)
    assert ran.code == code
    assert said in ran.err
