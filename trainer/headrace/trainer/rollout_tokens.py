"""One trajectory to token sequences: which turns train, behind which prompt, within which length.

A choice with token ids and log-probabilities is trained on exactly as sampled. Its prompt is its `prompt_token_ids`, or else the
conversation before it through the chat template; `sequences.py` says when turns share a sequence. `which_train` says which turns are the
policy's own. Where `text` allows it, a choice that is only text, or whose log-probabilities are all missing, trains too (ratio 1), as does
the completion of a history without choices. Else such a choice is context, as long as the trajectory has another one that trains.

A turn of text that the model ended itself trains its end: the token with which the template ends it. One that was cut off (`length`,
`abort`, null, a stop string) does not. Sampled tokens have their end among them.

Guarantees: a trajectory gives sequences with at least one trainable token each, within the limit (`lengths.py`), or `UnfitError` with a
reason and the place; turns whose end is not known, and turns that are context against what one might expect, are counted.
Limitations: sampled tokens without the token that ended the turn (some hosted APIs leave it out) train without it.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.schemas.chat import Choice, Message, MessageOrChoice, Tool
from headrace.schemas.parsing import shown
from headrace.schemas.reasons import RejectionReason as Reason
from headrace.schemas.trajectory import Trajectory
from headrace.schemas.turns import SampledTokens
from headrace.trainer.chat_text import ChatText, ChatTextError, ContentError, as_object, check_text_only
from headrace.trainer.groups import TokenSequence, first_positive, known_logprobs
from headrace.trainer.lengths import Fitted, OverLongError, fit
from headrace.trainer.sequences import Turn, sequences_of

IdArray = npt.NDArray[np.int32]
_ENDED = frozenset({"stop", "tool_calls", "function_call"})
"""Finish reasons of turns that the model ended."""


class UnfitError(Exception):
    """A trajectory that can't be trained on.

    Args:
        reason: From the closed list.
        detail: What, where (from the trajectory's own fields on) and what to do.
    """

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenized:
    """A trajectory as sequences, and what is to be said of it."""

    fitted: Fitted
    turns_without_end: int
    """Turns that the model ended, and whose end the chat template does not tell: they train without one."""
    turns_as_context: int
    """Choices without log-probabilities, and assistant messages, that are context although the model may have sampled them."""


@dataclass(slots=True)
class _Counts:
    without_end: int = 0
    as_context: int = 0
    missing: str | None = None
    """Of the first choice that is context because its log-probabilities are missing: where, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTokenizer:
    """How the trajectories of one group are tokenized."""

    chat: Callable[[], ChatText]
    """The chat template, for what needs one; raises ChatTextError."""
    vocabulary: int
    """Token ids are below."""
    limit: int
    """Tokens of the longest sequence."""
    truncate: bool
    """Cut a longer sequence, instead of refusing its trajectory."""
    text: bool
    """Also train on assistant turns that are only text."""
    sft: bool
    """Examples to imitate; `text` must be set too."""

    def tokenize(self, trajectory: Trajectory, sampled: Iterator[SampledTokens | None]) -> Tokenized:
        """Sequences of all histories.

        Args:
            trajectory: As decoded.
            sampled: The sampled tokens of its choices, in wire order.

        Raises:
            UnfitError: see there.
        """
        if (fault := (trajectory.__pydantic_extra__ or {}).get("unreadable")) is not None:  # see `headrace.schemas.surrogates`
            raise UnfitError(Reason.UNSUPPORTED_CONTENT, str(fault))
        if trajectory.unread is not None and not self.text:
            raise UnfitError(Reason.MISSING_LOGPROBS, f"{trajectory.unread}; or set allow_training_without_logprobs")
        found: list[TokenSequence] = []
        counts = _Counts()
        for h, (items, tools) in enumerate(trajectory.histories()):
            at = "" if h == 0 else f"additional_histories[{h - 1}]."
            found.extend(self._history(items, tools, sampled, counts, at))
        if not found:
            if counts.missing is not None:
                raise UnfitError(Reason.MISSING_LOGPROBS, counts.missing)
            advice = "" if self.text else "; plain assistant messages are context unless allow_training_without_logprobs"
            detail = f"no sampled token in any history{advice}"
            raise UnfitError(Reason.NO_TRAINABLE_TOKENS, trajectory.unread or detail)
        try:
            fitted = fit(tuple(found), self.limit, truncate=self.truncate)
        except OverLongError as error:
            raise UnfitError(Reason.TOO_LONG, str(error)) from error
        return Tokenized(fitted=fitted, turns_without_end=counts.without_end, turns_as_context=counts.as_context)

    def _history(
        self,
        items: Sequence[MessageOrChoice],
        tools: Sequence[Tool] | None,
        sampled: Iterator[SampledTokens | None],
        counts: _Counts,
        at: str,
    ) -> tuple[TokenSequence, ...]:
        try:
            check_text_only(items)
        except ContentError as error:
            raise UnfitError(Reason.UNSUPPORTED_CONTENT, f"{at}{error}") from error
        turns: list[Turn] = []
        for i, trains in enumerate(which_train(items, at, text=self.text, sft=self.sft)):
            item, where = items[i], f"{at}messages_and_choices[{i}]"
            drawn = next(sampled) if isinstance(item, Choice) else None
            try:
                if not trains:
                    counts.as_context += self.text and not self.sft and _may_be_sampled(item)
                elif isinstance(item, Choice) and drawn is not None and self._usable(drawn):
                    turns.append(self._sampled_turn(items[:i], item, tools, drawn, where))
                elif self.text:
                    turns.append(self._text_turn(items[: i + 1], tools, counts))
                elif isinstance(item, Choice):
                    counts.missing = counts.missing or f"{where}: {_what_is_missing(item, drawn)}"
                    counts.as_context += 1
            except ChatTextError as error:
                raise UnfitError(Reason.TOKENIZATION_FAILED, f"{where}: {error}{_no_object(items[: i + 1], at)}") from error
        return sequences_of(turns)

    def _usable(self, drawn: SampledTokens) -> bool:
        """Whether sampled tokens can be trained on: some log-probability is known, or none is needed. No tokens miss nothing."""
        return self.text or len(drawn) == 0 or not bool(np.isnan(known_logprobs(np.asarray(drawn.logprobs, np.float32))).all())

    def _sampled_turn(
        self, before: Sequence[MessageOrChoice], choice: Choice, tools: Sequence[Tool] | None, drawn: SampledTokens, where: str
    ) -> Turn:
        token_ids = self._checked(np.asarray(drawn.token_ids, np.int32), f"{where}.token_ids")
        given = choice.prompt_token_ids
        prompt = self.chat().prompt_ids(before, tools) if given is None else _ids(given)
        return Turn(
            prompt=self._checked(prompt, f"{where}.prompt_token_ids"),
            token_ids=token_ids,
            logprobs=self._logprobs(np.asarray(drawn.logprobs, np.float32), where),
            policy_versions=None if self.sft or drawn.policy_versions is None else np.asarray(drawn.policy_versions, np.int32),
        )

    def _text_turn(self, items: Sequence[MessageOrChoice], tools: Sequence[Tool] | None, counts: _Counts) -> Turn:
        ended = _was_ended(items[-1])
        spoken = self.chat().spoken(items, tools, end=ended)
        counts.without_end += ended and spoken.end is None
        marked = np.flatnonzero(spoken.own)
        start, stop = (int(marked[0]), int(marked[-1]) + 1) if len(marked) else (len(spoken.own), len(spoken.own))
        all_ids = _ids(spoken.token_ids)
        return Turn(prompt=all_ids[:start], token_ids=all_ids[start:stop], logprobs=np.full(stop - start, np.nan, np.float32))

    def _logprobs(self, values: npt.NDArray[np.float32], where: str) -> npt.NDArray[np.float32]:
        if not self.sft and (i := first_positive(values)) is not None:
            detail = f"{where}: the log-probability of token {i} is {values[i]:g}: it can't be above 0, send natural logarithms"
            raise UnfitError(Reason.INVALID_LOGPROBS, detail)
        return known_logprobs(values)

    def _checked(self, ids: IdArray, where: str) -> IdArray:
        if len(ids) == 0 or (ids.min() >= 0 and ids.max() < self.vocabulary):
            return ids
        wrong = np.flatnonzero((ids < 0) | (ids >= self.vocabulary))
        if len(wrong):
            i = int(wrong[0])
            detail = f"{where}[{i}] is {int(ids[i])}, but the base model has {self.vocabulary} tokens: was another tokenizer used?"
            raise UnfitError(Reason.TOKEN_OUT_OF_VOCABULARY, detail)
        return ids


def _ids(values: list[int]) -> IdArray:
    """As int32; what does not fit becomes -1, which is in no vocabulary."""
    try:
        return np.frombuffer(array("i", values), np.int32)  # several times as fast as numpy's own way from a list
    except OverflowError:
        pass
    return np.fromiter((value if 0 <= value < 2**31 else -1 for value in values), np.int32, len(values))


def which_train(items: Sequence[MessageOrChoice], at: str, *, text: bool, sft: bool) -> list[bool]:
    """Which items are turns of the policy that is trained.

    Of an example every assistant turn is. Of a rollout every choice is; and where text trains and the history has no choice, the assistant
    messages behind its last user message: its completion. Assistant messages before that are the prompt's (few-shot examples, an earlier
    conversation). `weight` of a turn wins over both: 0 is context, 1 trains, wherever text trains.

    Args:
        items: A history.
        at: Where the history stands, for errors.
        text: Whether turns that are only text train.
        sft: Whether the history is an example.

    Raises:
        UnfitError: a weight that is neither 0 nor 1.
    """
    has_choices = any(isinstance(item, Choice) for item in items)
    last_user = max((i for i, item in enumerate(items) if isinstance(item, Message) and item.role == "user"), default=-1)
    found = []
    for i, item in enumerate(items):
        if isinstance(item, Message) and item.role != "assistant":
            found.append(False)
            continue
        weight = _weight(item, f"{at}messages_and_choices[{i}]")
        own = isinstance(item, Choice) or (text and (sft or weight is not None or (not has_choices and i > last_user)))
        found.append(own and weight != 0)
    return found


def _weight(item: MessageOrChoice, where: str) -> int | None:
    """0 or 1, as the hosted fine-tuning APIs have it on a message; a choice may have it, or its message."""
    holders = (("", item), (".message", item.message)) if isinstance(item, Choice) else (("", item),)
    for name, holder in holders:
        weight = (holder.__pydantic_extra__ or {}).get("weight")
        if weight is None:
            continue
        if isinstance(weight, bool) or not isinstance(weight, int | float) or weight not in {0, 1}:
            detail = f"{where}{name}.weight is {shown(weight)!r}: give 0 (context) or 1 (trains), or leave it out"
            raise UnfitError(Reason.UNSUPPORTED_CONTENT, detail)
        return int(weight)
    return None


def _no_object(items: Sequence[MessageOrChoice], at: str) -> str:
    """The first tool arguments that are not the JSON of an object, which many chat templates need; empty if there are none."""
    for i, item in enumerate(items):
        message, inner = (item.message, "message.") if isinstance(item, Choice) else (item, "")
        for k, call in enumerate(message.tool_calls or ()):
            if not isinstance(as_object(call.function.arguments), dict):
                place = f"{at}messages_and_choices[{i}].{inner}tool_calls[{k}].function.arguments"
                return f". {place} is {shown(call.function.arguments)!r}, which is no JSON object: send one"
    return ""


def _may_be_sampled(item: MessageOrChoice) -> bool:
    """Whether an item that is context, and does not say so itself, is an assistant's."""
    return isinstance(item, Message) and item.role == "assistant" and "weight" not in (item.__pydantic_extra__ or {})


def _was_ended(item: MessageOrChoice) -> bool:
    """Whether the model ended the turn itself. A message says nothing of it unless it has a `finish_reason`, and counts as ended."""
    extra = item.__pydantic_extra__ or {}
    reason = item.finish_reason if isinstance(item, Choice) else extra.get("finish_reason", "stop")
    # vLLM says by which string a turn was cut off, where one was.
    return reason in _ENDED and not isinstance(extra.get("stop_reason"), str)


def _what_is_missing(choice: Choice, drawn: SampledTokens | None) -> str:
    advice = "; or set allow_training_without_logprobs"
    if drawn is not None:
        return f"all {len(drawn)} log-probabilities are missing: sample with logprobs=true{advice}"
    if choice.logprobs is not None:
        return f"the tokens are given as text: send token_ids, or start vLLM with --return-tokens-as-token-ids{advice}"
    return f"a choice without token ids and log-probabilities: sample with logprobs=true and send token_ids{advice}"
