"""Text of tokens as they come, and where it must wait.

Guarantees: the pieces put together are the whole text, however it was cut; no piece holds half of a character; what may be the beginning of
a stop string is held back until it is known. Limitations: tokenizers whose decoding of a token depends on what comes later.
"""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
_HALF = "\ufffd"
"""What a tokenizer writes for bytes that are no whole character yet."""


class TextStream:
    """Turns tokens to text one by one.

    Args:
        decode: Token ids to text.
        stops: Strings that end the text; they are no part of it.
    """

    def __init__(self, decode: Decode, stops: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stops = tuple(stops)
        self._ids: list[int] = []
        self._from = 0  # what is decoded begins here: the token before is needed to know whether a blank stands between
        self._shown = ""  # the text of what was decoded last
        self._held = ""
        self.stopped_by: str | None = None
        """The stop string that was met."""

    def push(self, token_id: int) -> str:
        """The text that one more token adds, as far as it is certain."""
        self._ids.append(token_id)
        text = self._decode(self._ids[self._from :])
        if text.endswith(_HALF) or len(text) <= len(self._shown):
            return ""
        added = text[len(self._shown) :]
        self._from = max(self._from, len(self._ids) - 1)
        self._shown = self._decode(self._ids[self._from :])
        return self._let_through(added)

    def end(self) -> str:
        """What was held back."""
        if self.stopped_by is not None:
            return ""
        rest = self._held + self._decode(self._ids[self._from :])[len(self._shown) :]
        self._held = ""
        return self._cut(rest)

    def _let_through(self, added: str) -> str:
        text = self._cut(self._held + added)
        kept = 0 if self.stopped_by is not None else max((beginning_of(stop, text) for stop in self._stops), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def _cut(self, text: str) -> str:
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if not found:
            return text
        where, self.stopped_by = min(found)
        return text[:where]


def beginning_of(mark: str, text: str) -> int:
    """How many characters at the end of a text are the beginning of the mark; never all of the mark."""
    return next((length for length in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:length])), 0)
