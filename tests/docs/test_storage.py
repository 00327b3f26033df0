"""docs/storage.md and the code agree on names, settings and their defaults."""

import re
from pathlib import Path

from headrace.consumers.worker.clock import SHARE
from headrace.consumers.worker.storage.step_files import KINDS, folder_key
from headrace.core.settings import Settings, WorkerSettings
from headrace.core.store.folders import MANIFEST
from headrace.schemas.state import REPORT_FILE, ROWS_FILE
from headrace.schemas.topics import TOPICS, TRAJECTORY_GROUPS
from headrace.trainer.plan import StateKey

PAGE = (Path(__file__).parents[2] / "docs" / "storage.md").read_text()


def test_the_names_of_folders_are_those_that_steps_are_stored_under() -> None:
    state = StateKey(model_id="<model>", incarnation="<incarnation>", step=0, attempt="<attempt>")
    for kind in KINDS.values():
        assert f"`{folder_key(state, kind).replace('00000000', '<step>')}/`" in PAGE
    assert all(f"`{name}`" in PAGE for name in (MANIFEST, REPORT_FILE, ROWS_FILE))


def test_settings_that_the_page_names_exist() -> None:
    sections = {name: field.annotation for name, field in Settings.model_fields.items()}
    named = set(re.findall(r"`(\w+)\.(\w+)`", PAGE)) - {
        ("manifest", "json"),
        ("report", "json"),
        ("rows", "safetensors"),
        ("logprobs", "safetensors"),
    }
    named -= {("retention", "ms"), ("retention", "bytes")}  # of a topic
    assert named
    for section, field in named:
        assert field in sections[section].model_fields  # type: ignore[union-attr]  # each is a model


def test_the_defaults_that_the_page_says_are_the_codes() -> None:
    worker = WorkerSettings()
    assert worker.keep_snapshots == 2
    assert "the last 2 of each model" in PAGE
    assert worker.orphan_grace_seconds == 24 * 3600
    assert worker.job_timeout_seconds == 3600
    (groups,) = (spec for spec in TOPICS if spec.name == TRAJECTORY_GROUPS)
    assert groups.config["retention.ms"] == str(7 * 24 * 3600 * 1000)
    assert SHARE == 0.9
