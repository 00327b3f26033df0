"""`readMask`: which fields of a resource are answered.

`""` and `*` are all. A path names a field with all that is in it. Guarantees: what is named and set is there, nothing else is.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import Query
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from headrace.gateway.problems import ProblemError
from headrace.gateway.rlor.field_paths import Path, UnknownFieldError, path_of, value_at
from headrace.gateway.rlor.wire import Wire

ReadMask = Annotated[str, Query(alias="readMask")]
"""The parameter of a route."""


def answered(resource: Wire, read_mask: str) -> JSONResponse:
    """A resource as the answer of a route.

    Raises:
        ProblemError: as `masked`.
    """
    return JSONResponse(masked(resource.model_dump(mode="json", by_alias=True, exclude_none=True), read_mask, type(resource)))


def masked(resource: Mapping[str, Any], read_mask: str, kind: type[BaseModel]) -> Mapping[str, Any]:
    """The fields of a resource that the mask names.

    Args:
        resource: As JSON.
        read_mask: As asked for.
        kind: What the resource is, for the fields that there are.

    Raises:
        ProblemError: 400: a field that there is not.
    """
    paths = [part for part in read_mask.split(",") if part.strip()]
    if not paths or any(part.strip() == "*" for part in paths):
        return resource
    kept: dict[str, Any] = {}
    for text in paths:
        try:
            path = path_of(kind, text)
        except UnknownFieldError as error:
            raise ProblemError(400, f"readMask: {error}") from None
        if (value := value_at(resource, path)) is not None:
            _put(kept, path, value)
    return kept


def _put(into: dict[str, Any], path: Path, value: object) -> None:
    for part in path[:-1]:
        inner = into.setdefault(part, {})
        into[part] = into = dict(inner) if isinstance(inner, Mapping) else inner
    into[path[-1]] = value
