"""The body of a training job, split without being parsed: a job of 50 MB is never 50 MB of Python objects.

Guarantees: the text of each group is a view into the one buffer that was received; time and memory grow with the length of the body and the
number of groups that a job may have, whatever else the body holds. The places of NaN and infinity, which JSON does not have, are named.
Limitations: of elements that are no objects the first is named; the groups themselves are read one by one, elsewhere.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
from typing_extensions import Buffer

from headrace.gateway.readers import ReceivedBody
from headrace.gateway.training_jobs.config import Faults
from headrace.schemas.parsing import not_finite
from headrace.schemas.surrogates import mended

# A quote always begins a match, also where its string never ends: no byte is looked at twice, so the search is linear.
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|-?Infinity|NaN|[\[\]{},:]', re.DOTALL)
_AT = re.compile(r"\$\[(\d+)\]")
_DEEPEST = 200
_MOST_CONFIG_BYTES = 64 * 1024
_NOT_NUMBERS = frozenset({b"NaN", b"Infinity", b"-Infinity"})


class _Fields(msgspec.Struct):
    """Values as they stand; empty where the body has none."""

    model_id: msgspec.Raw = msgspec.Raw()
    trajectory_groups: msgspec.Raw = msgspec.Raw()
    experimental_config: msgspec.Raw = msgspec.Raw()
    split: msgspec.Raw = msgspec.Raw()


class _TooManyError(ValueError):
    """More groups than a job may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyHead:
    """What a body says next to its groups."""

    model_id: str
    config: bytes
    """JSON of the config; empty where there is none."""
    split: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitBody:
    """The parts of a body."""

    head: BodyHead
    groups: list[memoryview]
    """Their JSON."""


def split(body: Buffer, most_groups: int, *, model_id: str | None = None) -> SplitBody:
    """Take a body apart.

    Args:
        body: As received.
        most_groups: That a job may have.
        model_id: Of the path, where it says it: the body then need not.

    Raises:
        UnprocessableError: it is no JSON object, or a field is missing or of another type.
    """
    faults = Faults()
    fields = _Fields()
    try:
        fields = msgspec.json.decode(body, type=_Fields)
    except msgspec.ValidationError as error:
        faults.add(["body"], f"a JSON object is needed: {error}", "object_type")
    except (msgspec.DecodeError, RecursionError) as error:
        if (whole := mended(memoryview(body))) is not None:  # one trajectory is unreadable then, and not all of them
            return split(bytearray(whole), most_groups, model_id=model_id)
        for path in _not_numbers(body):
            faults.add(["body", *path], not_finite(str(path[-1]) if path else ""), "not_finite")
            if faults.full:
                break
        if not faults:
            faults.add(["body"], f"not JSON: {error}", "json_invalid")
    faults.check()
    named = _text(fields.model_id, "model_id", faults, needed=model_id is None)
    groups = _groups(fields.trajectory_groups, most_groups, faults)
    said = _text(fields.split, "split", faults, needed=False)
    faults.check()
    config = memoryview(b"") if _is_null(fields.experimental_config) else memoryview(fields.experimental_config)
    if len(config) > _MOST_CONFIG_BYTES:
        faults.add(["body", "experimental_config"], f"it has {len(config)} bytes, at most {_MOST_CONFIG_BYTES} are read", "too_long")
        faults.check()
    head = BodyHead(model_id=model_id or named or "", config=bytes(config), split=said)
    return SplitBody(head=head, groups=groups)


def head_of(body: ReceivedBody, most_groups: int, *, model_id: str | None = None) -> BodyHead:
    """What a body says next to its groups; the rest as `split`."""
    return split(body.buffer(), most_groups, model_id=model_id).head


def _text(raw: msgspec.Raw, name: str, faults: Faults, *, needed: bool) -> str | None:
    view = memoryview(raw)
    if not view or (_is_null(raw) and not needed):
        if needed:
            faults.add(["body", name], "Field required", "missing")
        return None
    try:
        return msgspec.json.decode(view, type=str)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        faults.add(["body", name], "Input should be a valid string", "string_type")
        return None


def _is_null(raw: msgspec.Raw) -> bool:
    view = memoryview(raw)
    return len(view) == 4 and bytes(view) == b"null"


def _groups(raw: msgspec.Raw, most: int, faults: Faults) -> list[memoryview]:
    view = memoryview(raw)
    loc: list[str | int] = ["body", "trajectory_groups"]
    if not view:
        faults.add(loc, "Field required", "missing")
        return []
    try:
        # The first pass counts and keeps nothing: without it, a list of a million elements would be a million views.
        msgspec.json.decode(view, type=list[_counted(most)])  # type: ignore[misc]  # a type of this call
        return [memoryview(item) for item in msgspec.json.decode(view, type=list[msgspec.Raw])]
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, _TooManyError):
            faults.add(loc, f"more than {most} groups: a job has {most} at most (gateway.max_groups)", "too_long")
        elif (found := _AT.search(str(error))) is not None:
            faults.add([*loc, int(found[1])], "Input should be an object", "dict_type")
        else:
            faults.add(loc, "Input should be a valid list", "list_type")
    except (msgspec.DecodeError, RecursionError) as error:
        faults.add(loc, f"not JSON: {error}", "json_invalid")
    return []


def _counted(most: int) -> type[msgspec.Struct]:
    """A type that takes any JSON object, and no more than so many of them."""
    left = most

    class Counted(msgspec.Struct):
        def __post_init__(self) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise _TooManyError

    return Counted


def _not_numbers(body: Buffer) -> Iterator[list[str | int]]:
    """Places of NaN and infinity in a text that is JSON but for them. The search reads tokens and builds nothing."""
    path: list[str | int] = []
    kinds: list[bytes] = []
    key: bytes | None = None
    for match in _TOKEN.finditer(body):
        token = match.group()
        if token in _NOT_NUMBERS:
            yield list(path)
        elif token in b"{[":
            if len(path) == _DEEPEST:
                return
            kinds.append(token)
            path.append("" if token == b"{" else 0)
        elif token in b"}]":
            if not kinds:
                return
            kinds.pop()
            path.pop()
        elif token == b"," and path and isinstance(last := path[-1], int):
            path[-1] = last + 1
        elif token == b":" and key is not None and path:
            path[-1] = key[1:-1].decode(errors="replace")
        key = token if token[:1] == b'"' else None
