"""JSON text to values to models and back, with errors that name the field.

Guarantees: a failure is a `CodecError` with a reason and a path, whatever the bytes or the values are. orjson refuses `NaN` and
`Infinity`, and lone surrogates, as text without saying where; only then the text is parsed again, leniently, to name the path. What orjson
can't write, or would write as null, is refused with its path before it is sent.
"""

import json
import re
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from headrace.schemas.base import all_finite, non_finite_paths
from headrace.schemas.reasons import CodecError
from headrace.schemas.reasons import DeadLetterReason as Reason

M = TypeVar("M", bound=BaseModel)

_SHOWN = 80
_MAX_DEPTH = 200  # orjson and pydantic both stop writing at about 255 levels
# The tags of `MessageOrChoice`, which pydantic puts into a location behind the item's index.
_UNION_TAGS = frozenset({"choice", "message"})


def load_json(body: bytes | memoryview) -> Any:  # noqa: ANN401 - raw JSON
    """Parse JSON.

    Raises:
        CodecError: `not_json`, `not_finite` with the path of the first NaN or infinity, or `invalid_schema` with that of a lone surrogate.
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        try:
            # A number such as 1e999 is infinity to orjson too; integers of any length are taken as floats here, as orjson does.
            lenient = json.loads(bytes(body), parse_int=float)
        except (ValueError, RecursionError):
            lenient = None
        for path in non_finite_paths(lenient):
            raise CodecError(Reason.NOT_FINITE, shown(path), not_finite(path)) from None
        if (found := _unwritable(lenient)) is not None:
            raise CodecError(Reason.INVALID_SCHEMA, *found) from None
        raise CodecError(Reason.NOT_JSON, "", f"not JSON: {error}") from None


def check_finite(value: Any) -> None:  # noqa: ANN401 - any JSON value, or a model
    """Refuse NaN and infinity, which orjson would write as null.

    Raises:
        CodecError: `not_finite`, with the path of the first.
    """
    if all_finite(value):
        return
    for path in non_finite_paths(value):
        raise CodecError(Reason.NOT_FINITE, path, not_finite(path))


def not_finite(path: str) -> str:
    """What to say of NaN or infinity at a path, the last name of which says what may stand there instead."""
    name = re.split(r"[.\[]", path.rstrip("0123456789[]"))[-1]
    if name == "reward":
        return "NaN or infinity is no reward: a rollout that failed belongs into the group's exceptions"
    return "NaN or infinity is not a value" + ("; write null for a missing log-probability" if "logprob" in name else "")


def write_json(value: Any) -> bytes:  # noqa: ANN401 - any JSON value
    """Write JSON; NaN becomes null (`check_finite` refuses it where null would not mean the same).

    Raises:
        CodecError: `invalid_schema`, with the path of the first value that JSON can't hold.
    """
    try:
        return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)
    except TypeError as error:
        path, fault = _unwritable(value) or ("", str(error))
        raise CodecError(Reason.INVALID_SCHEMA, path, fault) from None


def _unwritable(value: Any) -> tuple[str, str] | None:  # noqa: ANN401 - any value
    """Path and fault of the first value that has no JSON form. Iterative: depth is one of the faults."""
    stack: list[tuple[Any, str, int]] = [(value, "", 0)]
    while stack:
        item, path, depth = stack.pop()
        if depth > _MAX_DEPTH:
            return path[:_SHOWN], f"nested deeper than {_MAX_DEPTH} levels"
        if isinstance(item, dict):
            for key in item:
                if isinstance(key, str) and not _is_unicode(key):
                    return path, f"the key {shown(key)} holds a lone surrogate, which is no Unicode text"
            stack.extend((v, f"{path}.{k}" if path else str(k), depth + 1) for k, v in reversed(item.items()))
        elif isinstance(item, list | tuple):
            stack.extend((v, f"{path}[{i}]", depth + 1) for i, v in reversed([*enumerate(item)]))
        elif isinstance(item, str):
            if not _is_unicode(item):
                return path, "the text holds a lone surrogate, which is no Unicode text: encode bytes as base64 instead"
        elif isinstance(item, int):
            if not -(2**63) <= item < 2**64:
                return path, f"{shown(item)} does not fit 64 bits: send it as text"
        elif item is not None and not isinstance(item, float):
            return path, f"{type(item).__name__} has no JSON form"
    return None


def _is_unicode(text: str) -> bool:
    return text.isascii() or re.search("[\ud800-\udfff]", text) is None


def shown(value: object) -> str:
    """A value for an error message: short, and safe for values too large or too deep to print."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return "an integer of more than 256 bits"
    if value is not None and not isinstance(value, str | int | float):
        return type(value).__name__
    text = value if isinstance(value, str) else repr(value)
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


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
        raise CodecError(reason, path_of(first["loc"], value, missing=first["type"] == "missing"), first["msg"] + more) from None


def path_of(loc: tuple[int | str, ...], value: Any, *, missing: bool = False) -> str:  # noqa: ANN401 - raw JSON
    """A pydantic location as a path: ('trajectories', 0, 'reward') gives `trajectories[0].reward`.

    Pydantic also puts the member of a union that it tried into a location; those parts are told from fields by walking the value.

    Args:
        loc: As pydantic gives it.
        value: What was validated.
        missing: The last part is a field that is not there.
    """
    path = ""
    for i, part in enumerate(loc):
        is_tag = part in _UNION_TAGS and path.endswith("]") and isinstance(loc[i - 1], int)
        if isinstance(part, int) and isinstance(value, list | tuple):
            path += f"[{part}]"
            value = value[part]
        elif isinstance(value, dict) and not is_tag and (part in value or (missing and i == len(loc) - 1)):
            path += f".{part}" if path else f"{part}"
            value = value.get(part)
    return shown(path) if len(path) > 4 * _SHOWN else path
