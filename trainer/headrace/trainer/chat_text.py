"""Conversations as a model's chat template writes them.

Guarantees: the template runs in transformers' own `ImmutableSandboxedEnvironment` (a template is a program that came with a model: it
reaches no attribute, file or import) under a bound on its time, memory and output; whatever it raises becomes a `ChatTextError` that keeps
its message. Tools go in with one order of keys, since clients re-order them on the wire and templates print them as JSON. Tool arguments
go in as objects, as the serving engines do, and as the text they came as where the template can't take objects. A thought goes in under
both of its names (`reasoning_content`, `reasoning`), so that templates of either convention show it.
Limitations: images, sound and files (`ContentError`); after three renderings of one group that ran out of time, the rest of that group.
"""

import inspect
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from jinja2 import TemplateSyntaxError

from headrace.schemas.chat import Choice, ChoiceMessage, Message, MessageOrChoice, Tool, ToolCall, thoughts_of
from headrace.trainer.plan import BaseUnusableError
from headrace.trainer.template_bound import TemplateBoundError, bounded

if TYPE_CHECKING:  # importing transformers takes seconds, also in the process that only hands groups to the tokenizing one
    from transformers import PreTrainedTokenizerBase

RENDER_SECONDS = 5.0
"""Processor time of one rendering; a long conversation takes milliseconds."""
RENDER_BYTES = 1 << 30
RENDERED_CHARACTERS = 1 << 24
_TIME_OUTS = 3
# Letters and digits only, so that no template trims or escapes it.
_STAND_IN = "headraceassistantturn7f3a91"
_ANSWER = "headraceanswer5c20d8"


class ChatTextError(Exception):
    """The conversation can't be rendered; the message says why."""


class ContentError(Exception):
    """A message holds something else than text; the message says what and where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """An assistant turn inside the conversation that ends with it."""

    token_ids: list[int]
    """Of the conversation, to the end of the turn or beyond."""
    own: list[bool]
    """Which of them are the turn's."""
    end: int | None
    """The token that ends the turn, if it was asked for and the template has one; it is among `own`."""


class ChatText:
    """The chat template of one tokenizer, for the conversations of one group.

    Args:
        tokenizer: Of the base model.
        switches: Handed to the template by name (`enable_thinking`), as the rollout engines do.
        stop_ids: Tokens with which the base model ends its turns, next to the special tokens of the tokenizer.

    Raises:
        ChatTextError: a switch has the name of an argument of transformers' own.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        switches: Mapping[str, bool | int | float | str] | None = None,
        stop_ids: Collection[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._stop_ids = frozenset(stop_ids)
        self._switches: dict[str, Any] = dict(switches or {})
        self._timed_out = 0
        self._last: tuple[str, npt.NDArray[np.int32]] | None = None
        """What was asked for last, and its ids: the members of a group mostly begin with the same conversation."""
        if self._switches and (taken := sorted(_arguments(tokenizer) & self._switches.keys())):
            raise ChatTextError(f"chat_template_kwargs can't set {', '.join(taken)}: they are no switches of a template")

    def prompt(self, items: Sequence[MessageOrChoice], tools: Sequence[Tool] | None) -> list[int]:
        """As `prompt_ids`, as a list."""
        ids: list[int] = self.prompt_ids(items, tools).tolist()
        return ids

    def prompt_ids(self, items: Sequence[MessageOrChoice], tools: Sequence[Tool] | None) -> npt.NDArray[np.int32]:
        """Token ids of a conversation up to where the assistant speaks next; no one writes into the array.

        Raises:
            ChatTextError: no template, or it raised.
        """
        messages = [_plain(item) for item in items]
        asked = repr((messages, tools))  # not compared as values: True equals 1, and templates write them differently
        if self._last is None or self._last[0] != asked:
            text = self._render(messages, tools, add_generation_prompt=True)
            self._last = (asked, np.array(self._tokenizer(text, add_special_tokens=False)["input_ids"], np.int32))
        return self._last[1]

    def conversation(self, items: Sequence[MessageOrChoice], tools: Sequence[Tool] | None) -> list[int]:
        """Token ids of a conversation as it stands, without a question for more.

        Raises:
            ChatTextError: no template, or it raised.
        """
        text = self._render([_plain(item) for item in items], tools, add_generation_prompt=False)
        return self._encoded(text)[0]

    def spoken(self, items: Sequence[MessageOrChoice], tools: Sequence[Tool] | None, *, end: bool = False) -> Spoken:
        """Token ids of a conversation that ends with an assistant's turn, and which of them are that turn's own.

        The turn begins where the template asks the model to speak, so that what it thought is part of it; where the template writes a
        past turn otherwise than it asks for one, the turn is what stands in the place of its content. Tool calls are part of it. A token
        that reaches over the edge of the text is not marked.

        Args:
            items: The conversation.
            tools: Of the history.
            end: Also mark the token that ends the turn: the special token behind it, or else the one with which the template begins the
                message after it (GLM's `<|user|>`), which is then the last token.

        Raises:
            ChatTextError: no template, it raised, it rewrites the turn, or the tokenizer can't say where its tokens stand.
        """
        *before, last = [_plain(item) for item in items]
        text = self._render([*before, last], tools, add_generation_prompt=False)
        frame = self._render([*before, {"role": "assistant", "content": _STAND_IN}], tools, add_generation_prompt=False)
        prefix, found, suffix = frame.partition(_STAND_IN)
        prefix = self._asked(before, tools, text) or prefix
        if not found or not text.startswith(prefix) or not text.endswith(suffix) or len(text) < len(prefix) + len(suffix):
            raise ChatTextError("the chat template rewrites this assistant turn, so its tokens can't be told from the template's")
        if not self._tokenizer.is_fast:
            raise ChatTextError("this tokenizer can't say which characters a token covers (it is not a fast one): send token ids")
        start, stop = len(prefix), len(text) - len(suffix)
        ids, spans = self._encoded(text)
        mark = self._end_mark(text, ids, spans, stop) if end else range(0)
        if end and not mark:
            text_on = text[:stop] + self._before_an_answer(before, last, tools)
            ids_on, spans_on = self._encoded(text_on)
            mark = self._end_mark(text_on, ids_on, spans_on, stop)
            if mark:
                ids, spans = ids_on[: mark.stop], spans_on[: mark.stop]
        own = [first < after and start <= first and after <= stop for first, after in spans]
        for i in mark:
            own[i] = True
        return Spoken(token_ids=ids, own=own, end=ids[mark[-1]] if mark else None)

    def _encoded(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of a text, and the characters that each covers."""
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return [int(token_id) for token_id in encoded["input_ids"]], encoded["offset_mapping"]

    def _end_mark(self, text: str, ids: list[int], spans: list[tuple[int, int]], stop: int) -> range:
        """Places of the token that ends a turn whose text ends at `stop`, and of white space before it; none if there is none."""
        begin = next((i for i, (first, _) in enumerate(spans) if first >= stop), len(ids))
        for i in range(begin, len(ids)):
            if ids[i] in self._ends:
                return range(begin, i + 1)
            if text[slice(*spans[i])].strip():
                break
        return range(0)

    def _before_an_answer(self, before: list[dict[str, Any]], last: dict[str, Any], tools: Sequence[Tool] | None) -> str:
        """What the template writes between an assistant's turn and the message that answers it; empty if it says nothing of the kind."""
        said = {"role": "assistant", "content": _STAND_IN}  # without its thought, which many templates leave out of past turns
        answer: dict[str, Any] = {"role": "user", "content": _ANSWER}
        if calls := last.get("tool_calls"):
            answer = {"role": "tool", "content": _ANSWER, "name": calls[-1]["function"]["name"], "tool_call_id": calls[-1].get("id", "")}
        try:
            text = self._render([*before, said, answer], tools, add_generation_prompt=False)
        except ChatTextError:  # many templates refuse an order of roles that they do not expect
            return ""
        return text.partition(_STAND_IN)[2].partition(_ANSWER)[0]

    def _asked(self, before: list[dict[str, Any]], tools: Sequence[Tool] | None, text: str) -> str | None:
        """What the template writes to make the model speak, if the conversation continues from it."""
        try:
            asked = self._render(before, tools, add_generation_prompt=True)
        except ChatTextError:  # many templates can't render an empty conversation
            return None
        return asked if text.startswith(asked) else None

    @cached_property
    def _ends(self) -> frozenset[int]:
        """Tokens that can end a turn: all special ones but the one that begins a text."""
        added = self._tokenizer.added_tokens_decoder.items()
        special = {*self._tokenizer.all_special_ids, *(token_id for token_id, token in added if token.special)}
        begins = {self._tokenizer.bos_token_id} - {self._tokenizer.eos_token_id}
        return frozenset((special - begins) | self._stop_ids)

    def _render(self, messages: list[dict[str, Any]], tools: Sequence[Tool] | None, *, add_generation_prompt: bool) -> str:
        if self._tokenizer.chat_template is None:
            raise ChatTextError("the base model has no chat template: send each choice's prompt_token_ids and token_ids")

        def attempt(conversation: list[dict[str, Any]]) -> str:
            return str(
                self._tokenizer.apply_chat_template(
                    conversation,
                    tools=[canonical_tool(tool) for tool in tools] if tools else None,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    **self._switches,
                )
            )

        with_objects = [_with_arguments(message, as_object) for message in messages]
        with_text = [_with_arguments(message, _as_text) for message in messages]
        variants = [with_objects] if with_objects == with_text else [with_objects, with_text]
        problem: Exception | None = None
        for conversation in variants:
            if self._timed_out >= _TIME_OUTS:
                raise ChatTextError(f"the chat template ran out of time {_TIME_OUTS} times in this group")
            try:
                with bounded(RENDER_SECONDS, RENDER_BYTES):
                    text = attempt(conversation)
            except TemplateBoundError as error:
                self._timed_out += 1
                raise ChatTextError(f"the chat template does not end on this conversation: {error}") from error
            except TemplateSyntaxError as error:
                raise BaseUnusableError(f"the base model's chat template does not compile: line {error.lineno}: {error.message}") from error
            except Exception as error:  # noqa: BLE001 - a template is a program of its own: it raises what it likes
                problem = error
                continue
            if len(text) > RENDERED_CHARACTERS:
                raise ChatTextError(f"the chat template wrote {len(text)} characters, at most {RENDERED_CHARACTERS} are tokenized")
            return text
        raise ChatTextError(f"the chat template can't render this conversation: {type(problem).__name__}: {problem}") from problem


def _arguments(tokenizer: "PreTrainedTokenizerBase") -> set[str]:
    return {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}


def canonical_tool(tool: Tool) -> dict[str, Any]:
    """A tool with its keys in the order type, function{name, description, parameters, strict}; what is null is left out."""
    function = {
        "name": tool.function.name,
        "description": tool.function.description,
        "parameters": tool.function.parameters,
        "strict": tool.function.strict,
    }
    return {"type": tool.type, "function": {key: value for key, value in function.items() if value is not None}}


def check_text_only(items: Sequence[MessageOrChoice]) -> None:
    """Refuse what is not text, also where the prompt's token ids are known: placeholders without their image train on nothing.

    Raises:
        ContentError: naming the item and the kind of its part.
    """
    for i, item in enumerate(items):
        if isinstance(item, Message) and isinstance(item.content, list):
            for part in item.content:
                if part.get("type") != "text" or not isinstance(part.get("text"), str):
                    kind = part.get("type", "unknown")
                    raise ContentError(f"messages_and_choices[{i}].content holds a part of type {kind!r}: only text is trained on")


def _plain(item: MessageOrChoice) -> dict[str, Any]:
    """A message as templates expect it: content is a string, absent keys are absent."""
    message: Message | ChoiceMessage = item.message if isinstance(item, Choice) else item
    content = message.content
    if isinstance(content, list):
        # Several text parts become lines, as vLLM joins them for templates that take strings.
        content = "\n".join(part["text"] for part in content)
    plain: dict[str, Any] = {"role": message.role, "content": content or message.refusal or ""}
    plain |= thoughts_of(message)
    if message.tool_calls:
        plain["tool_calls"] = [_plain_call(call) for call in message.tool_calls]
    if isinstance(message, Message):
        plain |= {key: value for key, value in (("name", message.name), ("tool_call_id", message.tool_call_id)) if value is not None}
    return plain


def _plain_call(call: ToolCall) -> dict[str, Any]:
    plain: dict[str, Any] = {"type": call.type, "function": {"name": call.function.name, "arguments": call.function.arguments}}
    return plain if call.id is None else {"id": call.id, **plain}


def _with_arguments(message: dict[str, Any], convert: Callable[[str | dict[str, Any]], str | dict[str, Any]]) -> dict[str, Any]:
    """The message with the arguments of its tool calls in another form."""
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": convert(call["function"]["arguments"])}} for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def as_object(arguments: str | dict[str, Any]) -> str | dict[str, Any]:
    """Decoded, where they are the JSON of an object, or nothing at all (a call without arguments)."""
    if not isinstance(arguments, str):
        return arguments
    if not arguments.strip():
        return {}
    try:
        decoded = json.loads(arguments)
    except ValueError:
        return arguments
    return decoded if isinstance(decoded, dict) else arguments


def _as_text(arguments: str | dict[str, Any]) -> str:
    """As they came; an object as JSON."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
