"""The short way from a record to a tokenized group: for what our own producers send, on the event loop, in a quarter of a millisecond.

Most groups need neither a chat template nor a tokenizer: safetensors arrays hold what was sampled, and each choice brings its prompt's
ids. Of such a group only a few fields matter here, so no models are built of it.

Guarantees: the same group that the long way (`admitting.py`) makes of the same record, or None, and then the long way says what it is:
this way refuses nothing and reports nothing. What it reads is bounded (`MAX_BYTES`, `MAX_JSON_BYTES`), so that no record can hold the loop
for more than a few milliseconds, and nothing in it is run. Gives up: everything that is not plain: claims, JSON, missing log-probabilities,
examples, members that don't fit, content that is not a string.
"""

import struct
from array import array
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter

from headrace.consumers.admission import AdmissionRequest, Admitted
from headrace.schemas.chat import Tool, ToolCall
from headrace.schemas.codec import SAFETENSORS_TYPE, split_safetensors
from headrace.schemas.envelope import type_of
from headrace.schemas.trajectory import RolloutException, TrajectoryGroup
from headrace.trainer.group_policy import refusal_of
from headrace.trainer.groups import TokenizedGroup, TokenizedTrajectory, TokenSequence
from headrace.trainer.lengths import BaseLimits
from headrace.trainer.sequences import Turn, sequences_of

MAX_BYTES = 1 << 20
MAX_JSON_BYTES = 1 << 18
"""Of the group's JSON: parsing the worst that fits takes a few milliseconds."""

_TYPES = frozenset({None, type_of(TrajectoryGroup)})
_ROLES = frozenset({"developer", "system", "user", "assistant", "tool", "function"})
_FINISHED = frozenset({"stop", "length", "tool_calls", "content_filter", "function_call"})
_NUMBER: frozenset[type] = frozenset({float, int, bool})
_SCALAR: frozenset[type] = frozenset({float, int, bool, str, type(None)})
_TEXT = frozenset({str, type(None)})
_TOOLS = TypeAdapter(list[Tool])
_TOOL_CALLS = TypeAdapter(list[ToolCall])
_EXCEPTIONS = TypeAdapter(list[RolloutException])

Span = tuple["array[int]", int, int]
"""A turn: the ids of its prompt, and where it stands in the flat arrays."""


class NotPlainError(Exception):
    """The long way has to look at this record."""


def plain_size(request: AdmissionRequest) -> bool:
    """Whether a record may be plain, by its headers and size alone."""
    headers, value = request.headers, request.value
    if value is None or len(value) > MAX_BYTES or request.base is None:
        return False
    if headers.get("content-type") != SAFETENSORS_TYPE or headers.get("ce_type") not in _TYPES:
        return False
    return len(value) >= 8 and struct.unpack_from("<Q", value)[0] <= MAX_JSON_BYTES


def admit_plain(request: AdmissionRequest, limits: BaseLimits) -> Admitted | None:
    """The tokenized group of a plain record whose size is fine; None where it is not plain."""
    try:
        return _admit(request, limits)
    except Exception:  # noqa: BLE001 - whatever it is, the long way meets it too, in its own process, and says so
        return None


def _admit(request: AdmissionRequest, limits: BaseLimits) -> Admitted:
    settings = request.settings
    _need(not settings.train.allow_training_without_logprobs)
    assert request.value is not None  # noqa: S101 - narrows the type; `plain_size` said so
    raw, flat = split_safetensors(request.value)
    group_id, job_id, exceptions = _group_fields(raw)
    ids, logprobs = np.asarray(flat.token_ids), np.asarray(flat.logprobs)
    versions = None if flat.policy_versions is None else np.asarray(flat.policy_versions)
    _need(not np.isnan(logprobs).any() and (versions is None or versions.min() >= 0))

    reader = _Spans(total=len(ids))
    members = [(trajectory, reader.histories(trajectory)) for trajectory in raw["trajectories"]]
    _need(bool(members) and reader.at == len(ids))
    made = _Sequences(ids, logprobs, versions, reader.prompt_tokens, reader.single)
    trajectories = tuple(
        TokenizedTrajectory(
            reward=_reward(trajectory),
            sequences=made.of(histories),
            initial_policy_version=_version(trajectory.get("initial_policy_version")),
            final_policy_version=_version(trajectory.get("final_policy_version")),
        )
        for trajectory, histories in members
    )
    made.check(limits.vocabulary, limits.longest(settings))
    group = TokenizedGroup(group_id=group_id or request.fallback_id, trajectories=trajectories, exceptions=exceptions)
    _need(refusal_of(group, settings.batch) is None)
    return Admitted(group=group, job_id=job_id)


def _need(fine: bool) -> None:
    if not fine:
        raise NotPlainError


def _group_fields(raw: Any) -> tuple[str | None, str | None, int]:  # noqa: ANN401 - raw JSON
    """Group id, job id and the count of exceptions; all other fields of the group itself are looked at."""
    get = raw.get
    _need(get("purpose") in {None, "rl"} and get("allow_training_without_logprobs") is None)
    _dictionary(get("metadata", {}), None)
    _dictionary(get("metrics", {}), _NUMBER)
    _texts(get("logs", []))
    names = (get("group_id"), get("job_id"))
    for name in names:
        _need(name is None or (type(name) is str and 1 <= len(name) <= 256))
    exceptions = get("exceptions", [])
    _need(type(exceptions) is list)  # what is merely empty may be of another type
    return *names, len(_EXCEPTIONS.validate_python(exceptions)) if exceptions else 0


def _dictionary(value: Any, kinds: frozenset[type] | None) -> None:  # noqa: ANN401 - raw JSON
    _need(type(value) is dict)
    if value and kinds is not None:
        _need(kinds.issuperset(map(type, value.values())))


def _texts(value: Any) -> None:  # noqa: ANN401 - raw JSON
    _need(type(value) is list)
    if value:
        _need(set(map(type, value)) == {str})


def _reward(trajectory: dict[str, Any]) -> float:
    reward = trajectory.get("reward", 0.0)
    _need(type(reward) in {float, int})
    return float(reward)


def _version(value: Any) -> int | None:  # noqa: ANN401 - raw JSON
    _need(value is None or (type(value) is int and value >= 0))
    return value  # type: ignore[no-any-return]  # checked above


class _Spans:
    """Reads the conversations: the turns of each history, which must tile the flat arrays in order.

    Args:
        total: Tokens of the flat arrays.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._tools: Any = None
        self.at = 0
        """Where the next turn must begin."""
        self.prompt_tokens = 0
        """Of the histories with one turn."""
        self.single = 0
        """Sampled tokens of those."""

    def histories(self, trajectory: dict[str, Any]) -> list[list[Span]]:
        """The turns of each history that has any."""
        get = trajectory.get
        _need(get("start_time") is None)
        _dictionary(get("metrics", {}), _NUMBER)
        _dictionary(get("metadata", {}), _SCALAR)
        _texts(get("logs", []))
        found = [self._history(get("messages_and_choices", []), get("tools"))]
        found += [self._history(history["messages_and_choices"], history.get("tools")) for history in get("additional_histories", ())]
        return [turns for turns in found if turns]

    def _history(self, items: list[dict[str, Any]], tools: Any) -> list[Span]:  # noqa: ANN401 - raw JSON
        if tools is not None and tools != self._tools:
            _TOOLS.validate_python(tools)
            self._tools = tools  # the members of a group mostly have the same
        _need(type(items) is list)
        turns = []
        for item in items:
            if "finish_reason" in item and "role" not in item:
                turns.append(self._choice(item))
            else:
                _need(item["role"] in _ROLES and type(item.get("name")) in _TEXT and type(item.get("tool_call_id")) in _TEXT)
                _message(item)
        if len(turns) == 1:
            prompt, start, stop = turns[0]
            self.prompt_tokens += len(prompt)
            self.single += stop - start
        return turns

    def _choice(self, choice: dict[str, Any]) -> Span:
        get = choice.get
        message, prompt = choice["message"], choice["prompt_token_ids"]
        start, stop = choice["token_span"]
        _need(
            choice["finish_reason"] in _FINISHED
            and type(get("index", 0)) is int
            and get("logprobs") is get("token_ids") is get("token_logprobs") is get("policy_versions") is None
            and message.get("role", "assistant") == "assistant"
            and type(start) is type(stop) is int
            and start == self.at
            and start < stop <= self._total
            and type(prompt) is list
            and len(prompt) > 0
        )
        _message(message)
        self.at = stop
        return array("i", prompt), start, stop


def _message(message: dict[str, Any]) -> None:
    """The fields that a context message and the message of a choice share."""
    get = message.get
    _need(type(get("content")) in _TEXT and type(get("refusal")) in _TEXT and type(get("reasoning_content")) in _TEXT)
    if (calls := get("tool_calls")) is not None:
        _TOOL_CALLS.validate_python(calls)


class _Sequences:
    """Makes sequences; those of one turn are stretches of four arrays for the whole group.

    Args:
        ids, logprobs, versions: The flat arrays.
        prompt_tokens, sampled: Of all histories with one turn.
    """

    def __init__(
        self,
        ids: npt.NDArray[np.int32],
        logprobs: npt.NDArray[np.float32],
        versions: npt.NDArray[np.int32] | None,
        prompt_tokens: int,
        sampled: int,
    ) -> None:
        self._flat = (ids, logprobs, versions)
        n = prompt_tokens + sampled
        self._ids = np.empty(n, np.int32)
        self._trainable = np.zeros(n, np.bool_)
        self._logprobs = np.full(n, np.nan, np.float32)
        self._versions = None if versions is None else np.full(n, -1, np.int32)
        self._at = 0
        self._longest = 0
        self._others: list[npt.NDArray[np.int32]] = []

    def of(self, histories: list[list[Span]]) -> tuple[TokenSequence, ...]:
        """The sequences of one trajectory."""
        made: list[TokenSequence] = []
        for turns in histories:
            made.extend([self._one(*turns[0])] if len(turns) == 1 else self._several(turns))
        _need(bool(made))
        return tuple(made)

    def _one(self, prompt: "array[int]", start: int, stop: int) -> TokenSequence:
        ids, logprobs, versions = self._flat
        begin, sampled = self._at, self._at + len(prompt)
        end = self._at = sampled + stop - start
        self._ids[begin:sampled] = prompt
        self._ids[sampled:end] = ids[start:stop]
        self._trainable[sampled:end] = True
        self._logprobs[sampled:end] = logprobs[start:stop]
        own = None
        if self._versions is not None and versions is not None:
            self._versions[sampled:end] = versions[start:stop]
            own = self._versions[begin:end]
        self._longest = max(self._longest, end - begin)
        return TokenSequence(
            token_ids=self._ids[begin:end], trainable=self._trainable[begin:end], logprobs=self._logprobs[begin:end], policy_versions=own
        )

    def _several(self, turns: list[Span]) -> tuple[TokenSequence, ...]:
        ids, logprobs, versions = self._flat
        made = sequences_of(
            [
                Turn(
                    prompt=np.frombuffer(prompt, np.int32),
                    token_ids=ids[start:stop],
                    logprobs=logprobs[start:stop],
                    policy_versions=None if versions is None else versions[start:stop],
                )
                for prompt, start, stop in turns
            ]
        )
        self._others.extend(sequence.token_ids for sequence in made)
        self._longest = max(self._longest, *map(len, made))
        return made

    def check(self, vocabulary: int, longest: int) -> None:
        """Whether all tokens are in the vocabulary, and no sequence is too long."""
        _need(self._longest <= longest)
        for ids in (self._ids, *self._others):
            _need(len(ids) == 0 or (ids.min() >= 0 and ids.max() < vocabulary))
