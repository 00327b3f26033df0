"""docs/shadow.md names commands, options, settings and topics that exist, and its configuration is valid."""

import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.core.settings import Settings, TopicSettings, WorkerSettings

PAGE = (Path(__file__).parents[2] / "docs" / "shadow.md").read_text()


def test_the_configuration_of_the_page_is_that_of_a_shadow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_CONFIG", raising=False)
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    found = Settings(**yaml.safe_load(text))
    assert (found.topic_names.steps, found.groups_topic) == ("trial.steps", "headrace.trajectory-groups")
    assert found.worker_group_id != Settings(topics=TopicSettings(prefix="headrace.")).worker_group_id
    assert found.topics.partitions == TopicSettings().partitions


def test_the_settings_that_the_page_names_exist() -> None:
    sections = {"topics": TopicSettings, "worker": WorkerSettings}
    named = set(re.findall(r"`(topics|worker)\.(\w+)`", PAGE))
    assert ("worker", "shadow_prefix") in named
    assert all(field in sections[section].model_fields for section, field in named)


def test_the_commands_of_the_page_exist_with_their_options() -> None:
    commands = re.findall(r"^headrace (.*)$", PAGE, re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        words = re.match(r"(?:topics apply|models create|\w+)", command)
        assert words is not None
        text = CliRunner().invoke(app, [*words[0].split(), "--help"], env={"COLUMNS": "200"}).output
        assert all(option in text for option in re.findall(r"--[a-z-]+", command)), command
