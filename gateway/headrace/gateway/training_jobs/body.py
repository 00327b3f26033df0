"""The body of a training job, split without being parsed: a job of 50 MB is never 50 MB of Python objects.

Guarantees: the text of each group is a view into the one buffer that was received; NaN and infinity, which JSON has not, are named with
their places. Gives up: whether a group is one; that is read group by group.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
from fastapi import Request

from headrace.gateway.problems import ProblemError
from headrace.gateway.training_jobs.faults import Faults
from headrace.schemas.parsing import not_finite
from headrace.schemas.surrogates import mended

_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|-?Infinity|NaN|[\[\]{},:]', re.DOTALL)
_NOT_NUMBERS = frozenset({b"NaN", b"Infinity", b"-Infinity"})


class _Fields(msgspec.Struct):
    """Values as they stand; empty where the body has none."""

    model_id: msgspec.Raw = msgspec.Raw()
    trajectory_groups: msgspec.Raw = msgspec.Raw()
    experimental_config: msgspec.Raw = msgspec.Raw()
    split: msgspec.Raw = msgspec.Raw()


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitBody:
    """The parts of a body."""

    model_id: str
    groups: list[memoryview]
    """Their JSON."""
    config: memoryview
    """JSON of the config; empty where there is none."""
    split: str | None


async def received(request: Request) -> bytearray:
    """The whole body, once.

    Raises:
        ProblemError: 415, it is compressed.
    """
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ProblemError(415, "the body must not be compressed: leave Content-Encoding out")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
    return body


def split(body: bytearray, *, model_id: str | None = None) -> SplitBody:
    """Take a body apart.

    Args:
        body: As received.
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
        if (whole := mended(body)) is not None:  # one trajectory is unreadable then, and not all of them
            return split(bytearray(whole), model_id=model_id)
        for path in _not_numbers(body):
            faults.add(["body", *path], not_finite(str(path[-1]) if path else ""), "not_finite")
            if faults.full:
                break
        if not faults:
            faults.add(["body"], f"not JSON: {error}", "json_invalid")
    faults.check()
    named = _text(fields.model_id, "model_id", faults, needed=model_id is None)
    groups = _list(fields.trajectory_groups, faults)
    said = _text(fields.split, "split", faults, needed=False)
    faults.check()
    return SplitBody(
        model_id=model_id or named or "",
        groups=groups,
        config=memoryview(b"") if _is_null(fields.experimental_config) else memoryview(fields.experimental_config),
        split=said,
    )


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


def _list(raw: msgspec.Raw, faults: Faults) -> list[memoryview]:
    view = memoryview(raw)
    if not view:
        faults.add(["body", "trajectory_groups"], "Field required", "missing")
        return []
    try:
        return [memoryview(item) for item in msgspec.json.decode(view, type=list[msgspec.Raw])]
    except msgspec.MsgspecError:
        faults.add(["body", "trajectory_groups"], "Input should be a valid list", "list_type")
        return []


def _not_numbers(body: bytearray) -> Iterator[list[str | int]]:
    """Places of NaN and infinity in a text that is JSON but for them. Goes through it token by token: nothing of it is built."""
    path: list[str | int] = []
    kinds: list[bytes] = []
    key: bytes | None = None
    for match in _TOKEN.finditer(body):
        token = match.group()
        if token in _NOT_NUMBERS:
            yield list(path)
        elif token in b"{[":
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
