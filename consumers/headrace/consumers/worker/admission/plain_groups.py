"""The short way from a record to a tokenized group: for what our own producers send, on the event loop, in 0.2 ms.

Most groups need neither a chat template nor a tokenizer: safetensors arrays hold what was sampled, and each choice brings its prompt's
ids. Of such a group only a few fields matter here (`plain_json.py`), so no models are built of it.

Guarantees: the same group that the long way (`admitting.py`) makes of the same record, or None, and then the long way says what it is:
this way refuses nothing and reports nothing. What it reads is bounded (`MAX_BYTES`, `MAX_JSON_BYTES`), so that no record can hold the loop
for more than a few milliseconds, and nothing in it is run. Limitations: everything that is not plain: claims, JSON, missing
log-probabilities, examples, members that don't fit, content that is not a string.
"""

import struct
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from msgspec import UNSET

from headrace.consumers.worker.admission.messages import AdmissionRequest, Admitted
from headrace.consumers.worker.admission.plain_json import Judge, PlainHistory, PlainItem, PlainTrajectory, read_plain
from headrace.schemas.codec import SAFETENSORS_TYPE
from headrace.schemas.envelope import type_of
from headrace.schemas.trajectory import TrajectoryGroup
from headrace.trainer.group_policy import refusal_of
from headrace.trainer.groups import NO_LOGPROB, TokenizedGroup, TokenizedTrajectory, TokenSequence, first_positive
from headrace.trainer.lengths import BaseLimits
from headrace.trainer.sequences import Turn, sequences_of
from headrace.trainer.user_metrics import UserMetrics

MAX_BYTES = 1 << 20
MAX_JSON_BYTES = 1 << 18
"""Of the group's JSON: parsing the worst that fits takes a few milliseconds."""

_TYPES = frozenset({None, type_of(TrajectoryGroup)})

Scalar = TypeVar("Scalar", bound=np.generic)
Span = tuple[npt.NDArray[np.int32], int, int]
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
    plain = read_plain(request.value)
    raw, ids, logprobs, versions = plain.group, plain.ids, plain.logprobs, plain.versions
    judge = Judge()
    exceptions = judge.group(raw)
    _need(bool(np.isfinite(logprobs).all() and (logprobs > NO_LOGPROB).all()) and first_positive(logprobs) is None)
    _need(versions is None or bool(versions.min() >= 0))

    reader = _Spans(judge, total=len(ids))
    members = [(trajectory, reader.histories(trajectory)) for trajectory in raw.trajectories]
    _need(bool(members) and reader.at == len(ids))
    made = _Sequences(ids, logprobs, versions, [turns[0] for _, histories in members for turns in histories if len(turns) == 1])
    trajectories = tuple(
        TokenizedTrajectory(
            reward=_reward(trajectory),
            sequences=made.of(histories),
            initial_policy_version=trajectory.initial_policy_version,
            final_policy_version=trajectory.final_policy_version,
            metrics=UserMetrics.of(trajectory.metrics),
        )
        for trajectory, histories in members
    )
    made.check(limits.vocabulary, limits.longest(settings))
    group = TokenizedGroup(group_id=raw.group_id or request.fallback_id, trajectories=trajectories, exceptions=exceptions)
    _need(refusal_of(group, settings.batch) is None)
    return Admitted(group=group, job_id=raw.job_id)


def _reward(trajectory: PlainTrajectory) -> float:
    if trajectory.reward is UNSET:
        raise NotPlainError
    return trajectory.reward


def _need(fine: bool) -> None:
    if not fine:
        raise NotPlainError


class _Spans:
    """Reads the conversations: the turns of each history, which must tile the flat arrays in order.

    Args:
        judge: Of the group.
        total: Tokens of the flat arrays.
    """

    def __init__(self, judge: Judge, total: int) -> None:
        self._judge = judge
        self._total = total
        self.at = 0
        """Where the next turn must begin."""

    def histories(self, trajectory: PlainTrajectory) -> list[list[Span]]:
        """The turns of each history that has any."""
        found = [self._history(trajectory)]
        found += [self._history(history) for history in trajectory.additional_histories]
        return [turns for turns in found if turns]

    def _history(self, history: PlainTrajectory | PlainHistory) -> list[Span]:
        if history.tools:
            self._judge.tools(history.tools)
        turns = []
        for item in history.messages_and_choices:
            if item.tool_calls:
                self._judge.calls(item.tool_calls)
            if item.role is UNSET:
                turns.append(self._choice(item))
        return turns

    def _choice(self, choice: PlainItem) -> Span:
        message, span = choice.message, choice.token_span
        if choice.finish_reason is UNSET or message is UNSET or span is UNSET:
            raise NotPlainError
        if message.tool_calls:
            self._judge.calls(message.tool_calls)
        start, stop = span
        _need(start == self.at and start < stop <= self._total)
        self.at = stop
        return self._judge.prompt(choice.prompt_token_ids), start, stop


class _Sequences:
    """Makes sequences; those of one turn are stretches of a few arrays for the whole group.

    Args:
        ids, logprobs, versions: The flat arrays.
        single: The turns of the histories that have one, in order.
    """

    def __init__(
        self,
        ids: npt.NDArray[np.int32],
        logprobs: npt.NDArray[np.float32],
        versions: npt.NDArray[np.int32] | None,
        single: list[Span],
    ) -> None:
        self._flat = (ids, logprobs, versions)
        # One call copies all stretches of an array: several times as fast as one for each.
        prompts = [prompt for prompt, _, _ in single]
        self._ids = _joined(prompts, ids, single, np.int32)
        longest = max(map(len, prompts), default=0)
        nothing = np.full(longest, np.nan, np.float32)
        self._logprobs = _joined([nothing[: len(prompt)] for prompt in prompts], logprobs, single, np.float32)
        self._versions = None
        if versions is not None:
            none = np.full(longest, -1, np.int32)
            self._versions = _joined([none[: len(prompt)] for prompt in prompts], versions, single, np.int32)
        self._trainable = np.ones(len(self._ids), np.bool_)
        self._at = 0
        self._longest = 0
        self._others: list[npt.NDArray[np.int32]] = []

    def of(self, histories: list[list[Span]]) -> tuple[TokenSequence, ...]:
        """The sequences of one trajectory; trajectories are asked for in their order."""
        made: list[TokenSequence] = []
        for turns in histories:
            made.extend([self._one(*turns[0])] if len(turns) == 1 else self._several(turns))
        _need(bool(made))
        return tuple(made)

    def _one(self, prompt: npt.NDArray[np.int32], start: int, stop: int) -> TokenSequence:
        begin = self._at
        end = self._at = begin + len(prompt) + stop - start
        own = slice(begin, end)
        self._trainable[begin : begin + len(prompt)] = False
        self._longest = max(self._longest, end - begin)
        return TokenSequence(
            token_ids=self._ids[own],
            trainable=self._trainable[own],
            logprobs=self._logprobs[own],
            policy_versions=None if self._versions is None else self._versions[own],
        )

    def _several(self, turns: list[Span]) -> tuple[TokenSequence, ...]:
        ids, logprobs, versions = self._flat
        made = sequences_of(
            [
                Turn(
                    prompt=prompt,
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


def _joined(before: list[npt.NDArray[Scalar]], flat: npt.NDArray[Scalar], turns: list[Span], dtype: type[Scalar]) -> npt.NDArray[Scalar]:
    """Each turn's stretch of a flat array, behind what stands before it."""
    parts = [part for prefix, (_, start, stop) in zip(before, turns, strict=True) for part in (prefix, flat[start:stop])]
    return np.concatenate(parts) if parts else np.empty(0, dtype)
