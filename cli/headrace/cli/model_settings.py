"""The settings of a model from a preset, a file over it, and the options of the command line over both.

Guarantees: an error names the field that is wrong or unknown, and its file.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from headrace.core.errors import HeadraceError
from headrace.schemas.training import ModelSettings, TrainConfig


class ModelSettingsError(HeadraceError):
    """Settings that make no model."""


def model_settings(
    file: Path | None, options: dict[str, Any], preset: TrainConfig | None = None, below: ModelSettings | None = None
) -> ModelSettings:
    """Settings of a model.

    Args:
        file: JSON or YAML with fields of `ModelSettings`; None: defaults.
        options: By path, as `batch.groups_per_step`; None is not given.
        preset: Training options below those of the file; None: defaults.
        below: Settings that hold where nothing else says otherwise, the preset included; None: defaults.

    Raises:
        ModelSettingsError: says where and what.
    """
    where = str(file) if file else "options"
    data = _load(file) if file else {}
    if preset is not None:
        train = data.get("train") or {}
        if not isinstance(train, dict):
            raise ModelSettingsError(f"{where}: train must be an object")
        data["train"] = preset.model_dump(exclude_unset=True) | train
    if below is not None:
        data = _over(below.model_dump(exclude_unset=True), data)
    for path, value in options.items():
        if value is not None:
            *sections, field = path.split(".")
            inner = data
            for section in sections:
                inner = inner.setdefault(section, {})
                if not isinstance(inner, dict):
                    raise ModelSettingsError(f"{where}: {section} must be an object")
            inner[field] = value
    try:
        settings = ModelSettings.model_validate(data)
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors(include_url=False))
        raise ModelSettingsError(f"{where}: {faults}") from error
    if unknown := list(_unknown(settings)):
        raise ModelSettingsError(f"{where}: unknown fields {', '.join(unknown)}")
    return settings


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = {**below, **above}
    for name in below.keys() & above.keys():
        if isinstance(below[name], dict) and isinstance(above[name], dict):
            merged[name] = _over(below[name], above[name])
    return merged


def _load(file: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8"))  # JSON is YAML
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ModelSettingsError(f"{file} can't be read as JSON or YAML: {error}") from error
    if not isinstance(data, dict):
        raise ModelSettingsError(f"{file}: an object is needed, as in {{base_model: tiny}}")
    return data


def _unknown(model: BaseModel, path: str = "") -> Iterator[str]:
    yield from (path + name for name in model.model_extra or ())
    for name in type(model).model_fields:
        if isinstance(inner := getattr(model, name), BaseModel):
            yield from _unknown(inner, f"{path}{name}.")
