"""Bodies as the API takes them: an object, or nothing at all, whatever the content type says.

Guarantees: every fault is named with its place, in the client's own spelling; a value is never echoed by us beyond what a rule says of it.
Limitations: bodies are small (`body_limit.py`): a job's record fits into a record of Kafka.
"""

from typing import Any, TypeVar

import orjson
from fastapi import Request
from pydantic import BaseModel, ValidationError

from headrace.gateway.problems import FaultError, ProblemError, UnprocessableError

Model = TypeVar("Model", bound=BaseModel)


async def object_of(request: Request) -> dict[str, Any]:
    """The body's object; no body and `null` are `{}`. Null fields are as if absent.

    Raises:
        ProblemError: 400.
    """
    body = await request.body()
    raw = orjson.loads(body) if body.strip() else None  # that it is JSON, and small, the door has seen (`body_limit.py`)
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
