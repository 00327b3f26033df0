"""What a local engine generated: tokens with their log-probabilities and policy versions, and the choice they make.

Guarantees: `to_choice` gives the turn exactly as it was sampled, tokens next to the choice (for a `SampledGroup`); `inline_choice` has them
inside (for a plain `TrajectoryGroup`). Imports no torch.

Conversations to token ids through a tokenizer's own chat template, and how a conversation continues token for token.

Guarantees: `continuation` gives the very tokens of the turn before, then what the template puts between that turn and the next one; so a
turn's prompt starts with all tokens of the turns before it, and a trainer sees one row, never a re-tokenized neighbour of it.
Limitations: templates that need to see the earlier turns to render the later ones (they see a stand-in for the assistant's turn).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from headrace.core.errors import HeadraceError
from headrace.core.outages import said
from headrace.schemas.chat import Choice, ChoiceMessage, Message, Tool, thoughts_of
from headrace.schemas.turns import SampledTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One sampled turn; `token_ids`, `logprobs` and `policy_versions` have the same length N.

    Example: `choice, tokens = engine.generate([[1, 2, 3]], max_tokens=8)[0].to_choice()`.
    """

    text: str
    """`token_ids` as text, without special tokens."""
    prompt_token_ids: list[int]
    token_ids: list[int]
    """The stop token included, where one was drawn: it was sampled, so it is trained on."""
    logprobs: list[float]
    """float32, natural logarithm, of the full softmax at temperature 1."""
    policy_versions: list[int]
    """The version that sampled each token."""
    finish_reason: Literal["stop", "length"]

    def to_choice(self) -> tuple[Choice, SampledTokens]:
        """The turn as a choice without tokens, and its tokens as arrays: what `SampledGroup` takes."""
        return self._choice(), SampledTokens.of(self.token_ids, list(self.logprobs), self.policy_versions)

    def inline_choice(self) -> Choice:
        """The turn as one choice that carries its tokens."""
        return self._choice().model_copy(
            update={
                "token_ids": list(self.token_ids),
                "token_logprobs": list(self.logprobs),
                "policy_versions": list(self.policy_versions),
            }
        )

    def _choice(self) -> Choice:
        return Choice(
            finish_reason=self.finish_reason,
            message=ChoiceMessage(content=self.text),
            prompt_token_ids=list(self.prompt_token_ids),
        )


ChatMessage = Message | Choice | Mapping[str, Any]
"""A message as a schema model or as a plain OpenAI-style dict."""

# Stands where the assistant spoke. Letters and digits only, so that no template trims or escapes it.
_STAND_IN = "headraceassistantturn7f3a91"


class ChatTemplateError(HeadraceError):
    """The tokenizer has no chat template, or its template can't render this conversation; says why."""


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool] | None = None,
    switches: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a conversation, up to where the assistant speaks next. `switches` go to the template by name.

    Raises:
        ChatTemplateError: see there.
    """
    return _ids(tokenizer, _render(tokenizer, messages, tools, switches))


def continuation(
    tokenizer: PreTrainedTokenizerBase,
    before: Generation,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool] | None = None,
    switches: Mapping[str, Any] | None = None,
) -> list[int]:
    """Prompt of the next turn: prompt and tokens of the turn before, unchanged, then `messages` (a tool's answer, the user's reply).

    Raises:
        ChatTemplateError: see there.
    """
    stand_in: list[ChatMessage] = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _STAND_IN}]
    rendered = _render(tokenizer, [*stand_in, *messages], tools, switches)
    _, found, rest = rendered.rpartition(_STAND_IN)
    if not found:
        raise ChatTemplateError("the chat template does not show an assistant's content: build the next prompt's token ids yourself")
    added = _ids(tokenizer, rest)
    # The template closes the assistant's turn; a turn that stopped by itself has drawn that token already.
    if before.finish_reason == "stop" and added[:1] == before.token_ids[-1:]:
        added = added[1:]
    return [*before.prompt_token_ids, *before.token_ids, *added]


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool] | None,
    switches: Mapping[str, Any] | None,
) -> str:
    if tokenizer.chat_template is None:
        raise ChatTemplateError("the tokenizer has no chat template: give prompt token ids instead of messages")
    try:
        text = tokenizer.apply_chat_template(
            [_plain(message) for message in messages],
            tools=[tool.model_dump(exclude_none=True) for tool in tools] if tools else None,
            tokenize=False,
            add_generation_prompt=True,
            **(switches or {}),
        )
    except Exception as error:  # a template is a program of its own: it raises what it likes
        raise ChatTemplateError(f"the chat template can't render this conversation: {said(error)}") from error
    return str(text)


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    # The template writes its special tokens itself; the tokenizer must add none.
    return [int(token_id) for token_id in tokenizer(text, add_special_tokens=False)["input_ids"]]


def _plain(message: ChatMessage) -> dict[str, Any]:
    if isinstance(message, Mapping):
        thoughts = {name: message[name] for name in ("reasoning_content", "reasoning") if message.get(name)}
        return {**message, **thoughts_of(ChoiceMessage.model_validate(thoughts))}
    inner = message.message if isinstance(message, Choice) else message
    return {**inner.model_dump(exclude_none=True), **thoughts_of(inner)}
