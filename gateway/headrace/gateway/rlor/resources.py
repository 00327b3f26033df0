"""What all resources of the RLOR API share: their JSON, their names, and their records in topic `gateway`.

JSON follows protojson. Field names come in as camelCase or snake_case and go out as camelCase. 64-bit integers go out as strings and come
in as either. Times are RFC 3339 with `Z`, durations are `"1800s"`. Null means that the key is absent; so does 0 in the fields that a model
lists in `zero_is_unset`. Unknown keys and output-only fields are ignored.
Guarantees: an error names the place of each fault, without its value. A resource of another account, or one whose project `rlor` the token
does not cover, is 404, as if it did not exist.
Limitations: an absent field and one with its default value are the same, as in protojson. Accounts share no resources. `body_limit.py`
bounds the size of bodies.
"""

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, TypeVar

import orjson
from fastapi import Depends, Request
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError, WithJsonSchema, model_validator
from pydantic.alias_generators import to_camel

from headrace.core.models import model_id_of
from headrace.gateway.access import KnownCaller
from headrace.gateway.gate import Gate
from headrace.gateway.log_writer import Sealed, Turn
from headrace.gateway.problems import FaultError, ProblemError, UnprocessableError
from headrace.gateway.tables import Tables

_DURATION = re.compile(r"^(\d{1,9}(?:\.\d{1,9})?)s$")
_ZERO = re.compile(r"-?0+(\.0+)?s?")
Model = TypeVar("Model", bound=BaseModel)


class Wire(BaseModel):
    """An object of the API, in either direction. Subclasses name their fields in snake_case."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="ignore", allow_inf_nan=False, protected_namespaces=(), frozen=True
    )

    zero_is_unset: ClassVar[frozenset[str]] = frozenset()
    """Fields in which 0 means that the client sets nothing, as in protobuf: a client that serialises a whole message sends it."""

    @model_validator(mode="before")
    @classmethod
    def _drop_unset(cls, data: Any) -> Any:  # noqa: ANN401 - raw JSON
        if not isinstance(data, dict):
            return data
        zeros = {*cls.zero_is_unset, *map(to_camel, cls.zero_is_unset)}
        return {key: value for key, value in data.items() if value is not None and not (key in zeros and _is_zero(value))}


class Empty(Wire):
    """`{}`: the answer of calls that only acknowledge, and the body of calls that need none."""


class Status(Wire):
    """State of a resource: `code` is the name of a gRPC code."""

    code: str = "OK"
    message: str = ""


class ListPage(Wire):
    """A page of a list; subclasses add the rows."""

    next_page_token: str | None = None
    total_size: int


def rfc3339(moment: datetime) -> str:
    """A time in UTC, with microseconds if it has any: `2026-11-30T04:05:06Z`."""
    return moment.astimezone(UTC).replace(tzinfo=None).isoformat() + "Z"


def parse_duration(duration: object) -> object:
    """`"1800s"` as 1800.0. Other types are left to the field's own validation. Raises ValueError (a text that is not a duration)."""
    if not isinstance(duration, str):
        return duration
    found = _DURATION.match(duration.strip())
    if found is None:
        raise ValueError('a duration is a number of seconds with "s" after it, such as "1800s"')
    return float(found[1])


def _format_duration(seconds: float) -> str:
    return f"{seconds:.9f}".rstrip("0").rstrip(".") + "s"


Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Int64 = Annotated[
    int,
    Field(ge=-(2**63), lt=2**63),
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"type": "string", "format": "int64"}, mode="serialization"),
]
Timestamp = Annotated[datetime, PlainSerializer(rfc3339, return_type=str)]
Duration = Annotated[
    float, BeforeValidator(parse_duration), PlainSerializer(_format_duration, return_type=str), WithJsonSchema({"type": "string"})
]


def request_body(model: type[Wire], *, required: bool = True) -> dict[str, Any]:
    """The OpenAPI description of a body that a route reads itself."""
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": model.model_json_schema()}}}}


async def read_object(request: Request) -> dict[str, Any]:
    """The body as an object, of any content type. No body and `null` are `{}`; null fields are removed. Raises ProblemError (400)."""
    body = await request.body()
    raw = orjson.loads(body) if body.strip() else None  # `body_limit.py` has checked that it is JSON
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise ProblemError(400, f"the body must be a JSON object, not {type(raw).__name__}")
    return {key: _without_nulls(value) for key, value in raw.items() if value is not None}


def parse_as(model: type[Model], raw: dict[str, Any]) -> Model:
    """A body, or a part of one, as a model. Raises UnprocessableError (with every fault)."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        items = error.errors(include_url=False, include_context=False, include_input=False)
        faults = [FaultError(("body", *item["loc"]), item["msg"].removeprefix("Value error, "), item["type"]) for item in items]
        raise UnprocessableError(faults) from None


def _is_zero(value: object) -> bool:
    if isinstance(value, str):
        return _ZERO.fullmatch(value) is not None
    return isinstance(value, int | float) and not isinstance(value, bool) and value == 0


def _without_nulls(value: Any) -> Any:  # noqa: ANN401 - walks any JSON
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


PROJECT = "rlor"
"""The project of all models that RLOR jobs train."""
_ID = re.compile(r"^[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?$")
Record = TypeVar("Record", bound=BaseModel)


def resource_name(account: str, kind: str, id: str) -> str:  # noqa: A002 - the API's word
    """`accounts/<account>/<kind>/<id>`; `kind` as in the path: `datasets`, `models`, …"""
    return f"accounts/{account}/{kind}/{id}"


def resource_id(account: str, kind: str, name: str, field: str) -> str:
    """The id in a resource name of this account; a bare id is returned unchanged. `field` is the request's field, for the message.

    Raises ProblemError (400: a name of another kind; 404: a name of another account).
    """
    parts = name.split("/")
    if len(parts) == 1 and name:
        return name
    if len(parts) != 4 or parts[0] != "accounts" or parts[2] != kind or not parts[3]:
        raise ProblemError(400, f"{field}: {name[:200]!r} is no name of this kind: accounts/{account}/{kind}/<id> is needed")
    if parts[1] != account:
        raise ProblemError(404, f"{field}: {name[:200]} does not exist, or belongs to another account")
    return parts[3]


def check_id(id: str, field: str) -> str:  # noqa: A002 - the API's word
    """An id that a client chose, unchanged. Raises ProblemError (400: the id is not valid)."""
    if not _ID.fullmatch(id):
        raise ProblemError(400, f"{field}: {id[:80]!r}: an id has 1 to 63 characters of a-z, 0-9 and -, and neither begins nor ends with -")
    return id


def rlor_model_id(account: str, job_id: str) -> str:
    """The id of the model that an RLOR job trains: the model is the job."""
    return model_id_of(account, PROJECT, job_id)


def find_record(tables: Tables, key: str, kind: type[Record], name: str) -> Record:
    """A record by its key. Raises ProblemError (404: there is none; the message has the resource's `name`)."""
    record = tables.facts.get(key)
    if not isinstance(record, kind):
        raise ProblemError(404, f"{name[:300]} does not exist")
    return record


def records_under(tables: Tables, prefix: str, kind: type[Record]) -> list[Record]:
    """All records of a kind whose keys begin with `prefix`, in the order of their keys."""
    return [record for record in tables.facts_under(prefix) if isinstance(record, kind)]


async def delete_records(gate: Gate, keys: Sequence[str], turn: Turn | None = None) -> None:
    """Delete records in one transaction; raises as `LogWriter.commit`."""
    tombstones = [Sealed(topic=gate.settings.topic_names.gateway, key=key, value=None) for key in keys]
    await gate.writer.commit(tombstones, is_in=lambda: not any(key in gate.view.tables.facts for key in keys), turn=turn)


async def _own_account(account: str, caller: KnownCaller) -> str:
    if not caller.sees(account, PROJECT):
        raise ProblemError(404, f"accounts/{account[:80]} does not exist, or the key is not one of it")
    return account


OwnAccount = Annotated[str, Depends(_own_account)]
"""The account in the path of a route, which is the caller's."""
