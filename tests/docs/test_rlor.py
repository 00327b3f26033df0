"""The page of the RLOR API names every field, state and call."""

import re
from pathlib import Path

from pydantic.alias_generators import to_camel

from headrace.gateway.rlor.job_fields import WITHOUT_EFFECT, JobFields, TrainingConfig
from headrace.gateway.rlor.jobs import router
from headrace.schemas.jobs import JobState

PAGE = (Path(__file__).parents[2] / "docs" / "rlor.md").read_text()


def test_every_field_that_has_an_effect_is_named():
    idle = {path.rpartition(".")[2] for path in WITHOUT_EFFECT}
    names = {*JobFields.model_fields, *TrainingConfig.model_fields} - idle
    missing = [name for name in names if to_camel(name) not in PAGE]
    assert not missing


def test_every_state_that_is_shown_is_in_the_table_and_no_other():
    section = PAGE.split("\n## States\n")[1].split("\n## ")[0]
    states = set(re.findall(r"`([A-Z]+)`", "".join(line.split("|")[1] for line in section.splitlines() if line.startswith("| `"))))
    assert states == {state.removeprefix("JOB_STATE_") for state in JobState} | {"CANCELLING", "EXPIRED", "DELETING"}


def test_every_call_is_in_the_table():
    for route in router.routes:
        path = getattr(route, "path", "")
        assert path.rpartition(":" if ":" in path else "/")[2].strip("{}_id") in PAGE, path
