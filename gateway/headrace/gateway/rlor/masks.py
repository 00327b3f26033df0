"""`readMask`: which fields of a resource are answered.

`""` and `*` are all. A path names a field with all that is in it. Guarantees: what is named and set is there, nothing else is.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from fastapi import Query
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from headrace.gateway.problems import ProblemError
from headrace.gateway.rlor.field_paths import Path, UnknownFieldError, path_of, value_at
from headrace.gateway.rlor.wire import Wire

MOST_FIELDS = 100
"""That one mask names."""
Mask = Callable[[Mapping[str, Any]], Mapping[str, Any]]

ReadMask = Annotated[str, Query(alias="readMask")]
"""The parameter of a route."""


def answered(resource: Wire, read_mask: str) -> JSONResponse:
    """A resource as the answer of a route.

    Raises:
        ProblemError: as `masked`.
    """
    return JSONResponse(masked(resource.model_dump(mode="json", by_alias=True, exclude_none=True), read_mask, type(resource)))


def masked(resource: Mapping[str, Any], read_mask: str, kind: type[BaseModel]) -> Mapping[str, Any]:
    """The fields of a resource that a mask names; see `mask_of`."""
    return mask_of(read_mask, kind)(resource)


def mask_of(read_mask: str, kind: type[BaseModel]) -> Mask:
    """What keeps the fields of a resource that a mask names.

    Args:
        read_mask: As asked for.
        kind: What the resources are, for the fields that there are.

    Raises:
        ProblemError: 400: a field that there is not, or too many of them.
    """
    texts = [part for part in read_mask.split(",") if part.strip()]
    if len(texts) > MOST_FIELDS:
        raise ProblemError(400, f"readMask: {len(texts)} fields, {MOST_FIELDS} at most are possible")
    if not texts or any(text.strip() == "*" for text in texts):
        return lambda resource: resource
    try:
        paths = [path_of(kind, text) for text in texts]
    except UnknownFieldError as error:
        raise ProblemError(400, f"readMask: {error}") from None

    def mask(resource: Mapping[str, Any]) -> Mapping[str, Any]:
        kept: dict[str, Any] = {}
        for path in paths:
            if (value := value_at(resource, path)) is not None:
                _put(kept, path, value)
        return kept

    return mask


def _put(into: dict[str, Any], path: Path, value: object) -> None:
    for part in path[:-1]:
        inner = into.setdefault(part, {})
        into[part] = into = dict(inner) if isinstance(inner, Mapping) else inner
    into[path[-1]] = value
