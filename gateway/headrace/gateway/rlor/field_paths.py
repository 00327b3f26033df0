"""Paths to fields of a resource, as `filter`, `orderBy` and `readMask` name them: `create_time`, `trainingConfig.loraRank`.

Guarantees: a path that no field has is refused with the names there are, so that a slip of the pen is no empty list. Gives up: lists;
nothing in them can be named.
"""

import typing
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.alias_generators import to_camel

Path = tuple[str, ...]


class UnknownFieldError(ValueError):
    """No such field."""


def path_of(model: type[BaseModel], text: str) -> Path:
    """The path as the JSON has it, in camelCase, from snake_case or camelCase.

    Raises:
        UnknownFieldError: says where it ends and what there is.
    """
    found: list[str] = []
    at: object = model
    for part in text.strip().split("."):
        if isinstance(at, type) and issubclass(at, BaseModel):
            names = {to_camel(name): name for name in at.model_fields}
            name = to_camel(part) if "_" in part else part
            if name not in names:
                where = ".".join(found) or "the resource"
                raise UnknownFieldError(f"{text[:100]!r}: {where} has no field {part[:60]!r}; there are {', '.join(sorted(names))}")
            at = _inner(at.model_fields[names[name]].annotation)
            found.append(name)
        elif at is Mapping and part:
            found.append(part)
            at = None
        else:
            raise UnknownFieldError(f"{text[:100]!r}: {'.'.join(found)} has no fields")
    return tuple(found)


def value_at(resource: Mapping[str, Any], path: Path) -> Any:  # noqa: ANN401 - any JSON
    """What stands at a path; None: nothing."""
    at: Any = resource
    for part in path:
        if not isinstance(at, Mapping) or part not in at:
            return None
        at = at[part]
    return at


def _inner(annotation: object) -> object:
    """The model or mapping inside `Model | None` or `dict[str, …]`; None for a plain value."""
    for kind in (annotation, *typing.get_args(annotation)):
        if isinstance(kind, type) and not typing.get_args(kind) and issubclass(kind, BaseModel):
            return kind
        if typing.get_origin(kind) is dict:
            return Mapping
    return None
