"""Tool calls in sampled text, in the form that the model's chat template speaks (`tool_forms.py`).

Guarantees: text cut into pieces anywhere gives what the whole text gives; what does not parse stays content, unchanged. A last call that
lacks its closing mark is one all the same, if what is there is whole. Limitations: a call is not shown before it is complete.

What a model thought before it spoke, taken out of its text, if its chat template takes thoughts apart from the content.

The template says with which marks it writes a thought (`<think>`, `</think>`). A template that takes none keeps thoughts in the content,
since a client could not send them back otherwise.

Guarantees: text cut into pieces anywhere gives what the whole text gives; a thought that the template began in the prompt, and one that was
cut off, are thoughts. Limitations: line ends around a thought are the template's; a thought in the middle of an answer stays content.
"""

import logging
import re
import uuid
from collections.abc import Sequence
from functools import cached_property

import regex
from transformers import PreTrainedTokenizerBase

from headrace.engine.http.tool_forms import ToolForm, form_of, kept_ids
from headrace.engine.sampling.sampled_row import beginning_of
from headrace.schemas.chat import Message, Tool, ToolCall, ToolCallFunction
from headrace.trainer.chat_text import ChatText, ChatTextError

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


Marks = tuple[str, str]
"""What stands before a thought, and behind it."""
_STAND_IN = "headracethought91c4e2"
_WRITTEN = re.compile(rf"(<\w+>|\[\w+\])\s*{_STAND_IN}\s*(</\w+>|\[/\w+\])")


class ThoughtReader:
    """How one base model writes thoughts, found when the first answer is read.

    Args:
        tokenizer: Of the base model.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    @cached_property
    def marks(self) -> Marks | None:
        """None: the template takes no thoughts."""
        told = Message(role="assistant", content="a", reasoning=_STAND_IN)
        try:
            ids = ChatText(self.tokenizer).conversation([Message(role="user", content="q"), told], None)
        except ChatTextError:
            return None
        found = _WRITTEN.search(str(self.tokenizer.decode(ids, skip_special_tokens=False)))
        return None if found is None else (found[1], found[2])

    @cached_property
    def kept_ids(self) -> frozenset[int]:
        """Special tokens that the text must show."""
        marks = self.marks or ()
        return frozenset(i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special and str(token) in marks)

    def begun(self, prompt: list[int]) -> bool:
        """Whether a prompt ends inside a thought."""
        tail = str(self.tokenizer.decode(prompt[-8:], skip_special_tokens=False))
        return self.marks is not None and tail.rstrip().endswith(self.marks[0])


class ThoughtStream:
    """Takes text apart into thought and content.

    Args:
        marks: Of the model; None: all is content.
        begun: The prompt ends inside a thought.
    """

    def __init__(self, marks: Marks | None, *, begun: bool) -> None:
        self._open, self._close = marks or ("", "")
        self._stage = "content" if marks is None else "thought" if begun else "start"
        self._held = ""
        self._at_edge = begun
        """Nothing of this stage has passed: line ends are the template's."""

    def push(self, text: str) -> tuple[str, str]:
        """Thought and content that are certain."""
        self._held += text
        if self._stage == "start":
            begin = self._held.lstrip()
            if begin.startswith(self._open):
                self._stage, self._held, self._at_edge = "thought", begin[len(self._open) :], True
            elif not self._open.startswith(begin):
                self._stage = "content"
            else:
                return "", ""
        thought = self._take_thought() if self._stage == "thought" else ""
        return thought, self._passed(len(self._held)) if self._stage == "content" else ""

    def end(self) -> tuple[str, str]:
        """What is left."""
        rest, self._held = self._held, ""
        return (rest.rstrip("\n"), "") if self._stage == "thought" else ("", rest)

    def _take_thought(self) -> str:
        end = self._held.find(self._close)
        closed = end >= 0
        if not closed:
            end = len(self._held) - beginning_of(self._close, self._held)
        thought = self._passed(len(self._held[:end].rstrip("\n")))
        if closed:
            self._stage, self._at_edge = "content", True
            self._held = self._held[self._held.index(self._close) + len(self._close) :]
        return thought

    def _passed(self, end: int) -> str:
        text, self._held = self._held[:end], self._held[end:]
        if self._at_edge:
            text = text.lstrip("\n")
            self._at_edge = not text
        return text
