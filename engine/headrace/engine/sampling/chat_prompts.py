"""Conversations to token ids through a tokenizer's own chat template, and how a conversation continues token for token.

Guarantees: `continuation` gives the very tokens of the turn before, then what the template puts between that turn and the next one; so a
turn's prompt starts with all tokens of the turns before it, and a trainer sees one row, never a re-tokenized neighbour of it.
Limitations: templates that need to see the earlier turns to render the later ones (they see a stand-in for the assistant's turn).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from headrace.core.errors import HeadraceError
from headrace.core.outages import said
from headrace.engine.sampling.generation import Generation
from headrace.schemas.chat import Choice, ChoiceMessage, Message, Tool, thoughts_of

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
