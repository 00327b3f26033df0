"""What a model thought before it spoke, taken out of its text, if its chat template takes thoughts apart from the content.

The template says with which marks it writes a thought (`<think>`, `</think>`). A template that takes none keeps thoughts in the content,
since a client could not send them back otherwise.

Guarantees: text cut into pieces anywhere gives what the whole text gives; a thought that the template began in the prompt, and one that was
cut off, are thoughts. Limitations: line ends around a thought are the template's; a thought in the middle of an answer stays content.
"""

import re
from functools import cached_property

from transformers import PreTrainedTokenizerBase

from headrace.engine.sampling.text_stream import beginning_of
from headrace.schemas.chat import Message
from headrace.trainer.chat_text import ChatText, ChatTextError

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
