"""Paths to fields of a resource, such as `create_time` or `trainingConfig.loraRank`, and `readMask`, which selects fields by their paths.

Guarantees: an unknown path is rejected with the names that exist. A masked resource has exactly the named fields that are set.
Limitations: paths do not reach into lists.
"""

import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from fastapi import Query
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from pydantic.alias_generators import to_camel

from headrace.gateway.problems import ProblemError
from headrace.gateway.rlor.wire import Wire

MAX_FIELDS = 100
"""Fields of one mask."""
Path = tuple[str, ...]
Mask = Callable[[Mapping[str, Any]], Mapping[str, Any]]
ReadMask = Annotated[str, Query(alias="readMask")]
"""The parameter of a route: paths, separated by commas. `""` and `*` are all fields."""


def field_path(model: type[BaseModel], text: str, parameter: str) -> Path:
    """The path as the JSON has it, in camelCase, from snake_case or camelCase. `parameter` is the place of the text, for the message.

    Raises ProblemError (400: no such field; the message has the fields that exist).
    """
    found: list[str] = []
    at: object = model
    for part in text.strip().split("."):
        if isinstance(at, type) and issubclass(at, BaseModel):
            names = {to_camel(name): name for name in at.model_fields}
            name = to_camel(part) if "_" in part else part
            if name not in names:
                where = ".".join(found) or "the resource"
                problem = f"{where} has no field {part[:60]!r}; there are {', '.join(sorted(names))}"
                raise ProblemError(400, f"{parameter}: {text[:100]!r}: {problem}")
            at = _container_type(at.model_fields[names[name]].annotation)
            found.append(name)
        elif at is Mapping and part:
            found.append(part)
            at = None
        else:
            raise ProblemError(400, f"{parameter}: {text[:100]!r}: {'.'.join(found)} has no fields")
    return tuple(found)


def value_at(resource: Mapping[str, Any], path: Path) -> Any:  # noqa: ANN401 - any JSON
    """The value at a path; None if it is not set."""
    at: Any = resource
    for part in path:
        if not isinstance(at, Mapping) or part not in at:
            return None
        at = at[part]
    return at


def to_json(resource: Wire) -> dict[str, Any]:
    """A resource as the API shows it: without fields that are not set."""
    return resource.model_dump(mode="json", by_alias=True, exclude_none=True)


def resource_response(resource: Wire, read_mask: str = "") -> JSONResponse:
    """A resource as the answer of a route. Raises as `parse_mask`."""
    return JSONResponse(parse_mask(read_mask, type(resource))(to_json(resource)))


def parse_mask(read_mask: str, kind: type[BaseModel]) -> Mask:
    """A function that keeps the fields of a `kind` that a mask names. Raises ProblemError (400: an unknown field, or too many fields)."""
    texts = [part for part in read_mask.split(",") if part.strip()]
    if len(texts) > MAX_FIELDS:
        raise ProblemError(400, f"readMask: {len(texts)} fields, {MAX_FIELDS} at most are possible")
    if not texts or any(text.strip() == "*" for text in texts):
        return lambda resource: resource
    paths = [field_path(kind, text, "readMask") for text in texts]

    def mask(resource: Mapping[str, Any]) -> Mapping[str, Any]:
        masked: dict[str, Any] = {}
        for path in paths:
            if (value := value_at(resource, path)) is not None:
                _set_at(masked, path, value)
        return masked

    return mask


def _set_at(target: dict[str, Any], path: Path, value: object) -> None:
    for part in path[:-1]:
        inner = target.setdefault(part, {})
        target[part] = target = dict(inner) if isinstance(inner, Mapping) else inner
    target[path[-1]] = value


def _container_type(annotation: object) -> object:
    """The model or mapping inside `Model | None` or `dict[str, …]`; None for a plain value."""
    for kind in (annotation, *typing.get_args(annotation)):
        if isinstance(kind, type) and not typing.get_args(kind) and issubclass(kind, BaseModel):
            return kind
        if typing.get_origin(kind) is dict:
            return Mapping
    return None
