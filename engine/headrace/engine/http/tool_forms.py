"""In which form a model calls tools: what its chat template writes for a call says it.

A form is a transformers response template for the part of an answer that holds calls, so that its parser reads them (JSON, or tags whose
values the tools' schemas give their types). A tokenizer that ships a `response_template` names its form itself. Else the forms of common
families are tried: a call is rendered with the model's template, and the form that reads the same call back is the one.

Guarantees: what does not parse is no call, and nothing raises. Limitations: a form that no one names here (Harmony, Python calls) is not
read; `unknown` then says why, and calls between `<tool_call>` tags are looked for.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import regex
from transformers import PreTrainedTokenizerBase

from headrace.schemas.chat import Message, Tool
from headrace.trainer.chat_text import ChatText, ChatTextError, canonical_tool

_NAME = r"(?P<name>[\w.:-]+)"
_BY_NAME = {"name": "{name}", "arguments": "{content}"}


def _spec(**field: Any) -> dict[str, Any]:  # noqa: ANN401 - a response template's field
    """A response template with nothing but calls."""
    return {"start_anchor": "\0", "fields": {"tool_calls": {"repeats": True, "transform": {"function": "{content}"}, **field}}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolForm:
    """How calls are written."""

    name: str
    opens: str
    """Pattern at which a call may begin: from there on text is not content for certain."""
    region: str
    """Pattern of one call with its marks, or of one list of calls."""
    specs: tuple[dict[str, Any], ...]
    """Response templates, tried in order on each region."""
    offered_only: frozenset[int] = frozenset()
    """Places in `specs` of those that read so much that a call counts only if its tool was offered."""

    def calls(self, region: str, tools: Sequence[Tool], tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, str]]:
        """The calls in a region as (name, arguments as JSON); none if it does not parse."""
        offered: list[dict[Any, Any] | Callable[..., Any]] = [canonical_tool(tool) for tool in tools]
        names = {tool.function.name for tool in tools}
        for place, spec in enumerate(self.specs):
            try:
                parsed = tokenizer.parse_response(region, spec, prefix="", tools=offered).get("tool_calls")
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
            found = [_call(item) for item in _flat(parsed)]
            calls = [call for call in found if call is not None and (place not in self.offered_only or call[0] in names)]
            if found and len(calls) == len(found):
                return calls
        return []


TAGS = ToolForm(
    name="<tool_call>",
    opens=r"<tool_call>|<function=",
    region=r"<tool_call>.*?(?:</tool_call>|\Z)|<function=.*?(?:</function>(?:\s*</tool_call>)?|\Z)",
    specs=(
        # Hermes, Qwen: JSON.
        _spec(open="<tool_call>", close="</tool_call>", content="json"),
        # Qwen-coder: tags with names in them.
        _spec(
            open_pattern=rf"(?:<tool_call>\s*)?<function={_NAME}>",
            close_pattern=r"</function>\s*(?:</tool_call>)?",
            content="xml-inline",
            content_args={"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
            transform={"function": _BY_NAME},
        ),
        # GLM: a name, then tags for keys and values.
        _spec(
            open_pattern=rf"<tool_call>\s*{_NAME}\s*(?=<arg_key>|</tool_call>)",
            close="</tool_call>",
            content="xml-inline",
            content_args={"tag_pattern": r"<arg_key>\s*(?P<key>.*?)\s*</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"},
            transform={"function": _BY_NAME},
        ),
    ),
    offered_only=frozenset({2}),
)
MISTRAL = ToolForm(
    name="[TOOL_CALLS]",
    opens=r"\[TOOL_CALLS\]",
    region=r"\[TOOL_CALLS\].*?(?=\[TOOL_CALLS\]|\Z)",
    specs=(
        _spec(open="[TOOL_CALLS]", content="json"),
        _spec(
            open_pattern=rf"\[TOOL_CALLS\]\s*{_NAME}\s*(?:\[CALL_ID\][^\[]*)?(?:\[ARGS\])?(?=\s*\{{)",
            content="json",
            transform={"function": _BY_NAME},
        ),
    ),
)
LLAMA = ToolForm(
    name="JSON with parameters",
    opens=r"\A\s*\{|<\|python_tag\|>",
    region=r"(?:\A\s*(?:<\|python_tag\|>)?|<\|python_tag\|>)\s*\{.*\Z",
    specs=(
        _spec(
            open_pattern=r"(?:\A|;)\s*(?:<\|python_tag\|>)?\s*(?=\{)", close_pattern=r"(?=;\s*(?:<\|python_tag\|>)?\s*\{)", content="json"
        ),
    ),
    offered_only=frozenset({0}),
)
FORMS = (TAGS, MISTRAL, LLAMA)


def form_of(tokenizer: PreTrainedTokenizerBase) -> tuple[ToolForm, str | None]:
    """The form of calls of a model, and why it is only a guess; None where it is sure."""
    if (shipped := _shipped(getattr(tokenizer, "response_template", None))) is not None:
        return shipped, None
    try:
        written = _written(tokenizer)
    except ChatTextError as error:
        return TAGS, f"the chat template can't write a tool call ({error})"
    for form in FORMS:
        text = tokenizer.decode(_without(tokenizer, written, kept_ids(tokenizer, form)))
        for region in regex.finditer(form.region, text, regex.DOTALL):
            if (_TOOL.function.name, _ARGUMENTS) in [(n, json.loads(a)) for n, a in form.calls(region.group(), [_TOOL], tokenizer)]:
                return form, None
    return TAGS, "the chat template writes tool calls in a form that is not known here, or not at all"


def kept_ids(tokenizer: PreTrainedTokenizerBase, form: ToolForm) -> frozenset[int]:
    """Special tokens that are marks of the form: without them in the text, no call could be found."""
    patterns = json.dumps([form.opens, form.region, form.specs]).replace("\\", "")
    special = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(i for i, text in special.items() if text in patterns and i != tokenizer.eos_token_id)


_TOOL = Tool.model_validate(
    {
        "function": {
            "name": "look_up",
            "description": "d",
            "parameters": {"type": "object", "properties": {"town": {"type": "string"}, "days": {"type": "integer"}}},
        }
    }
)
_ARGUMENTS = {"town": "Ulm", "days": 3}


def _written(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of an assistant's turn that calls a tool, with whatever the template writes behind it."""
    chat = ChatText(tokenizer)
    call = {"id": "abcdef123", "type": "function", "function": {"name": _TOOL.function.name, "arguments": _ARGUMENTS}}
    items = [Message(role="user", content="q"), Message.model_validate({"role": "assistant", "content": "", "tool_calls": [call]})]
    asked = chat.prompt(items[:1], [_TOOL])
    whole = chat.conversation(items, [_TOOL])
    return whole[len(asked) :] if whole[: len(asked)] == asked else whole


def _without(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], kept: frozenset[int]) -> list[int]:
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} | set(tokenizer.all_special_ids)
    return [token_id for token_id in token_ids if token_id not in special or token_id in kept]


def _shipped(template: Any) -> ToolForm | None:  # noqa: ANN401 - a model's file
    """The form that a tokenizer's own response template names."""
    field = template.get("fields", {}).get("tool_calls") if isinstance(template, dict) else None
    if not isinstance(field, dict):
        return None
    opens, closes = _anchor(field, "open"), _anchor(field, "close")
    if opens is None:
        return None
    region = f"(?:{opens}).*?" + (rf"(?:{closes}|\Z)" if closes else r"\Z")
    anonymous = regex.compile(r"\(\?P<\w+>")
    return ToolForm(
        name="its own",
        opens=anonymous.sub("(?:", opens),
        region=anonymous.sub("(?:", region),
        specs=({"start_anchor": "\0", "fields": {"tool_calls": field}},),
    )


def _anchor(field: dict[str, Any], name: str) -> str | None:
    literal, pattern = field.get(name), field.get(f"{name}_pattern")
    if isinstance(literal, str | list):
        return "|".join(map(regex.escape, [literal] if isinstance(literal, str) else literal))
    return pattern if isinstance(pattern, str) else None


def _flat(parsed: Any) -> Iterable[Any]:  # noqa: ANN401 - what a parser made
    """Calls one by one: a region may hold one, or a list of them."""
    for item in parsed if isinstance(parsed, list) else ():
        function = item.get("function") if isinstance(item, dict) else None
        if isinstance(item, list):
            yield from _flat(item)
        elif isinstance(function, list):
            yield from function
        else:
            yield function


def _call(function: Any) -> tuple[str, str] | None:  # noqa: ANN401 - as above
    """Name, and arguments as JSON."""
    if not isinstance(function, dict) or not isinstance(name := function.get("name"), str) or not name:
        return None
    arguments = function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return (name, arguments) if isinstance(arguments, str) else None
