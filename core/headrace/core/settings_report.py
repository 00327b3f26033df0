"""The effective settings, flat, each with where it comes from; secrets are masked."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from headrace.core.settings import Settings, settings_file


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingRow:
    """One setting."""

    path: str
    """As in `kafka.bootstrap_servers`."""
    value: Any
    """JSON-like; a secret is asterisks."""
    source: Literal["environment", "file", "default"]


def setting_rows(settings: Settings, environment: Mapping[str, str] = os.environ) -> list[SettingRow]:
    """Every setting, in the order of the sections."""
    in_file = _file_content(environment)
    set_by_environment = {name.upper() for name in environment}
    return [
        SettingRow(path=".".join(path), value=value, source=_source(path, set_by_environment, in_file))
        for path, value in _leaves(settings.model_dump(mode="json"))
    ]


def _leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:  # noqa: ANN401 - JSON-like
    if isinstance(value, dict) and (value or not path):
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    else:
        yield path, value


def _source(path: tuple[str, ...], variables: set[str], in_file: Any) -> Literal["environment", "file", "default"]:  # noqa: ANN401 - YAML
    # A whole section can be given as JSON: HEADRACE_KAFKA='{"bootstrap_servers": …}'.
    if any("HEADRACE_" + "__".join(path[:depth]).upper() in variables for depth in range(1, len(path) + 1)):
        return "environment"
    for key in path:
        if not isinstance(in_file, dict) or key not in in_file:
            return "default"
        in_file = in_file[key]
    return "file"


def _file_content(environment: Mapping[str, str]) -> Any:  # noqa: ANN401 - YAML
    file = settings_file(environment)
    return None if file is None else yaml.safe_load(file.read_text(encoding="utf-8"))
