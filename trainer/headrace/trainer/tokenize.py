"""Groups to tokens: what the sampler drew is trained on, never the re-tokenized text.

A choice with token ids and log-probabilities is trained on exactly as sampled. Its prompt is its `prompt_token_ids`, or else the
conversation before it through the chat template; `sequences.py` says when turns share a sequence. A choice that says only text,
or whose log-probabilities are all missing, is trained on where `allow_training_without_logprobs` says so (ratio 1), and then plain
assistant messages are too; otherwise it refuses its group. Single missing log-probabilities are ratio 1 at those tokens.

Guarantees: a group is tokenized whole or refused whole with a reason from the closed list: a member lost in silence would move
the baseline that the others are compared with. Needs no torch, and no chat template while every choice brings its prompt's ids.
Gives up: the rest of a group with one unfit member (there is no policy yet for smaller groups).
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from headrace.core.errors import HeadraceError
from headrace.schemas.chat import Choice, Message, MessageOrChoice, Tool
from headrace.schemas.codec import SampledGroup
from headrace.schemas.reasons import RejectionReason as Reason
from headrace.schemas.training import TrainConfig
from headrace.schemas.trajectory import Trajectory
from headrace.schemas.turns import SampledTokens
from headrace.trainer.chat_text import ChatText, ChatTextError, ContentError, check_text_only
from headrace.trainer.groups import TokenizedGroup, TokenizedTrajectory, TokenSequence
from headrace.trainer.plan import BaseSource
from headrace.trainer.sequences import Turn, sequences_of

if TYPE_CHECKING:  # importing transformers takes seconds
    from transformers import PreTrainedTokenizerBase


class GroupRefused(Exception):  # noqa: N818 - a verdict, not a fault of the program: the group could be read and is not trained on
    """A group that can't be trained on.

    Args:
        reason: From the closed list.
        detail: What, where and what to do.
        trajectory: Index of the trajectory at fault.
    """

    def __init__(self, reason: Reason, detail: str, trajectory: int | None = None) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
        self.trajectory = trajectory


class BaseUnreadableError(HeadraceError):
    """A base model's folder can't be read; says which and why."""


class GroupTokenizer:
    """Tokenizes groups for one base model.

    Args:
        base: A Hugging Face folder, or a folder with a GGUF file.

    Raises:
        BaseUnreadableError: the config can't be read.
    """

    def __init__(self, base: BaseSource) -> None:
        from transformers import AutoConfig  # noqa: PLC0415 - takes seconds

        self._base = base
        try:
            config = AutoConfig.from_pretrained(base.path, **_gguf(base), local_files_only=True).get_text_config()
        except Exception as error:
            raise BaseUnreadableError(f"base model {base.path}: its config can't be read: {type(error).__name__}: {error}") from error
        self._vocabulary = int(config.vocab_size)
        self._positions: int | None = getattr(config, "max_position_embeddings", None)

    def tokenize(self, group: SampledGroup, group_id: str, config: TrainConfig, max_tokens: int) -> TokenizedGroup:
        """Tokenize a group.

        Args:
            group: As decoded.
            group_id: Its id, given or made by the lane.
            config: Of the job or the model; `allow_training_without_logprobs` and `packed_sequence_length` matter here.
            max_tokens: The longest sequence that the model trains on; a packed row and the base model's positions bound it too.

        Raises:
            GroupRefused: see there.
        """
        if not group.group.trajectories:
            raise GroupRefused(Reason.NO_TRAJECTORIES, "the group has no trajectories")
        limit = min(bound for bound in (max_tokens, config.packed_sequence_length, self._positions) if bound is not None)
        turns = iter(group.turns)
        trajectories = []
        for index, trajectory in enumerate(group.group.trajectories):
            try:
                sequences = self._trajectory(trajectory, turns, allow_text=bool(config.allow_training_without_logprobs), limit=limit)
            except GroupRefused as refusal:
                raise GroupRefused(refusal.reason, f"trajectories[{index}]: {refusal.detail}", index) from refusal
            trajectories.append(
                TokenizedTrajectory(
                    reward=float(trajectory.reward),
                    sequences=sequences,
                    initial_policy_version=trajectory.initial_policy_version,
                    final_policy_version=trajectory.final_policy_version,
                )
            )
        return TokenizedGroup(group_id=group_id, trajectories=tuple(trajectories), exceptions=len(group.group.exceptions))

    @cached_property
    def _chat(self) -> ChatText:
        from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds

        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(self._base.path, **_gguf(self._base), local_files_only=True)
        except Exception as error:  # whatever a tokenizer's files make transformers raise
            advice = "send prompt_token_ids and token_ids with each choice"
            raise ChatTextError(f"the base model's tokenizer can't be read ({type(error).__name__}: {error}): {advice}") from error
        return ChatText(tokenizer)

    def _trajectory(
        self, trajectory: Trajectory, turns: Iterator[SampledTokens | None], *, allow_text: bool, limit: int
    ) -> tuple[TokenSequence, ...]:
        sequences: list[TokenSequence] = []
        for h, (items, tools) in enumerate(trajectory.histories()):
            where = "" if h == 0 else f"additional_histories[{h - 1}]."
            try:
                check_text_only(items)
                history = sequences_of(list(self._turns(items, tools, turns, allow_text=allow_text)))
            except ContentError as error:
                raise GroupRefused(Reason.UNSUPPORTED_CONTENT, f"{where}{error}") from error
            except ChatTextError as error:
                raise GroupRefused(Reason.TOKENIZATION_FAILED, f"{where}{error}") from error
            except GroupRefused as refusal:
                raise GroupRefused(refusal.reason, f"{where}{refusal.detail}") from refusal
            for sequence in history:
                if len(sequence) > limit:
                    detail = f"{where}a sequence of {len(sequence)} tokens, at most {limit} are trained on"
                    raise GroupRefused(Reason.TOO_LONG, detail)
            sequences.extend(history)
        if not sequences:
            advice = "" if allow_text else "; plain assistant messages are context unless allow_training_without_logprobs"
            raise GroupRefused(Reason.NO_TRAINABLE_TOKENS, f"no sampled token in any history{advice}")
        return tuple(sequences)

    def _turns(
        self, items: Sequence[MessageOrChoice], tools: Sequence[Tool] | None, sampled: Iterator[SampledTokens | None], *, allow_text: bool
    ) -> Iterator[Turn]:
        for i, item in enumerate(items):
            where = f"messages_and_choices[{i}]"
            if isinstance(item, Choice):
                drawn = next(sampled)
                if drawn is not None and _usable(drawn, allow_text=allow_text):
                    yield self._sampled_turn(items[:i], item, tools, drawn, where)
                elif allow_text:
                    yield self._text_turn(items[: i + 1], tools)
                else:
                    raise GroupRefused(Reason.MISSING_LOGPROBS, f"{where}: {_what_is_missing(item, drawn)}")
            elif allow_text and isinstance(item, Message) and item.role == "assistant":
                yield self._text_turn(items[: i + 1], tools)

    def _sampled_turn(
        self, before: Sequence[MessageOrChoice], choice: Choice, tools: Sequence[Tool] | None, drawn: SampledTokens, where: str
    ) -> Turn:
        token_ids = self._checked(np.asarray(drawn.token_ids, np.int32), f"{where}.token_ids")
        given = choice.prompt_token_ids
        return Turn(
            prompt=self._checked(_ids(given), f"{where}.prompt_token_ids") if given is not None else _ids(self._chat.prompt(before, tools)),
            token_ids=token_ids,
            logprobs=np.asarray(drawn.logprobs, np.float32),
            policy_versions=None if drawn.policy_versions is None else np.asarray(drawn.policy_versions, np.int32),
        )

    def _text_turn(self, items: Sequence[MessageOrChoice], tools: Sequence[Tool] | None) -> Turn:
        ids, own = self._chat.spoken(items, tools)
        marked = np.flatnonzero(own)
        start, stop = (int(marked[0]), int(marked[-1]) + 1) if len(marked) else (len(ids), len(ids))
        all_ids = _ids(ids)
        return Turn(prompt=all_ids[:start], token_ids=all_ids[start:stop], logprobs=np.full(stop - start, np.nan, np.float32))

    def _checked(self, ids: npt.NDArray[np.int32], where: str) -> npt.NDArray[np.int32]:
        wrong = np.flatnonzero((ids < 0) | (ids >= self._vocabulary))
        if len(wrong):
            i = int(wrong[0])
            detail = f"{where}[{i}] is {int(ids[i])}, but the base model has {self._vocabulary} tokens: was another tokenizer used?"
            raise GroupRefused(Reason.TOKEN_OUT_OF_VOCABULARY, detail)
        return ids


def _gguf(base: BaseSource) -> dict[str, str]:
    return {} if base.gguf_file is None else {"gguf_file": base.gguf_file}


def _ids(values: list[int]) -> npt.NDArray[np.int32]:
    """As int32; what does not fit becomes -1, which is in no vocabulary."""
    return np.fromiter((value if 0 <= value < 2**31 else -1 for value in values), np.int32, len(values))


def _usable(drawn: SampledTokens, *, allow_text: bool) -> bool:
    """Whether sampled tokens can be trained on: some log-probability is known, or none is needed. A turn of no tokens misses nothing."""
    return allow_text or len(drawn) == 0 or not bool(np.isnan(np.asarray(drawn.logprobs)).all())


def _what_is_missing(choice: Choice, drawn: SampledTokens | None) -> str:
    advice = "; or set allow_training_without_logprobs"
    if drawn is not None:
        return f"all {len(drawn)} log-probabilities are missing: sample with logprobs=true{advice}"
    if choice.logprobs is not None:
        return f"the tokens are given as text: send token_ids, or start vLLM with --return-tokens-as-token-ids{advice}"
    return f"a choice without token ids and log-probabilities: sample with logprobs=true and send token_ids{advice}"
