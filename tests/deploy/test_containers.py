"""`compose.yaml` and `Dockerfile` name what is there: services, settings, commands, files. Nothing is built or started here.

Where Docker's compose plugin is installed it checks the file, too.
"""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from click import Command, Group

from headrace.cli.app import load_command
from headrace.core.settings import Settings

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = [name for name, service in SERVICES.items() if service["image"].startswith("headrace")]
DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")


def _filled(text: str, **variables: str) -> str:
    """With `${NAME:-default}` as compose fills it in."""
    return re.sub(r"\$\{(\w+):-((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}", lambda found: variables.get(found[1], found[2]), text)


def _environment(name: str) -> dict[str, str]:
    return {key: _filled(value) for key, value in SERVICES[name]["environment"].items()}


def _settings(name: str, monkeypatch: pytest.MonkeyPatch) -> Settings:
    for known in [known for known in os.environ if known.upper().startswith("HEADRACE_")]:
        monkeypatch.delenv(known)
    for key, value in _environment(name).items():
        monkeypatch.setenv(key, value)
    return Settings()


def test_all_that_a_system_needs_is_there():
    assert set(SERVICES) == {"kafka", "s3", "topics", "base-model", "gateway", "worker", "engine"}
    assert set(OURS) == {"topics", "base-model", "gateway", "worker", "engine"}


@pytest.mark.skipif(
    shutil.which("docker") is None or subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode != 0,
    reason="Docker's compose plugin is not installed",
)
def test_docker_compose_takes_the_file():
    ran = subprocess.run(["docker", "compose", "config", "--quiet"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("name", OURS)
def test_every_variable_is_a_setting(name: str, monkeypatch: pytest.MonkeyPatch):
    settings = _settings(name, monkeypatch)  # sections refuse what they don't know
    sections = {key.removeprefix("HEADRACE_").split("__")[0].lower() for key in _environment(name)}
    assert sections <= set(Settings.model_fields)
    assert settings.kafka.bootstrap_servers == "kafka:19092"
    assert settings.store.url.startswith("s3://")
    assert list(settings.base_models) == ["vault"]


def test_the_environment_that_the_image_sets_is_a_setting_too():
    for variable in re.findall(r"\b(HEADRACE_\w+)=", DOCKERFILE):
        section, field = variable.removeprefix("HEADRACE_").lower().split("__")
        assert field in type(getattr(Settings(), section)).model_fields


@pytest.mark.parametrize("name", [name for name in OURS if "command" in SERVICES[name]])
def test_every_command_is_one_of_headrace(name: str):
    words = [_filled(word) for word in SERVICES[name]["command"]]
    command: Command = load_command(words.pop(0))
    while isinstance(command, Group):
        command = command.commands[words.pop(0)]
    command.make_context(name, words)  # refuses an option that it does not have


def test_a_base_model_of_ones_own_is_named_from_outside():
    entry = '{"mine": {"path": "/models/mine"}}'
    text = SERVICES["engine"]["environment"]["HEADRACE_BASE_MODELS"]
    assert _filled(text, BASE_MODELS=entry) == entry
    assert "--base-model=mine" in [_filled(word, BASE_MODEL="mine") for word in SERVICES["engine"]["command"]]


def test_ports_are_published_on_loopback_only_and_the_engine_which_asks_for_no_token_not_at_all():
    published = {name: service.get("ports", []) for name, service in SERVICES.items()}
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)
    assert {name for name, ports in published.items() if ports} == {"kafka", "s3", "gateway"}


def test_the_gateway_lets_nobody_in_without_a_token(monkeypatch: pytest.MonkeyPatch):
    assert _settings("gateway", monkeypatch).gateway.tokens_file is not None
    assert "--host" in SERVICES["gateway"]["command"]


def test_each_waits_for_what_it_needs():
    for name in ("gateway", "worker", "engine"):
        waits = {other: how["condition"] for other, how in SERVICES[name]["depends_on"].items()}
        assert waits["topics"] == waits["base-model"] == "service_completed_successfully"
        assert waits["s3"] == "service_healthy"
    assert SERVICES["topics"]["depends_on"] == {"kafka": {"condition": "service_healthy"}}
    for service in SERVICES.values():
        for other, how in service.get("depends_on", {}).items():
            one_shot = SERVICES[other].get("restart") == "no"
            assert how["condition"] == ("service_completed_successfully" if one_shot else "service_healthy")
            assert one_shot or "healthcheck" in SERVICES[other]


def test_volumes_that_are_used_are_declared():
    used = {_filled(volume).split(":")[0] for service in SERVICES.values() for volume in service.get("volumes", [])}
    assert used == set(COMPOSE["volumes"])


def test_the_image_has_every_part_and_only_what_is_there():
    copied = [words.split()[:-1] for words in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE)]
    sources = {source for words in copied for source in words}
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {package.split("/")[0] for package in packages} <= sources
    assert all((ROOT / source).exists() for source in sources)
    let_in = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert sources == let_in


def test_the_image_is_built_with_extras_that_there_are_and_the_tested_versions():
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    extras = set(re.findall(r"--extra (\S+)", DOCKERFILE))
    assert extras == {"trainer", "consumers", "engine", "gateway"}
    assert extras <= set(known)
    assert all("-c constraints.txt" in line or "--no-deps" in line for line in DOCKERFILE.splitlines() if "pip install" in line)


def test_processes_are_nobodys_root_and_images_are_pinned():
    final = DOCKERFILE.split("\nFROM ")[-1]
    users = re.findall(r"^USER (\S+)$", final, re.MULTILINE)
    assert users
    assert users[-1].split(":")[0] not in {"root", "0"}
    assert final.index("\nUSER ") > final.rindex("\nRUN ")
    assert all(":" in image and not image.endswith(":latest") for image in re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE))
    assert all(":" in service["image"] and not service["image"].endswith(":latest") for service in SERVICES.values())
