"""The OpenAPI document, as the gateway serves it at `/openapi.json` and as it stands in `schemas/openapi.json`.

Guarantees: the same code gives the same text; every operation tells the errors of its API, in that API's shape, and how to show a key.
Limitations: which of the errors an operation can really come to; all of them are listed with each.
"""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from headrace.gateway.problems import Family, family_of

_OPEN = ("/v1/health", "/v1/system-check")
_STATUSES = {
    400: "the request can't be understood or is not allowed now",
    401: "no key, or not one of this gateway's",
    403: "not with this key",
    404: "there is none, or none that this key sees",
    405: "not with this method",
    408: "the request did not come in whole in time",
    409: "there is one already, or it is in another state",
    413: "too large",
    415: "compressed, or of a type that is not taken",
    429: "too fast",
    501: "not built",
    503: "Kafka, the object store or an engine does not answer: try again",
}
_SHAPES: dict[Family, dict[str, Any]] = {
    "training-jobs": {
        "title": "Detail",
        "type": "object",
        "required": ["detail"],
        "properties": {"detail": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"$ref": "#/components/schemas/Fault"}}]}},
    },
    "rlor": {
        "title": "Status",
        "type": "object",
        "required": ["code", "message", "details"],
        "properties": {
            "code": {"type": "integer", "description": "google.rpc.Code"},
            "message": {"type": "string"},
            "details": {"type": "array", "items": {"type": "object"}},
        },
    },
    "inference": {
        "title": "InferenceError",
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type"],
                "properties": {"message": {"type": "string"}, "type": {"type": "string"}, "param": {}, "code": {}},
            }
        },
    },
}
_FAULT = {
    "title": "Fault",
    "type": "object",
    "required": ["loc", "msg", "type"],
    "properties": {
        "loc": {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "integer"}]}},
        "msg": {"type": "string"},
        "type": {"type": "string"},
    },
    "additionalProperties": False,
}


def describe(app: FastAPI) -> None:
    """Make the app serve the document that this module describes."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]  # FastAPI's documented way


def _document(app: FastAPI) -> dict[str, Any]:
    found = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
    components = found.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas["Fault"] = _FAULT
    for shape in _SHAPES.values():
        schemas[shape["title"]] = shape
    components["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
    }
    for path, operations in found["paths"].items():
        for operation in operations.values():
            _tell_errors(path, operation)
    return found


def _tell_errors(path: str, operation: dict[str, Any]) -> None:
    family = family_of(path)
    responses: dict[str, Any] = operation["responses"]
    if family == "training-jobs":
        said: Mapping[int, str] = _STATUSES | {422: "fields that can't be taken, each with its place"}
    else:
        said = _STATUSES
        responses.pop("422", None)
    if path not in _OPEN:
        operation["security"] = [{"bearer": []}, {"key": []}]
    schema = {"$ref": f"#/components/schemas/{_SHAPES[family]['title']}"}
    for status, description in said.items():
        if str(status) not in responses or status == 422:
            responses[str(status)] = {"description": description, "content": {"application/json": {"schema": schema}}}
