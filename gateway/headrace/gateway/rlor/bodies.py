"""Bodies as the API takes them: an object, or nothing at all, whatever the content type says.

Guarantees: every fault is named with its place, in the client's own spelling; a value is never echoed by us beyond what a rule says of it.
Gives up: bodies that are large; those are uploads.
"""

from typing import Any, TypeVar

import orjson
from fastapi import Request
from pydantic import BaseModel, ValidationError

from headrace.gateway.problems import FaultError, ProblemError, UnprocessableError

_MOST_BYTES = 256 * 1024
"""A job's record must fit into a record of Kafka."""

Model = TypeVar("Model", bound=BaseModel)


async def object_of(request: Request) -> dict[str, Any]:
    """The body's object; no body and `null` are `{}`. Null fields are as if absent.

    Raises:
        ProblemError: 400, 413.
    """
    body = await request.body()
    if len(body) > _MOST_BYTES:
        raise ProblemError(413, f"the body has {len(body)} bytes, at most {_MOST_BYTES} are read here: data belongs into a dataset")
    if not body.strip():
        return {}
    try:
        raw = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ProblemError(400, f"the body is no JSON: {error}") from None
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise ProblemError(400, f"the body must be a JSON object, not {type(raw).__name__}")
    return {key: _without_nulls(value) for key, value in raw.items() if value is not None}


def read_as(model: type[Model], raw: dict[str, Any]) -> Model:
    """A body, or a part of one, as a model.

    Raises:
        UnprocessableError: with every fault.
    """
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        items = error.errors(include_url=False, include_context=False, include_input=False)
        faults = [FaultError(("body", *item["loc"]), item["msg"].removeprefix("Value error, "), item["type"]) for item in items]
        raise UnprocessableError(faults) from None


def _without_nulls(value: Any) -> Any:  # noqa: ANN401 - walks any JSON
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value
