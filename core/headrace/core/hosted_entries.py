"""A group in the hosted APIs' JSON, read by columns instead of one object a token.

Lists of token entries are taken out of the body as columns, by `hosted_scan.py`, or by `hosted_columns.py` where nothing was compiled; a
mark stands in the place of each, and what remains of the group is small JSON that is read as always.

Guarantees: the group that `decode_group` gives, or None, where anything is not just so (text tokens, other keys, alternatives, what is no
JSON): then `decode_group` reads it, and says what is wrong. Gives up: nothing.
"""

import uuid
from typing import Any

from headrace.core.hosted_columns import find_columns, need
from headrace.core.hosted_scan import Columns, Turn, scan
from headrace.schemas.codec import SampledGroup
from headrace.schemas.parsing import load_json, validate
from headrace.schemas.surrogates import holds_stand_in
from headrace.schemas.trajectory import TrajectoryGroup
from headrace.schemas.turns import SampledTokens, carried, lift, raw_choices

_MARK = uuid.uuid4().hex
"""Stands for a list of entries that was taken out; no sender can know it."""


def decode_hosted(body: bytes | memoryview) -> SampledGroup | None:
    """Read a group in the hosted APIs' JSON; None where `decode_group` has to."""
    try:
        columns = scan(body)
        return _decode(body, find_columns(body) if columns is None else columns)
    except Exception:  # noqa: BLE001 - whatever it is, `decode_group` meets it too, and says so
        return None


def _decode(body: bytes | memoryview, columns: Columns) -> SampledGroup:
    need(columns.turns)
    view = memoryview(body)
    pieces: list[bytes | memoryview] = []
    at = 0
    for i, turn in enumerate(columns.turns):
        pieces += [view[at : turn.start], f'"{_MARK}",{i}'.encode()]
        at = turn.end
    text = b"".join([*pieces, view[at:]])
    need(not holds_stand_in(text))
    raw = load_json(text)
    need(not any(trajectory.get("exchanges") for trajectory in raw["trajectories"]))  # entries of exchanges are no choice's yet
    turns: list[SampledTokens | None] = []
    taken = 0
    for choice, path in raw_choices(raw):
        if _is_mark(choice, taken):
            turns.append(_take(choice, columns, columns.turns[taken]))
            taken += 1
        else:
            turns.append(lift(choice, path))
    need(taken == len(columns.turns))
    return SampledGroup(group=validate(TrajectoryGroup, raw), turns=tuple(turns))


def _is_mark(choice: dict[str, Any], number: int) -> bool:
    logprobs = choice.get("logprobs")
    return isinstance(logprobs, dict) and logprobs.get("content") == [_MARK, number]


def _take(choice: dict[str, Any], columns: Columns, turn: Turn) -> SampledTokens:
    """As `lift` leaves the choice and answers."""
    said = choice["logprobs"]
    del said["content"]
    need(not said.get("refusal") and carried(choice) is None and choice.get("token_span") is None)
    for key in ("token_ids", "token_logprobs", "policy_versions", "token_span"):
        choice.pop(key, None)
    choice["logprobs"] = {key: value for key, value in said.items() if value is not None} or None
    token_ids, logprobs = columns.token_ids[turn.entries], columns.logprobs[turn.entries]
    return SampledTokens(token_ids=token_ids.data, logprobs=logprobs.data.cast("B").cast("f"))
