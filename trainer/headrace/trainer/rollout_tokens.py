"""One trajectory to token sequences: which turns train, behind which prompt, within which length.

A choice with token ids and log-probabilities is trained on exactly as sampled. Its prompt is its `prompt_token_ids`, or else the
conversation before it through the chat template; `sequences.py` says when turns share a sequence. A choice that says only text, or whose
log-probabilities are all missing, is trained on where `text` says so (ratio 1), and then plain assistant messages are too. Examples (`sft`)
are that, and the token that ends a turn trains too; a message whose `weight` is 0 is context, as in the hosted fine-tuning APIs.

Guarantees: a trajectory gives sequences with at least one trainable token each, within the limit (`lengths.py`), or `UnfitError` with a
reason and the place. Gives up: nothing of a trajectory that fits.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.schemas.chat import Choice, Message, MessageOrChoice, Tool
from headrace.schemas.reasons import RejectionReason as Reason
from headrace.schemas.trajectory import Trajectory
from headrace.schemas.turns import SampledTokens
from headrace.trainer.chat_text import ChatText, ChatTextError, ContentError, check_text_only
from headrace.trainer.groups import TokenSequence
from headrace.trainer.lengths import Fitted, OverLongError, fit
from headrace.trainer.sequences import Turn, sequences_of

IdArray = npt.NDArray[np.int32]


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

    def tokenize(self, trajectory: Trajectory, sampled: Iterator[SampledTokens | None]) -> Fitted:
        """Sequences of all histories.

        Args:
            trajectory: As decoded.
            sampled: The sampled tokens of its choices, in wire order.

        Raises:
            UnfitError: see there.
        """
        found: list[TokenSequence] = []
        for h, (items, tools) in enumerate(trajectory.histories()):
            try:
                found.extend(self._history(items, tools, sampled))
            except UnfitError as error:
                where = "" if h == 0 else f"additional_histories[{h - 1}]."
                raise UnfitError(error.reason, f"{where}{error.detail}") from error
        if not found:
            advice = "" if self.text else "; plain assistant messages are context unless allow_training_without_logprobs"
            raise UnfitError(Reason.NO_TRAINABLE_TOKENS, f"no sampled token in any history{advice}")
        try:
            return fit(tuple(found), self.limit, truncate=self.truncate)
        except OverLongError as error:
            raise UnfitError(Reason.TOO_LONG, str(error)) from error

    def _history(
        self, items: Sequence[MessageOrChoice], tools: Sequence[Tool] | None, sampled: Iterator[SampledTokens | None]
    ) -> tuple[TokenSequence, ...]:
        try:
            check_text_only(items)
            return sequences_of(list(self._turns(items, tools, sampled)))
        except ContentError as error:
            raise UnfitError(Reason.UNSUPPORTED_CONTENT, str(error)) from error
        except ChatTextError as error:
            raise UnfitError(Reason.TOKENIZATION_FAILED, str(error)) from error

    def _turns(
        self, items: Sequence[MessageOrChoice], tools: Sequence[Tool] | None, sampled: Iterator[SampledTokens | None]
    ) -> Iterator[Turn]:
        for i, item in enumerate(items):
            where = f"messages_and_choices[{i}]"
            if isinstance(item, Choice):
                drawn = next(sampled)
                if drawn is not None and self._usable(drawn):
                    yield self._sampled_turn(items[:i], item, tools, drawn, where)
                elif self.text:
                    yield self._text_turn(items[: i + 1], tools, end=self.sft and item.finish_reason != "length")
                else:
                    raise UnfitError(Reason.MISSING_LOGPROBS, f"{where}: {_what_is_missing(item, drawn)}")
            elif self.text and isinstance(item, Message) and item.role == "assistant" and not (self.sft and _weighs_nothing(item)):
                yield self._text_turn(items[: i + 1], tools, end=self.sft)

    def _usable(self, drawn: SampledTokens) -> bool:
        """Whether sampled tokens can be trained on: some log-probability is known, or none is needed. No tokens miss nothing."""
        return self.text or len(drawn) == 0 or not bool(np.isnan(np.asarray(drawn.logprobs)).all())

    def _sampled_turn(
        self, before: Sequence[MessageOrChoice], choice: Choice, tools: Sequence[Tool] | None, drawn: SampledTokens, where: str
    ) -> Turn:
        token_ids = self._checked(np.asarray(drawn.token_ids, np.int32), f"{where}.token_ids")
        given = choice.prompt_token_ids
        prompt = self.chat().prompt_ids(before, tools) if given is None else _ids(given)
        return Turn(
            prompt=self._checked(prompt, f"{where}.prompt_token_ids"),
            token_ids=token_ids,
            logprobs=np.asarray(drawn.logprobs, np.float32),
            policy_versions=None if drawn.policy_versions is None else np.asarray(drawn.policy_versions, np.int32),
        )

    def _text_turn(self, items: Sequence[MessageOrChoice], tools: Sequence[Tool] | None, *, end: bool) -> Turn:
        ids, own = self.chat().spoken(items, tools, end=end)
        marked = np.flatnonzero(own)
        start, stop = (int(marked[0]), int(marked[-1]) + 1) if len(marked) else (len(ids), len(ids))
        all_ids = _ids(ids)
        return Turn(prompt=all_ids[:start], token_ids=all_ids[start:stop], logprobs=np.full(stop - start, np.nan, np.float32))

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


def _weighs_nothing(message: Message) -> bool:
    return (message.__pydantic_extra__ or {}).get("weight") == 0


def _what_is_missing(choice: Choice, drawn: SampledTokens | None) -> str:
    advice = "; or set allow_training_without_logprobs"
    if drawn is not None:
        return f"all {len(drawn)} log-probabilities are missing: sample with logprobs=true{advice}"
    if choice.logprobs is not None:
        return f"the tokens are given as text: send token_ids, or start vLLM with --return-tokens-as-token-ids{advice}"
    return f"a choice without token ids and log-probabilities: sample with logprobs=true and send token_ids{advice}"
