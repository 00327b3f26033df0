"""Tool calls in sampled text, in the form that the model's chat template speaks (`tool_forms.py`).

Guarantees: text cut into pieces anywhere gives what the whole text gives; what does not parse stays content, unchanged. A last call that
lacks its closing mark is one all the same, if what is there is whole. Limitations: a call is not shown before it is complete.
"""

import logging
import uuid
from collections.abc import Sequence
from functools import cached_property

import regex
from transformers import PreTrainedTokenizerBase

from headrace.engine.http.tool_forms import ToolForm, form_of, kept_ids
from headrace.schemas.chat import Tool, ToolCall, ToolCallFunction

logger = logging.getLogger(__name__)


class ToolCallReader:
    """What one base model's calls look like, found when a request first offers tools.

    Args:
        tokenizer: Of the base model.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    @cached_property
    def form(self) -> ToolForm:
        """The form; if it is not known, a warning says so once."""
        form, unknown = form_of(self.tokenizer)
        if unknown is not None:
            logger.warning("tools are offered, but %s: calls in another form than %s stay in the content", unknown, form.name)
        return form

    @cached_property
    def kept_ids(self) -> frozenset[int]:
        """Special tokens that the text must show."""
        return kept_ids(self.tokenizer, self.form)

    def parse(self, text: str, tools: Sequence[Tool]) -> tuple[str, list[ToolCall]]:
        """What is left as content, and the calls."""
        calls: list[ToolCall] = []

        def take(match: "regex.Match[str]") -> str:
            found = self.form.calls(match.group(), tools, self.tokenizer)
            calls.extend(
                ToolCall(id=f"call_{uuid.uuid4().hex[:24]}", function=ToolCallFunction(name=name, arguments=arguments))
                for name, arguments in found
            )
            return "" if found else match.group()

        content = regex.sub(self.form.region, take, text, flags=regex.DOTALL)
        # White space around calls is the template's, not the model's words.
        return (content.rstrip() if calls else content), calls


class ToolCallStream:
    """The same for text that comes in pieces: content goes through until a call may begin; from there on all is kept to the end.

    Args:
        reader: Of the base model.
        tools: That were offered.
    """

    def __init__(self, reader: ToolCallReader, tools: Sequence[Tool]) -> None:
        self._reader, self._tools = reader, tools
        self._opens = regex.compile(reader.form.opens, regex.DOTALL)
        self._text = ""
        self._passed = 0

    def push(self, text: str) -> str:
        """What is content for certain."""
        self._text += text
        match = self._opens.search(self._text, self._passed, partial=True)
        end = len(self._text) if match is None else match.start()
        # White space before a call is no content.
        end = self._passed + len(self._text[self._passed : end].rstrip())
        begin, self._passed = self._passed, end
        return self._text[begin:end]

    def end(self) -> tuple[str, list[ToolCall]]:
        """What is left: content, and the calls."""
        return self._reader.parse(self._text[self._passed :], self._tools)
