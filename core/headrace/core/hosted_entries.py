"""A group in the hosted APIs' JSON, whose token entries (one object a token) are decoded by type instead of as dicts.

Each list of entries is cut out, decoded by msgspec into arrays, and replaced by a mark. What is left of the group is small JSON, which is
read like any other. A mark that is not where a choice has its entries makes the whole attempt void.

Guarantees: the group that `decode_group` gives, or None if a list has anything but token ids with log-probabilities (text tokens, other
keys, alternatives, invalid JSON). Then `decode_group` reads the group, or says what is wrong with it.
"""

import re
import uuid
from typing import Any

import msgspec
import numpy as np

from headrace.schemas.codec import SampledGroup
from headrace.schemas.parsing import load_json, validate
from headrace.schemas.surrogates import holds_stand_in
from headrace.schemas.trajectory import TrajectoryGroup
from headrace.schemas.turns import SampledTokens, carried, ids_of_tokens, lift, raw_choices

_MARK = uuid.uuid4().hex
"""Replaces a list of entries; no sender can know it."""
_START = re.compile(rb'"content":\s*(?=\[\s*\{\s*")')
_END = re.compile(rb"\}\s*\]")


class _Entry(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    token: str
    logprob: float | None = None
    bytes: msgspec.Raw = msgspec.Raw()
    """Not read: the id says what the token is."""
    top_logprobs: tuple[()] | None = None


_entries = msgspec.json.Decoder(list[_Entry])


class _NotTypedError(Exception):
    """The group has something that only `decode_group` reads."""


def decode_hosted(body: bytes | memoryview) -> SampledGroup | None:
    """Read a group in the hosted APIs' JSON; None where `decode_group` has to."""
    try:
        return _decode(memoryview(body))
    except Exception:  # noqa: BLE001 - whatever it is, `decode_group` meets it too, and says so
        return None


def _decode(body: memoryview) -> SampledGroup:
    lists: list[memoryview] = []
    pieces: list[bytes | memoryview] = []
    at = 0
    while (found := _START.search(body, at)) is not None:
        end = _END.search(body, found.end())
        _need(end is not None)
        stop = body.nbytes if end is None else end.end()
        pieces += [body[at : found.end()], f'["{_MARK}",{len(lists)}]'.encode()]
        lists.append(body[found.end() : stop])
        at = stop
    _need(lists)
    text = b"".join([*pieces, body[at:]])
    _need(not holds_stand_in(text))
    group = load_json(text)
    _need(not any(trajectory.get("exchanges") for trajectory in group["trajectories"]))  # their entries belong to no choice yet
    turns: list[SampledTokens | None] = []
    taken = 0
    for choice, path in raw_choices(group):
        logprobs = choice.get("logprobs")
        if isinstance(logprobs, dict) and logprobs.get("content") == [_MARK, taken]:
            turns.append(_take(choice, lists[taken]))
            taken += 1
        else:
            turns.append(lift(choice, path))
    _need(taken == len(lists))
    return SampledGroup(group=validate(TrajectoryGroup, group), turns=tuple(turns))


def _take(choice: dict[str, Any], raw: memoryview) -> SampledTokens:
    """As `lift` leaves the choice and answers."""
    logprobs = choice["logprobs"]
    del logprobs["content"]
    _need(not logprobs.get("refusal") and carried(choice) is None and choice.get("token_span") is None)
    for key in ("token_ids", "token_logprobs", "policy_versions", "token_span"):
        choice.pop(key, None)
    choice["logprobs"] = {key: value for key, value in logprobs.items() if value is not None} or None
    entries = _entries.decode(raw)
    ids = ids_of_tokens(entry.token for entry in entries)
    if ids is None or max(ids) > np.iinfo(np.int32).max:
        raise _NotTypedError
    values = np.array([entry.logprob for entry in entries], np.float64)
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    _need(np.isfinite(narrow).sum() == np.isfinite(values).sum() and not np.isinf(values).any())
    # Not `SampledTokens.of`: its checks, one list at a time, are an eighth of the whole decoding.
    return SampledTokens(token_ids=np.array(ids, np.int32).data, logprobs=narrow.data.cast("B").cast("f"))


def _need(condition: object) -> None:
    if not condition:
        raise _NotTypedError
