"""`readMask`: which fields of a resource are answered.

`""` and `*` are all. A path names a field with all that is in it. Guarantees: what is named and set is there, nothing else is.
"""

from collections.abc import Mapping
from typing import Any

from headrace.gateway.problems import ProblemError
from headrace.gateway.rlor.field_paths import Path, UnknownFieldError, path_of, value_at
from headrace.gateway.rlor.shown_job import RlorTrainerJob


def masked(resource: Mapping[str, Any], read_mask: str) -> Mapping[str, Any]:
    """The fields of `resource` that the mask names.

    Raises:
        ProblemError: 400: a field that there is not.
    """
    paths = [part for part in read_mask.split(",") if part.strip()]
    if not paths or any(part.strip() == "*" for part in paths):
        return resource
    kept: dict[str, Any] = {}
    for text in paths:
        try:
            path = path_of(RlorTrainerJob, text)
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
