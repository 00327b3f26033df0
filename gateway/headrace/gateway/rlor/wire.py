"""JSON as the RLOR API speaks it: protojson's conventions.

Guarantees: names come in as camelCase or snake_case and go out as camelCase; 64-bit integers go out as strings and come in as either;
times are RFC 3339 with `Z`, durations `"1800s"`, enums their names; null is as if the key were absent, and so is 0 in the fields that a
model lists in `zero_is_unset`; keys that no model knows are ignored, as are output-only fields.
Routes return these models with `response_model_exclude_none=True`: what is not set is not there. Limitations: an absent field and one with
its default value are the same, as in protojson.
"""

import re
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema, model_validator
from pydantic.alias_generators import to_camel

_DURATION = re.compile(r"^(\d{1,9}(?:\.\d{1,9})?)s$")


class Wire(BaseModel):
    """An object of the API, in either direction. Subclasses name their fields in snake_case."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="ignore", allow_inf_nan=False, protected_namespaces=(), frozen=True
    )

    zero_is_unset: ClassVar[frozenset[str]] = frozenset()
    """Fields in which 0 means that the client says nothing, as in protobuf: clients that serialise a whole message send it."""

    @model_validator(mode="before")
    @classmethod
    def _unset_is_absent(cls, data: Any) -> Any:  # noqa: ANN401 - raw JSON
        if not isinstance(data, dict):
            return data
        zeros = {*cls.zero_is_unset, *map(to_camel, cls.zero_is_unset)}
        return {key: value for key, value in data.items() if value is not None and not (key in zeros and _is_zero(value))}


def _is_zero(value: object) -> bool:
    """Whether a number, its text or a duration is 0."""
    if isinstance(value, str):
        return re.fullmatch(r"-?0+(\.0+)?s?", value) is not None
    return isinstance(value, int | float) and not isinstance(value, bool) and value == 0


class Empty(Wire):
    """`{}`: the answer of calls that only acknowledge, and the body of calls that need none."""


class Status(Wire):
    """How a resource fares: `code` is the name of a gRPC code."""

    code: str = "OK"
    message: str = ""


def rfc3339(moment: datetime) -> str:
    """A time in UTC, with microseconds where it has any: `2026-11-30T04:05:06Z`."""
    return moment.astimezone(UTC).replace(tzinfo=None).isoformat() + "Z"


def seconds_of(duration: object) -> object:
    """`"1800s"` as 1800.0; anything but a text is left to the field's own validation.

    Raises:
        ValueError: a text that is no duration.
    """
    if not isinstance(duration, str):
        return duration
    found = _DURATION.match(duration.strip())
    if found is None:
        raise ValueError('a duration is a number of seconds with "s" after it, such as "1800s"')
    return float(found[1])


def _duration_text(seconds: float) -> str:
    return f"{seconds:.9f}".rstrip("0").rstrip(".") + "s"


Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
"""A 32-bit integer: a number."""
Int64 = Annotated[
    int,
    Field(ge=-(2**63), lt=2**63),
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"type": "string", "format": "int64"}, mode="serialization"),
]
"""A 64-bit integer: a string on the way out."""
Timestamp = Annotated[datetime, PlainSerializer(rfc3339, return_type=str)]
"""A time."""
Duration = Annotated[
    float, BeforeValidator(seconds_of), PlainSerializer(_duration_text, return_type=str), WithJsonSchema({"type": "string"})
]
"""Seconds; on the wire `"1800s"`."""
