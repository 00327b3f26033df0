"""The sampled tokens of a turn as typed arrays, and how they are lifted out of JSON.

One rule serves both encodings: a turn is (`token_ids` int32[N], `logprobs` float32[N] with NaN for missing, optionally
`policy_versions` int32[N]). Token ids come from `token_ids`, else from `logprobs.content[].token` of the exact form
`token_id:<n>`; any other text is not an id and the turn then has no sampled tokens (`None`), only text.

Guarantees: lengths agree, ids and versions are not negative and fit int32, log-probabilities are finite float32 or NaN; else a
`CodecError` with the path. Keeps: unknown keys of a logprob entry and non-empty `top_logprobs`, in `logprobs.entry_extras` by
index. Gives up: token texts and `bytes`, which the ids say already.
"""

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from headrace.schemas.chat import is_choice
from headrace.schemas.errors import CodecError
from headrace.schemas.reasons import DeadLetterReason as Reason

_ID_PREFIX = "token_id:"
_ENTRY_KEYS = frozenset({"token", "logprob", "bytes", "top_logprobs"})
_FLOAT32_MAX = 3.4028234663852886e38
_INT32_MAX = 2**31 - 1


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
    """int32: the version that sampled each token; None where the sampler knows one version a rollout only."""

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
        policy_versions: list[int] | None = None,
        path: str = "",
    ) -> "SampledTokens":
        """Arrays from lists, checked.

        Args:
            token_ids: N ids, each in [0, 2^31).
            logprobs: N finite floats, None where missing; None as a whole means all are missing.
            policy_versions: N versions, each in [0, 2^31).
            path: Where the turn stands, for errors.

        Raises:
            CodecError: lengths differ, an id or version is out of range, a log-probability is not finite.
        """
        where = f"{path}." if path else ""
        ids = _int32(token_ids, f"{where}token_ids")
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
            lps = _float32(logprobs, f"{where}logprobs")
        versions = None
        if policy_versions is not None:
            if len(policy_versions) != n:
                raise CodecError(Reason.LENGTH_MISMATCH, path, f"{n} tokens but {len(policy_versions)} policy versions")
            versions = memoryview(_int32(policy_versions, f"{where}policy_versions"))
        return cls(token_ids=memoryview(ids), logprobs=memoryview(lps), policy_versions=versions)


def _canonical(logprobs: "memoryview[float]") -> bytes:
    """Bytes in which every NaN is the same NaN."""
    return array("f", [math.nan if x != x else x for x in logprobs]).tobytes()  # noqa: PLR0124 - x != x is NaN's test


def _int32(values: list[int], path: str) -> "array[int]":
    try:
        result = array("i", values)
    except (TypeError, OverflowError):
        for i, value in enumerate(values):
            if type(value) is not int:
                raise CodecError(Reason.INVALID_SCHEMA, f"{path}[{i}]", f"{value!r} is not an integer") from None
            if not 0 <= value <= _INT32_MAX:
                raise CodecError(Reason.INVALID_SCHEMA, f"{path}[{i}]", f"{value} is outside 0 to 2^31 - 1") from None
        raise
    if result and min(result) < 0:
        i = next(i for i, value in enumerate(result) if value < 0)
        raise CodecError(Reason.INVALID_SCHEMA, f"{path}[{i}]", f"{result[i]} is negative")
    return result


def _float32(values: Sequence[float | None], path: str) -> "array[float]":
    if None in values:
        for i, value in enumerate(values):
            _check_number(value, f"{path}[{i}]")
        return array("f", [math.nan if value is None else value for value in values])
    known = cast("Sequence[float]", values)
    try:
        result = array("f", known)
        # A NaN or an infinity poisons the sum; a finite double that float32 can't hold shows in the extremes.
        fine = not result or (math.isfinite(math.fsum(known)) and min(known) >= -_FLOAT32_MAX and max(known) <= _FLOAT32_MAX)
    except (TypeError, OverflowError):
        fine = False
        result = array("f")
    if not fine:
        for i, value in enumerate(values):
            _check_number(value, f"{path}[{i}]")
    return result


def _check_number(value: object, path: str) -> None:
    """A finite float32, or None for missing."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CodecError(Reason.INVALID_SCHEMA, path, f"{value!r} is not a number")
    # Compared, not converted: an integer too large for a double is out of range, not an OverflowError.
    if not -_FLOAT32_MAX <= value <= _FLOAT32_MAX:
        raise CodecError(Reason.NOT_FINITE, path, f"{value} is not a finite float32; write null for a missing log-probability")


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
    token_ids, plain, versions = (choice.pop(key, None) for key in ("token_ids", "token_logprobs", "policy_versions"))
    for key, value in (("token_ids", token_ids), ("token_logprobs", plain), ("policy_versions", versions)):
        if value is not None and not isinstance(value, list):
            raise CodecError(Reason.INVALID_SCHEMA, f"{path}.{key}", f"{type(value).__name__} where a list is needed")
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
            raise CodecError(Reason.INVALID_SCHEMA, f"{where}[{i}].token", f"{said_ids[i]} but token_ids[{i}] is {token_ids[i]}")
        plain = _entry_logprobs(entries, where)
    if token_ids is None:
        if versions is not None:
            raise CodecError(Reason.LENGTH_MISMATCH, f"{path}.policy_versions", "there are no token ids that they could belong to")
        if plain is not None and entries is None:
            raise CodecError(Reason.LENGTH_MISMATCH, f"{path}.token_logprobs", "there are no token_ids that they could belong to")
        return None
    return SampledTokens.of(token_ids, plain, versions, path)


def _entries(choice: dict[str, Any], path: str) -> tuple[list[Any] | None, str]:
    """The logprob entries of a choice (content, else refusal), taken out of it; their extras stay in `entry_extras`."""
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict):
        return None, ""
    for source in ("content", "refusal"):
        entries = logprobs.get(source)
        if not isinstance(entries, list) or not entries:
            continue
        kept = {key: value for key, value in logprobs.items() if key != source and value is not None}
        extras = _extras(entries, f"{path}.logprobs.{source}")
        if extras:
            kept["entry_extras"] = extras
        choice["logprobs"] = kept or None
        return entries, source
    return None, ""


def _extras(entries: list[Any], path: str) -> dict[str, dict[str, Any]]:
    extras: dict[str, dict[str, Any]] = {}
    for i, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise CodecError(Reason.INVALID_SCHEMA, f"{path}[{i}]", f"{type(entry).__name__} where an object is needed")
        if entry.get("top_logprobs") or not entry.keys() <= _ENTRY_KEYS:
            extras[str(i)] = {k: v for k, v in entry.items() if k not in {"token", "logprob", "bytes"} and (k != "top_logprobs" or v)}
    return extras


def _entry_ids(entries: list[dict[str, Any]], path: str) -> list[int] | None:
    ids: list[int] = []
    for i, entry in enumerate(entries):
        token = entry.get("token")
        if not isinstance(token, str):
            raise CodecError(Reason.INVALID_SCHEMA, f"{path}[{i}].token", f"{token!r} is not a string")
        digits = token[len(_ID_PREFIX) :]
        if not token.startswith(_ID_PREFIX) or not (digits.isascii() and digits.isdigit()):
            return None
        ids.append(int(digits))
    return ids


def _entry_logprobs(entries: list[dict[str, Any]], path: str) -> list[float | None]:
    values = [entry.get("logprob") for entry in entries]
    for i, value in enumerate(values):
        if type(value) is not float:  # the common case costs one comparison
            _check_number(value, f"{path}[{i}].logprob")
    return values
