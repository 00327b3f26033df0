"""Trajectory groups to bytes and back, in the two forms that mean the same.

JSON: the group with `token_ids`, `token_logprobs` and `policy_versions` on each choice (or the hosted API's
`logprobs.content`). Safetensors (`application/vnd.headrace.group+safetensors`): the group's JSON in `__metadata__["group"]`,
every sampled turn with `token_span = [start, stop)`, and flat arrays over all turns in wire order: `token_ids` I32[N],
`logprobs` F32[N], `policy_versions` I32[N] (optional; -1 where unknown). Spans tile the arrays, in order, without gaps.

Guarantees: what one form encodes the other decodes to an equal `SampledGroup` (a property test holds them equal); decoding and
encoding fail with `CodecError` only; safetensors arrays are views into the message, never copied. Limitations: log-probabilities
beyond float32; big-endian hosts; tensors of other names in a foreign file.

A group's models to JSON text: the hot path of everything that is sent.

orjson walks the models itself and asks for the fields of each, which are checked on the way: a third of the time of a pydantic dump, a
walk for NaN and a dump of the dump. What it can't write goes the slow way, which also knows the path of a fault.

Guarantees: NaN and infinity are refused (orjson alone would write null); unknown fields are written; the text reads back as an equal group.
"""

import math
import struct
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import orjson
from pydantic import BaseModel
from pydantic_core import PydanticSerializationError

from headrace.schemas.base import all_finite
from headrace.schemas.captured import OwnName, unfold
from headrace.schemas.chat import Choice, Message
from headrace.schemas.parsing import check_finite, load_json, shown, validate, write_json
from headrace.schemas.reasons import CodecError
from headrace.schemas.reasons import DeadLetterReason as Reason
from headrace.schemas.surrogates import holds_stand_in, mark_unreadable, mended
from headrace.schemas.trajectory import TrajectoryGroup
from headrace.schemas.turns import SampledTokens, carried, first_infinite, first_negative, lift, raw_choices

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


JSON_TYPE = "application/json"
SAFETENSORS_TYPE = "application/vnd.headrace.group+safetensors"
_MAX_HEADER = 100_000_000  # the bound of the safetensors format itself


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledGroup:
    """A group, with the sampled tokens of each choice next to it instead of inside its JSON.

    `turns[i]` belongs to the i-th choice of `group.choices()`; None where that choice carries text only.
    """

    group: TrajectoryGroup
    turns: tuple[SampledTokens | None, ...]


def sampled(group: TrajectoryGroup) -> SampledGroup:
    """The in-memory form of a group that a user built.

    Raises:
        CodecError: the group has NaN or infinity somewhere, or lengths that do not agree.
    """
    try:
        raw = group.model_dump(mode="python")
    except (PydanticSerializationError, ValueError, RecursionError) as error:
        raise CodecError(Reason.INVALID_SCHEMA, "", f"the group can't be written: {error}") from None
    for written, trajectory in zip(raw["trajectories"], group.trajectories, strict=True):
        if "reward" not in trajectory.model_fields_set:
            del written["reward"]  # a reward that was left out is none, and stays none
    check_finite(raw)  # parsed JSON can't hold NaN, a dict that a user built can
    return _from_raw(raw)


def decode_group(body: bytes | memoryview, content_type: str = JSON_TYPE, *, own: OwnName | None = None) -> SampledGroup:
    """Read a group in the form that its content type names (parameters such as `; charset` are ignored); captured exchanges as histories.

    Args:
        body: The group.
        content_type: Of the body.
        own: Whether an exchange's model is the trained one; None: not known.

    Raises:
        CodecError: with the reason, the path and what is wrong.
    """
    kind = content_type.partition(";")[0].strip().lower()
    if kind == SAFETENSORS_TYPE:
        return _decode_safetensors(memoryview(body), own)
    if kind in {JSON_TYPE, ""} or kind.endswith("+json"):
        return _from_raw(_load_group(body), own)
    raise CodecError(Reason.UNKNOWN_TYPE, "content-type", f"{kind!r}: {JSON_TYPE} or {SAFETENSORS_TYPE} is needed")


def encode_json(group: SampledGroup) -> bytes:
    """The JSON form, compact: tokens as plain arrays, null for a missing log-probability.

    Raises:
        CodecError: the group holds something that JSON can't, or tokens both in its JSON and in `turns`.
    """
    beside: list[dict[str, Any] | None] = []
    for turn in group.turns:
        if turn is None:
            beside.append(None)
            continue
        fields: dict[str, Any] = {"token_ids": turn.token_ids.tolist(), "token_logprobs": turn.logprobs.tolist()}  # NaN becomes null
        if turn.policy_versions is not None:
            fields["policy_versions"] = [None if version < 0 else version for version in turn.policy_versions]
        beside.append(fields)
    return write_group(group.group, beside)


def encode_safetensors(group: SampledGroup) -> bytes:
    """The safetensors form: one buffer, arrays behind the header.

    Raises:
        CodecError: the group holds something that JSON can't, or tokens both in its JSON and in `turns`.
    """
    start = 0
    beside: list[dict[str, Any] | None] = []
    for turn in group.turns:
        if turn is None:
            beside.append(None)
        else:
            beside.append({"token_span": (start, start + len(turn))})
            start += len(turn)
    turns = [turn for turn in group.turns if turn is not None]
    arrays: list[tuple[str, str, list[Any]]]
    arrays = [("token_ids", "I32", [turn.token_ids for turn in turns]), ("logprobs", "F32", [turn.logprobs for turn in turns])]
    if any(turn.policy_versions is not None for turn in turns):
        unknown = array("i", [-1])
        versions = [memoryview(unknown * len(turn)) if turn.policy_versions is None else turn.policy_versions for turn in turns]
        arrays.append(("policy_versions", "I32", versions))
    header: dict[str, Any] = {"__metadata__": {"group": write_group(group.group, beside).decode()}}
    for i, (name, dtype, _views) in enumerate(arrays):
        header[name] = {"dtype": dtype, "shape": [start], "data_offsets": [4 * start * i, 4 * start * (i + 1)]}
    text = write_json(header)
    text += b" " * (-len(text) % 8)  # readers map the arrays: keep them aligned
    return b"".join([struct.pack("<Q", len(text)), text, *(view for _name, _dtype, views in arrays for view in views)])


def _load_group(body: bytes | memoryview) -> Any:  # noqa: ANN401 - raw JSON
    """The JSON of a group; a trajectory with a lone surrogate is marked (`surrogates.py`)."""
    try:
        raw, text = load_json(body), bytes(body)
    except CodecError:
        text = mended(body) or b""
        if not text:
            raise
        raw = load_json(text)
    if holds_stand_in(text):
        mark_unreadable(raw)
    return raw


def _from_raw(raw: Any, own: OwnName | None = None) -> SampledGroup:  # noqa: ANN401 - raw JSON
    unfold(raw, own)
    turns = tuple(lift(choice, path) for choice, path in raw_choices(raw))
    return SampledGroup(group=validate(TrajectoryGroup, raw), turns=turns)


def _decode_safetensors(body: memoryview, own: OwnName | None) -> SampledGroup:
    if sys.byteorder != "little":
        raise CodecError(Reason.UNKNOWN_TYPE, "", "this host is big-endian: send the JSON form")
    header, data = _split(body)
    metadata = header.get("__metadata__")
    text = metadata.get("group") if isinstance(metadata, dict) else None
    if not isinstance(text, str):
        raise CodecError(Reason.NOT_JSON, "__metadata__.group", "the group's JSON is missing")
    raw, flat = _load_group(text.encode()), _flat(header, data)
    unfold(raw, own)
    turns: list[SampledTokens | None] = []
    at = 0
    for choice, path in raw_choices(raw):
        span = choice.pop("token_span", None)
        if span is None:
            turns.append(lift(choice, path))
            continue
        said = carried(choice)
        if said is not None:
            raise CodecError(Reason.INVALID_SCHEMA, f"{path}.{said}", "the turn has a token_span too: give one of them")
        start, at = _span(span, f"{path}.token_span", at, len(flat))
        turns.append(_turn(flat, start, at))
    if at != len(flat):
        raise CodecError(Reason.SPAN_MISMATCH, "token_ids", f"{len(flat)} tokens but the turns' spans end at {at}")
    return SampledGroup(group=validate(TrajectoryGroup, raw), turns=tuple(turns))


def _flat(header: dict[str, Any], data: memoryview) -> SampledTokens:
    """The flat arrays over all turns, views into the message; a version is -1 where its turn has none."""
    ids = _array(header, data, "token_ids", "I32").cast("i")
    logprobs = _array(header, data, "logprobs", "F32").cast("f")
    versions = _array(header, data, "policy_versions", "I32").cast("i") if "policy_versions" in header else None
    for name, values in (("logprobs", logprobs), ("policy_versions", versions)):
        if values is not None and len(values) != len(ids):
            raise CodecError(Reason.LENGTH_MISMATCH, name, f"{len(values)} entries but token_ids has {len(ids)}")
    if (i := first_negative(ids)) is not None:
        raise CodecError(Reason.INVALID_SCHEMA, f"token_ids[{i}]", f"{ids[i]} is negative")
    if (i := first_infinite(logprobs)) is not None:
        raise CodecError(Reason.NOT_FINITE, f"logprobs[{i}]", f"{logprobs[i]}: write NaN for a missing log-probability")
    return SampledTokens(token_ids=ids, logprobs=logprobs, policy_versions=versions)


def _turn(flat: SampledTokens, start: int, stop: int) -> SampledTokens:
    versions = None if flat.policy_versions is None else flat.policy_versions[start:stop]
    if versions is not None and (i := first_negative(versions)) is not None:
        wrong = next((at for at in range(i, len(versions)) if versions[at] < -1), None)
        if wrong is not None:
            raise CodecError(
                Reason.INVALID_SCHEMA, f"policy_versions[{start + wrong}]", f"{versions[wrong]} is no version: write -1 where it is unknown"
            )
        if all(version == -1 for version in versions):
            versions = None
    return SampledTokens(token_ids=flat.token_ids[start:stop], logprobs=flat.logprobs[start:stop], policy_versions=versions or None)


def _split(body: memoryview) -> tuple[dict[str, Any], memoryview]:
    if len(body) < 8:
        raise CodecError(Reason.NOT_JSON, "", f"{len(body)} bytes are no safetensors file")
    (size,) = struct.unpack_from("<Q", body)
    if size > min(len(body) - 8, _MAX_HEADER):
        raise CodecError(Reason.NOT_JSON, "", f"the safetensors header says {size} bytes, the body has {len(body) - 8}")
    header = load_json(body[8 : 8 + size])
    if not isinstance(header, dict):
        raise CodecError(Reason.NOT_JSON, "", "the safetensors header is not an object")
    data = body[8 + size :]
    described = 0
    for tensor in header.values():
        match tensor:
            case {"data_offsets": [int(_), int(last)]}:
                described = max(described, last)
    if described < len(data):
        raise CodecError(Reason.SPAN_MISMATCH, "", f"{len(data)} bytes of data, of which the header describes {described}")
    return header, data


def _array(header: dict[str, Any], data: memoryview, name: str, dtype: str) -> memoryview:
    """The bytes of a flat array of 4-byte numbers, as a view, checked against its header."""
    match header.get(name):
        case {"dtype": str(found), "shape": [int(n)], "data_offsets": [int(first), int(last)]}:
            pass
        case _:
            raise CodecError(Reason.SPAN_MISMATCH, name, f"a one-dimensional {dtype} tensor is needed")
    if found != dtype:
        raise CodecError(Reason.SPAN_MISMATCH, name, f"dtype {shown(found)}, needed is {dtype}")
    if not 0 <= first <= last <= len(data) or last - first != n * 4:
        raise CodecError(Reason.SPAN_MISMATCH, name, f"shape [{n}] and offsets [{first}, {last}] do not fit {len(data)} bytes of data")
    return data[first:last]


def _span(span: Any, path: str, at: int, total: int) -> tuple[int, int]:  # noqa: ANN401 - raw JSON
    match span:
        case [int(start), int(stop)] if start == at and start <= stop <= total:
            return start, stop
        case _:
            raise CodecError(Reason.SPAN_MISMATCH, path, f"[{at}, stop] with stop at most {total} is needed")
