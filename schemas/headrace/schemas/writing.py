"""A group's models to JSON text: the hot path of everything that is sent.

orjson walks the models itself and asks for the fields of each, which are checked on the way: a third of the time of a pydantic dump, a
walk for NaN and a dump of the dump. What it can't write goes the slow way, which also knows the path of a fault.

Guarantees: NaN and infinity are refused (orjson alone would write null); unknown fields are written; the text reads back as an equal group.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

import orjson
from pydantic import BaseModel
from pydantic_core import PydanticSerializationError

from headrace.schemas.base import all_finite
from headrace.schemas.chat import Choice, Message
from headrace.schemas.errors import CodecError
from headrace.schemas.parsing import check_finite, write_json
from headrace.schemas.reasons import DeadLetterReason as Reason
from headrace.schemas.trajectory import TrajectoryGroup
from headrace.schemas.turns import raw_choices

Beside = Sequence[Mapping[str, Any] | None]
"""For each choice of a group, in wire order: the fields in which its sampled tokens are written; None where it has text only."""

_SIMPLE = frozenset({str, int, bool, type(None)})
"""Nothing of these is NaN or infinite, or a model."""
_ITEMS = frozenset({Message, Choice})


def write_group(group: TrajectoryGroup, beside: Beside) -> bytes:
    """The JSON text of a group.

    Raises:
        CodecError: NaN or infinity, a value without a JSON form, tokens that are in the group and next to it, or another number of choices.
    """
    choices = [*group.choices()]
    if len(choices) != len(beside):
        raise CodecError(Reason.SPAN_MISMATCH, "", f"{len(choices)} choices but {len(beside)} turns")
    for i, (choice, fields) in enumerate(zip(choices, beside, strict=True)):
        _check_choice(choice, fields, i)
    waiting = zip(choices, beside, strict=True)
    try:
        return orjson.dumps(group, default=lambda item: _fields(item, waiting), option=orjson.OPT_NON_STR_KEYS)
    except TypeError:
        return _write_slowly(group, beside)


def _check_choice(choice: Choice, fields: Mapping[str, Any] | None, i: int) -> None:
    extra = choice.__pydantic_extra__
    if extra and "role" in extra:
        raise CodecError(Reason.INVALID_SCHEMA, f"choice {i}", "a field `role` would make it a message: put it into the choice's `message`")
    for name in ("token_ids", "token_logprobs", "policy_versions", "token_span"):
        if getattr(choice, name) is not None:
            detail = "the tokens stand in `turns`: use `sampled(group)`, or leave them out of the group"
            raise CodecError(Reason.INVALID_SCHEMA, f"choice {i}.{name}", detail)
    if fields is not None and choice.logprobs is not None and (choice.logprobs.content or choice.logprobs.refusal):
        raise CodecError(Reason.INVALID_SCHEMA, f"choice {i}.logprobs", "the tokens stand in `turns` already: use `sampled(group)`")


def _fields(item: object, waiting: Iterator[tuple[Choice, Mapping[str, Any] | None]]) -> dict[str, Any]:
    """The fields of a model, for orjson; it takes any error here as "can't write", which the slow way then explains."""
    kind: type = type(item)
    if not _is_model(kind):
        raise TypeError(kind.__name__)
    fields: dict[str, Any] = item.__dict__
    extra: dict[str, Any] | None = item.__pydantic_extra__  # type: ignore[attr-defined]  # it is a model
    if extra:
        fields = {**fields, **extra}
    # Most fields are null, empty or text: looked at here, before the call that costs more than the look. NaN is true.
    for value in fields.values():
        if value and type(value) not in _SIMPLE and not _is_sound(value):
            raise TypeError("not finite, or a list of models and others")
    if kind is Choice:
        expected, beside = next(waiting)
        if expected is not item:
            raise TypeError("a choice outside of the histories")
        if beside:
            return {**fields, **beside}
    return fields


def _is_sound(value: object) -> bool:
    """Finite as far as orjson does not ask again: for a model inside it does."""
    if isinstance(value, float):
        return math.isfinite(value)
    kind: type = type(value)
    if kind is list or kind is dict:
        inner: set[type] = {*map(type, value.values() if isinstance(value, dict) else cast("list[Any]", value))}
        if inner <= _SIMPLE or (kind is list and inner <= _ITEMS):
            return True
        if kind is list and any(map(_is_model, inner)):
            return all(map(_is_model, inner))
    return _is_model(kind) or all_finite(value)


@lru_cache(maxsize=256)
def _is_model(kind: Any) -> bool:  # noqa: ANN401 - a type; of one that is any mypy does not know that it has a hash
    """Asked of each value: pydantic's answer alone takes longer than to write it."""
    return issubclass(kind, BaseModel)


def _write_slowly(group: TrajectoryGroup, beside: Beside) -> bytes:
    check_finite(group)  # before the dump, which turns NaN into None
    try:
        raw = group.model_dump(mode="json")
    except (PydanticSerializationError, ValueError, RecursionError) as error:
        raise CodecError(Reason.INVALID_SCHEMA, "", f"the group holds a value without a JSON form: {error}") from None
    for (choice, _path), fields in zip(raw_choices(raw), beside, strict=True):
        choice.update(fields or {})
    return write_json(raw)
