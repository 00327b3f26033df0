"""JSON text to values to models, with errors that name the field.

Guarantees: a failure is a `CodecError` with a reason and a path, whatever the bytes are. orjson refuses `NaN` and `Infinity` as
text without saying where; only then the text is parsed again, leniently, to name the path.
"""

import json
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from headrace.schemas.base import non_finite_paths
from headrace.schemas.errors import CodecError
from headrace.schemas.reasons import DeadLetterReason as Reason

M = TypeVar("M", bound=BaseModel)


def load_json(body: bytes | memoryview) -> Any:  # noqa: ANN401 - raw JSON
    """Parse JSON.

    Raises:
        CodecError: `not_json`, or `not_finite` with the path of the first NaN or infinity.
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        try:
            lenient = json.loads(bytes(body))
        except (ValueError, RecursionError):
            lenient = None
        for path in non_finite_paths(lenient):
            raise CodecError(Reason.NOT_FINITE, path, "NaN or infinity is not a value; write null for a missing log-probability") from None
        raise CodecError(Reason.NOT_JSON, "", f"not JSON: {error}") from None


def validate(model: type[M], value: Any) -> M:  # noqa: ANN401 - raw JSON
    """Validate a raw value.

    Raises:
        CodecError: `not_finite` or `invalid_schema`, with the path of the first fault.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        reason = Reason.NOT_FINITE if first["type"] == "finite_number" else Reason.INVALID_SCHEMA
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise CodecError(reason, path_of(first["loc"]), first["msg"] + more) from None


def path_of(loc: tuple[int | str, ...]) -> str:
    """A pydantic location as a path: ('trajectories', 0, 'reward') gives `trajectories[0].reward`. Union tags are left out."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in {"choice", "message"} or not path.endswith("]"):
            path += f".{part}" if path else part
    return path
