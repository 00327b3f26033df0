"""The sampled tokens of a turn as typed arrays, and how they are lifted out of JSON.

One rule serves both encodings: a turn is (`token_ids` int32[N], `logprobs` float32[N] with NaN for missing, optionally
`policy_versions` int32[N]). Token ids come from `token_ids`, else from `logprobs.content[].token` of the exact form
`token_id:<n>`; any other text is not an id and the turn then has no sampled tokens (`None`), only text. An empty list of entries
without ids is a turn of no tokens.

Guarantees: lengths agree, ids and versions are not negative and fit int32, log-probabilities are finite float32 or NaN; else a
`CodecError` with the path. Keeps: unknown keys of a logprob entry and non-empty `top_logprobs`, in `logprobs.entry_extras` by
index. Limitations: token texts and `bytes`, which the ids say already (where there are no ids, the entries stay as they are).

Lists of JSON numbers to typed arrays, checked, and the same checks on arrays that came as bytes.

Guarantees: an int32 array holds no negative value, a float32 array is finite or NaN (missing); else a `CodecError` with the index.
Checks look at bytes, not at values, so that 16,000 tokens cost microseconds without numpy, which schemas must not need.
"""

import math
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, cast

import orjson

from headrace.schemas.chat import is_choice
from headrace.schemas.parsing import shown
from headrace.schemas.reasons import CodecError
from headrace.schemas.reasons import DeadLetterReason as Reason

_FLOAT32_MAX = 3.4028234663852886e38
_INT32_MAX = 2**31 - 1
_INFINITIES = tuple(array("f", [sign * math.inf]).tobytes() for sign in (1, -1))
_TOP = slice(3 if sys.byteorder == "little" else 0, None, 4)
"""The bytes with sign and exponent."""


def first_negative(values: "memoryview[int]") -> int | None:
    """Index of the first negative int32, or None. Looks at the sign bits only: 16,000 values in 20 us."""
    top_bytes = bytes(values)[_TOP]
    return None if top_bytes.isascii() else next(i for i, byte in enumerate(top_bytes) if byte > 127)


def first_infinite(values: "memoryview[float]") -> int | None:
    """Index of the first infinite float32, or None; NaN is a missing log-probability and fine. 16,000 values in 20 us.

    Searches for the two bit patterns, where there is a top byte that an infinity or NaN has.
    """
    data = bytes(values)
    top_bytes = data[_TOP]
    for pattern in _INFINITIES:
        if pattern[_TOP] not in top_bytes:
            continue
        at = data.find(pattern)
        while at != -1 and at % 4:
            at = data.find(pattern, at + 1)
        if at != -1:
            return at // 4
    return None


def int32(values: list[int], path: str) -> "array[int]":
    """An int32 array of values in [0, 2^31); `path` is where the list stands, for errors."""
    try:
        result = array("i", values)
        # `array` takes True for 1. Rarely a token is 0 or 1, so the costly look at the types is rare too.
        if first_negative(memoryview(result)) is None and ((0 not in result and 1 not in result) or bool not in {*map(type, values)}):
            return result
    except (TypeError, OverflowError):
        pass
    for i, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int):
            raise CodecError(Reason.INVALID_SCHEMA, f"{path}[{i}]", f"{_kind(value)} is not an integer")
        if not 0 <= value <= _INT32_MAX:
            raise CodecError(Reason.INVALID_SCHEMA, f"{path}[{i}]", f"{shown(value)} is outside 0 to 2^31 - 1")
    return array("i", values)


def float32(values: Sequence[float | None], path: str) -> "array[float]":
    """A float32 array of finite values, NaN where None; `path` is where the list stands, for errors."""
    if None not in values:
        known = cast("Sequence[float]", values)
        try:
            result = array("f", known)
            # A finite double that float32 can't hold has become an infinity; `array` takes True for 1.
            fine = first_infinite(memoryview(result)) is None and not math.isnan(sum(result))
            if fine and ((0 not in known and 1 not in known) or bool not in {type(value) for value in known}):
                return result
        except (TypeError, OverflowError):
            pass
    for i, value in enumerate(values):
        check_number(value, f"{path}[{i}]")
    return array("f", [math.nan if value is None else value for value in values])


def check_number(value: object, path: str) -> None:
    """A finite float32, or None for missing."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CodecError(Reason.INVALID_SCHEMA, path, f"{_kind(value)} is not a number")
    # Compared, not converted: an integer too large for a double is out of range, not an OverflowError.
    if not -_FLOAT32_MAX <= value <= _FLOAT32_MAX:
        raise CodecError(Reason.NOT_FINITE, path, f"{shown(value)} is not a finite float32; write null for a missing log-probability")


def _kind(value: object) -> str:
    """A value that is of another type, for an error message."""
    return f"the text {shown(value)!r}" if isinstance(value, str) else shown(value)


ID_PREFIX = "token_id:"
"""Of a token that is written as its id."""
_ENTRY_KEYS = frozenset({"token", "logprob", "bytes", "top_logprobs"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """Tokens of one turn as the sampler drew them; all arrays have the same length N.

    Example: `SampledTokens.of([5, 9], [-0.1, -2.0])`.
    """

    token_ids: "memoryview[int]"
    """int32 (format `i`)."""
    logprobs: "memoryview[float]"
    """float32 (format `f`), natural log at temperature 1; NaN where missing."""
    policy_versions: "memoryview[int] | None" = None
    """int32: the version that sampled each token, -1 where unknown; None where the sampler knows one version a rollout only."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SampledTokens):
            return NotImplemented
        versions = [None if v is None else bytes(v) for v in (self.policy_versions, other.policy_versions)]
        same_ids = bytes(self.token_ids) == bytes(other.token_ids)
        return same_ids and _canonical(self.logprobs) == _canonical(other.logprobs) and versions[0] == versions[1]

    __hash__ = None  # type: ignore[assignment]  # equal by content of mutable buffers

    @classmethod
    def of(
        cls,
        token_ids: list[int],
        logprobs: list[float | None] | None = None,
        policy_versions: Sequence[int | None] | None = None,
        path: str = "",
    ) -> "SampledTokens":
        """Arrays from lists, checked.

        Args:
            token_ids: N ids, each in [0, 2^31).
            logprobs: N finite floats, None where missing; None as a whole means all are missing.
            policy_versions: N versions, each in [0, 2^31), None where unknown; all of them None is as none at all.
            path: Where the turn stands, for errors.

        Raises:
            CodecError: lengths differ, an id or version is out of range, a log-probability is not finite.
        """
        where = f"{path}." if path else ""
        ids = int32(token_ids, f"{where}token_ids")
        n = len(ids)
        if logprobs is None:
            lps = array("f", [math.nan]) * n
        else:
            if len(logprobs) != n:
                raise CodecError(
                    Reason.LENGTH_MISMATCH,
                    path,
                    f"{n} tokens but {len(logprobs)} log-probabilities: one for each token is needed",
                )
            lps = float32(logprobs, f"{where}token_logprobs" if path else "logprobs")
        versions = None
        if policy_versions is not None:
            if len(policy_versions) != n:
                raise CodecError(Reason.LENGTH_MISMATCH, path, f"{n} tokens but {len(policy_versions)} policy versions")
            known = int32([0 if version is None else version for version in policy_versions], f"{where}policy_versions")
            for i in [i for i, version in enumerate(policy_versions) if version is None]:
                known[i] = -1
            # A turn that knows no version, or has no tokens, has none: the flat form could not tell it from one without the field.
            versions = memoryview(known) if any(version >= 0 for version in known) else None
        return cls(token_ids=memoryview(ids), logprobs=memoryview(lps), policy_versions=versions)


def _canonical(logprobs: "memoryview[float]") -> bytes:
    """Bytes in which every NaN is the same NaN."""
    return array("f", [math.nan if x != x else x for x in logprobs]).tobytes()  # noqa: PLR0124 - x != x is NaN's test


def raw_choices(group: Any) -> Iterator[tuple[dict[str, Any], str]]:  # noqa: ANN401 - raw JSON
    """Every choice of a raw group with its path, in the order of `TrajectoryGroup.choices`. Wrong shapes are left to validation."""
    for t, trajectory in enumerate(_list(group, "trajectories")):
        yield from _choices_of(trajectory, f"trajectories[{t}]")
        for h, history in enumerate(_list(trajectory, "additional_histories")):
            yield from _choices_of(history, f"trajectories[{t}].additional_histories[{h}]")


def _choices_of(history: Any, path: str) -> Iterator[tuple[dict[str, Any], str]]:  # noqa: ANN401 - raw JSON
    for i, item in enumerate(_list(history, "messages_and_choices")):
        if is_choice(item):
            yield item, f"{path}.messages_and_choices[{i}]"


def _list(value: Any, key: str) -> list[Any]:  # noqa: ANN401 - raw JSON
    items = value.get(key) if isinstance(value, dict) else None
    return items if isinstance(items, list) else []


def lift(choice: dict[str, Any], path: str) -> SampledTokens | None:
    """Take the sampled tokens out of a raw choice, in place; None where it carries text only.

    Raises:
        CodecError: see `SampledTokens.of`; also when ids are said twice and differ.
    """
    token_ids, plain, versions = _popped_lists(choice, path)
    entries, source = _entries(choice, path)
    if entries is not None and plain is not None:
        raise CodecError(Reason.INVALID_SCHEMA, f"{path}.token_logprobs", f"also said by logprobs.{source}: give one of them")
    if entries is not None:
        where = f"{path}.logprobs.{source}"
        said_ids = _entry_ids(entries, where)
        if token_ids is None:
            token_ids = said_ids
        elif said_ids is not None and said_ids != token_ids and len(said_ids) == len(token_ids):
            i = next(i for i, (a, b) in enumerate(zip(said_ids, token_ids, strict=True)) if a != b)
            raise CodecError(Reason.INVALID_SCHEMA, f"{where}[{i}].token", f"{said_ids[i]} but token_ids[{i}] is {shown(token_ids[i])}")
        plain = _entry_logprobs(entries, where)
    if token_ids is None and plain is None and _says_no_tokens(choice):
        token_ids = []
        choice["logprobs"] = _without_entries(choice["logprobs"], "content", [])
    if token_ids is None:
        for key, value in (("policy_versions", versions), ("token_logprobs", None if entries is not None else plain)):
            if value is not None:
                raise CodecError(Reason.LENGTH_MISMATCH, f"{path}.{key}", "there are no token_ids that they could belong to")
        return None
    turn = SampledTokens.of(token_ids, plain, versions, path)
    if entries is not None:
        choice["logprobs"] = _without_entries(choice["logprobs"], source, entries)
    return turn


def _popped_lists(choice: dict[str, Any], path: str) -> list[list[Any] | None]:
    """The plain lists of a raw choice, taken out of it."""
    if choice.pop("token_span", None) is not None:
        raise CodecError(Reason.SPAN_MISMATCH, f"{path}.token_span", "only the safetensors form has spans: leave it out")
    found = [(key, choice.pop(key, None)) for key in ("token_ids", "token_logprobs", "policy_versions")]
    for key, value in found:
        if value is not None and not isinstance(value, list):
            raise CodecError(Reason.INVALID_SCHEMA, f"{path}.{key}", f"{type(value).__name__} where a list is needed")
    return [value for _, value in found]


def carried(choice: dict[str, Any]) -> str | None:
    """The field in which a raw choice carries sampled tokens of its own, or None."""
    for key in ("token_ids", "token_logprobs", "policy_versions"):
        if choice.get(key) is not None:
            return key
    return "logprobs" if _entries(choice, "")[0] else None


def _entries(choice: dict[str, Any], path: str) -> tuple[list[Any] | None, str]:
    """The logprob entries of a choice: of its content, or of its refusal."""
    logprobs = choice.get("logprobs")
    found = [
        (entries, source)
        for source in ("content", "refusal")
        if isinstance(logprobs, dict) and isinstance(entries := logprobs.get(source), list) and entries
    ]
    if len(found) > 1:
        raise CodecError(Reason.INVALID_SCHEMA, f"{path}.logprobs", "content and refusal both have entries: which were sampled?")
    return found[0] if found else (None, "")


def _says_no_tokens(choice: dict[str, Any]) -> bool:
    """Whether the log-probabilities of a choice are those of no token: an empty list, and nothing in the other one."""
    logprobs = choice.get("logprobs")
    return isinstance(logprobs, dict) and logprobs.get("content") == [] and not logprobs.get("refusal")


def _without_entries(logprobs: dict[str, Any], source: str, entries: list[dict[str, Any]]) -> dict[str, Any] | None:
    """What is left of `logprobs` when its entries have become arrays."""
    kept = {key: value for key, value in logprobs.items() if key != source and value is not None}
    extras = {} if _all_ordinary(entries) else _extras(entries)
    if extras:
        kept["entry_extras"] = extras
    return kept or None


def _all_ordinary(entries: list[dict[str, Any]]) -> bool:
    """Whether every entry has just the four usual keys and no alternatives. Four passes in C: a tenth of the time of a look at each."""
    try:
        return (
            set(map(len, entries)) == {len(_ENTRY_KEYS)}
            and not any(map(itemgetter("top_logprobs"), entries))
            and all(len(list(map(itemgetter(key), entries))) for key in ("token", "logprob", "bytes"))
        )
    except KeyError:
        return False


def _extras(entries: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        str(i): {k: v for k, v in entry.items() if k not in {"token", "logprob", "bytes"} and (k != "top_logprobs" or v)}
        for i, entry in enumerate(entries)
        if entry.get("top_logprobs") or not entry.keys() <= _ENTRY_KEYS
    }


def _entry_ids(entries: list[Any], path: str) -> list[int] | None:
    ids = _plain_ids(entries)
    return _checked_ids(entries, path) if ids is None else ids


def _plain_ids(entries: list[Any]) -> list[int] | None:
    """The ids where every token is `token_id:<n>`; None where one is not: a look at each entry then says which, and why."""
    try:
        return ids_of_tokens(map(itemgetter("token"), entries))
    except (TypeError, KeyError, IndexError):
        return None


def ids_of_tokens(tokens: Iterable[str]) -> list[int] | None:
    """The ids of tokens that all have the exact form `token_id:<n>`, all at once; None where one has not.

    Raises:
        TypeError: a token is no text.
    """
    named = list(tokens)
    text = "\n".join(named)
    # Nothing but digits and commas is left only if each token begins with the prefix; one that holds several makes the counts differ.
    listed = text.removeprefix(ID_PREFIX).replace("\n" + ID_PREFIX, ",")
    if not text.startswith(ID_PREFIX) or not listed.isascii() or not listed.replace(",", "").isdigit():
        return None
    try:
        ids: list[int] = orjson.loads(f"[{listed}]")
    except orjson.JSONDecodeError:  # leading zeros, or no digit
        return None
    return ids if len(ids) == len(named) and max(ids) < 10**10 else None


def _checked_ids(entries: list[Any], path: str) -> list[int] | None:
    ids: list[int] = []
    for i, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise CodecError(Reason.INVALID_SCHEMA, f"{path}[{i}]", f"{type(entry).__name__} where an object is needed")
        token = entry.get("token")
        if not isinstance(token, str):
            raise CodecError(Reason.INVALID_SCHEMA, f"{path}[{i}].token", f"{shown(token)} is not a string")
        digits = token[len(ID_PREFIX) :]
        if not token.startswith(ID_PREFIX) or not (digits.isascii() and digits.isdigit()):
            return None
        if len(digits) > 10:  # Python refuses to read very long integers, and no vocabulary needs them
            raise CodecError(Reason.INVALID_SCHEMA, f"{path}[{i}].token", f"{shown(token)}: the id is outside 0 to 2^31 - 1")
        ids.append(int(digits))
    return ids


def _entry_logprobs(entries: list[Any], path: str) -> list[float | None]:
    values = [entry.get("logprob") if isinstance(entry, dict) else None for entry in entries]
    if set(map(type, values)) != {float}:
        for i, value in enumerate(values):
            check_number(value, f"{path}[{i}].logprob")
    return values
