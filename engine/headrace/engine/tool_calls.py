"""Tool calls in sampled text: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Qwen's and Hermes' templates have them.

Guarantees: text cut into pieces anywhere gives what the whole text gives; what does not parse stays content, unchanged. A last call that
lacks its closing tag is one all the same, if its JSON is whole. Gives up: other forms of calls, and showing a call before it is complete.
"""

import json
import re
import uuid

from headrace.consumers.sampling.text_stream import beginning_of
from headrace.schemas.chat import ToolCall, ToolCallFunction

_OPEN = "<tool_call>"
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def parse_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """What is left as content, and the calls."""
    calls: list[ToolCall] = []

    def take(match: re.Match[str]) -> str:
        call = _call(match.group(1))
        if call is None:
            return match.group()
        calls.append(call)
        return ""

    content = _CALL.sub(take, text)
    # White space around calls is the template's, not the model's words.
    return (content.rstrip() if calls else content), calls


class ToolCallStream:
    """The same for text that comes in pieces: content goes through until a call may begin; from there on all is kept to the end."""

    def __init__(self) -> None:
        self._kept = ""

    def push(self, text: str) -> str:
        """What is content for certain."""
        self._kept += text
        start = self._kept.find(_OPEN)
        if start < 0:
            start = len(self._kept) - beginning_of(_OPEN, self._kept)
        # White space before a call is no content.
        start = len(self._kept[:start].rstrip())
        passed, self._kept = self._kept[:start], self._kept[start:]
        return passed

    def end(self) -> tuple[str, list[ToolCall]]:
        """What is left: content, and the calls."""
        rest, self._kept = self._kept, ""
        return parse_tool_calls(rest)


def _call(text: str) -> ToolCall | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get("arguments", {})
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if not isinstance(arguments, str):
        return None
    return ToolCall(id=f"call_{uuid.uuid4().hex[:24]}", function=ToolCallFunction(name=value["name"], arguments=arguments))
