"""Trajectory groups to bytes and back, in the two forms that mean the same.

JSON: the group with `token_ids`, `token_logprobs` and `policy_versions` on each choice (or the hosted API's
`logprobs.content`). Safetensors (`application/vnd.headrace.group+safetensors`): the group's JSON in `__metadata__["group"]`,
every sampled turn with `token_span = [start, stop)`, and flat arrays over all turns in wire order: `token_ids` I32[N],
`logprobs` F32[N], `policy_versions` I32[N] (optional; -1 where a turn has none). Spans tile the arrays, in order, without gaps.

Guarantees: what one form encodes the other decodes to an equal `SampledGroup` (a property test holds them equal);
safetensors arrays are views into the message, never copied. Gives up: log-probabilities beyond float32; big-endian hosts.
"""

import struct
import sys
from array import array
from dataclasses import dataclass
from typing import Any

import orjson

from headrace.schemas.base import non_finite_paths
from headrace.schemas.errors import CodecError
from headrace.schemas.parsing import load_json, validate
from headrace.schemas.reasons import DeadLetterReason as Reason
from headrace.schemas.trajectory import TrajectoryGroup
from headrace.schemas.turns import SampledTokens, lift, raw_choices

JSON_TYPE = "application/json"
SAFETENSORS_TYPE = "application/vnd.headrace.group+safetensors"
_MAX_HEADER = 100_000_000  # the bound of the safetensors format itself


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledGroup:
    """A group, with the sampled tokens of each choice beside it instead of inside its JSON.

    `turns[i]` belongs to the i-th choice of `group.choices()`; None where that choice carries text only.
    """

    group: TrajectoryGroup
    turns: tuple[SampledTokens | None, ...]


def sampled(group: TrajectoryGroup) -> SampledGroup:
    """The in-memory form of a group that a user built.

    Raises:
        CodecError: the group has NaN or infinity somewhere, or lengths that do not agree.
    """
    raw = group.model_dump(mode="python")
    # Parsed JSON can't hold NaN, a dict that a user built can, and orjson would write it as null.
    for path in non_finite_paths(raw):
        raise CodecError(Reason.NOT_FINITE, path, "NaN or infinity is not a value; use None for a missing log-probability")
    return _from_raw(raw)


def decode_group(body: bytes | memoryview, content_type: str = JSON_TYPE) -> SampledGroup:
    """Read a group in the form that its content type names (parameters such as `; charset` are ignored).

    Raises:
        CodecError: with the reason, the path and what is wrong.
    """
    kind = content_type.partition(";")[0].strip().lower()
    if kind == SAFETENSORS_TYPE:
        return _decode_safetensors(memoryview(body))
    if kind in {JSON_TYPE, ""} or kind.endswith("+json"):
        return _from_raw(load_json(body))
    raise CodecError(Reason.UNKNOWN_TYPE, "content-type", f"{kind!r}: {JSON_TYPE} or {SAFETENSORS_TYPE} is needed")


def encode_json(group: SampledGroup) -> bytes:
    """The JSON form, compact: tokens as plain arrays, null for a missing log-probability."""
    raw = _dump(group)
    for (choice, _path), turn in zip(raw_choices(raw), group.turns, strict=True):
        if turn is not None:
            choice["token_ids"] = turn.token_ids.tolist()
            choice["token_logprobs"] = turn.logprobs.tolist()  # orjson writes NaN as null, which means missing here
            if turn.policy_versions is not None:
                choice["policy_versions"] = turn.policy_versions.tolist()
    return orjson.dumps(raw)


def encode_safetensors(group: SampledGroup) -> bytes:
    """The safetensors form: one buffer, arrays behind the header."""
    raw = _dump(group)
    start = 0
    for (choice, _path), turn in zip(raw_choices(raw), group.turns, strict=True):
        if turn is not None:
            choice["token_span"] = (start, start + len(turn))
            start += len(turn)
    turns = [turn for turn in group.turns if turn is not None]
    parts = {
        "token_ids": ("I32", b"".join(turn.token_ids for turn in turns)),
        "logprobs": ("F32", b"".join(turn.logprobs for turn in turns)),
    }
    if any(turn.policy_versions is not None for turn in turns):
        unknown = array("i", [-1])
        parts["policy_versions"] = (
            "I32",
            b"".join((unknown * len(turn)).tobytes() if turn.policy_versions is None else turn.policy_versions for turn in turns),
        )
    header: dict[str, Any] = {"__metadata__": {"group": orjson.dumps(raw).decode()}}
    offset = 0
    for name, (dtype, data) in parts.items():
        header[name] = {"dtype": dtype, "shape": [start], "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = orjson.dumps(header)
    text += b" " * (-len(text) % 8)  # readers map the arrays: keep them aligned
    return b"".join([struct.pack("<Q", len(text)), text, *(data for _dtype, data in parts.values())])


def _dump(group: SampledGroup) -> dict[str, Any]:
    return group.group.model_dump(mode="json")


def _from_raw(raw: Any) -> SampledGroup:  # noqa: ANN401 - raw JSON
    turns = tuple(lift(choice, path) for choice, path in raw_choices(raw))
    return SampledGroup(group=validate(TrajectoryGroup, raw), turns=turns)


def _decode_safetensors(body: memoryview) -> SampledGroup:
    if sys.byteorder != "little":
        raise CodecError(Reason.UNKNOWN_TYPE, "", "this host is big-endian: send the JSON form")
    header, data = _split(body)
    metadata = header.get("__metadata__")
    text = metadata.get("group") if isinstance(metadata, dict) else None
    if not isinstance(text, str):
        raise CodecError(Reason.NOT_JSON, "__metadata__.group", "the group's JSON is missing")
    raw = load_json(text.encode(errors="surrogatepass"))
    ids = _array(header, data, "token_ids", "I32").cast("i")
    logprobs = _array(header, data, "logprobs", "F32").cast("f")
    versions = _array(header, data, "policy_versions", "I32").cast("i") if "policy_versions" in header else None
    for name, values in (("logprobs", logprobs), ("policy_versions", versions)):
        if values is not None and len(values) != len(ids):
            raise CodecError(Reason.LENGTH_MISMATCH, name, f"{len(values)} entries but token_ids has {len(ids)}")
    turns: list[SampledTokens | None] = []
    at = 0
    for choice, path in raw_choices(raw):
        span = choice.pop("token_span", None)
        if span is None:
            turns.append(lift(choice, path))
            continue
        start, stop = _span(span, f"{path}.token_span", at, len(ids))
        at = stop
        own = None if versions is None else versions[start:stop]
        if own is not None and own and own[0] == -1:
            own = None
        turns.append(SampledTokens(token_ids=ids[start:stop], logprobs=logprobs[start:stop], policy_versions=own))
    if at != len(ids):
        raise CodecError(Reason.SPAN_MISMATCH, "token_ids", f"{len(ids)} tokens but the turns' spans end at {at}")
    return SampledGroup(group=validate(TrajectoryGroup, raw), turns=tuple(turns))


def _split(body: memoryview) -> tuple[dict[str, Any], memoryview]:
    if len(body) < 8:
        raise CodecError(Reason.NOT_JSON, "", f"{len(body)} bytes are no safetensors file")
    (size,) = struct.unpack_from("<Q", body)
    if size > min(len(body) - 8, _MAX_HEADER):
        raise CodecError(Reason.NOT_JSON, "", f"the safetensors header says {size} bytes, the body has {len(body) - 8}")
    header = load_json(body[8 : 8 + size])
    if not isinstance(header, dict):
        raise CodecError(Reason.NOT_JSON, "", "the safetensors header is not an object")
    return header, body[8 + size :]


def _array(header: dict[str, Any], data: memoryview, name: str, dtype: str) -> memoryview:
    """The bytes of a flat array of 4-byte numbers, as a view, checked against its header."""
    match header.get(name):
        case {"dtype": str(found), "shape": [int(n)], "data_offsets": [int(first), int(last)]}:
            pass
        case _:
            raise CodecError(Reason.SPAN_MISMATCH, name, f"a one-dimensional {dtype} tensor is needed")
    if found != dtype:
        raise CodecError(Reason.SPAN_MISMATCH, name, f"dtype {found}, needed is {dtype}")
    if not 0 <= first <= last <= len(data) or last - first != n * 4:
        raise CodecError(Reason.SPAN_MISMATCH, name, f"shape [{n}] and offsets [{first}, {last}] do not fit {len(data)} bytes of data")
    return data[first:last]


def _span(span: Any, path: str, at: int, total: int) -> tuple[int, int]:  # noqa: ANN401 - raw JSON
    match span:
        case [int(start), int(stop)] if start == at and start <= stop <= total:
            return start, stop
        case _:
            raise CodecError(Reason.SPAN_MISMATCH, path, f"{span!r}: [{at}, stop] with stop at most {total} is needed")
