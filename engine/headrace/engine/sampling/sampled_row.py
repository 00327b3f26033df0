"""One row of a batch while it is sampled: its tokens, its text, and when it ends.

Guarantees: a row is the same whether it is asked for in pieces or at its end; every token that was drawn is handed out once, the stop token
and those of a stop string included: they were sampled, so they are trained on. Lives in the engine's thread, but for `give_up`.

Text of tokens as they come, and where it must wait.

Guarantees: the pieces put together are the whole text, however it was cut; no piece holds half of a character; what may be the beginning of
a stop string is held back until it is known. Limitations: tokenizers whose decoding of a token depends on what comes later.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from headrace.engine.sampling.decoding import Alternatives, RowDraw

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRequest:
    """What is asked for of a row."""

    prompt: tuple[int, ...]
    draw: RowDraw
    max_tokens: int
    stop_ids: frozenset[int]
    stops: tuple[str, ...] = ()
    alternatives: int = 0
    """Most probable tokens that are told of each place."""
    in_pieces: bool = False
    """Hand out each token as it is drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPiece:
    """What came since the piece before; the three lists have one entry a token."""

    index: int
    """Of the row in its request."""
    text: str
    token_ids: list[int]
    logprobs: list[float]
    alternatives: list[Alternatives]
    finish: Literal["stop", "length"] | None
    """None: the row continues."""
    stopped_by: str | None = None
    """The stop string that ended it."""


class SampledRow:
    """A row.

    Args:
        request: What was asked for.
        index: Of the row in its request.
        decode: Token ids to text.
        emit: Takes the pieces, in the engine's thread.
    """

    def __init__(self, request: RowRequest, index: int, decode: Decode, emit: Callable[[RowPiece], None]) -> None:
        self.request = request
        self.index = index
        self._emit = emit
        self._text = TextStream(decode, request.stops)
        self._waiting: list[tuple[int, float, Alternatives]] = []
        self._said = ""
        self._count = 0
        self._given_up = False
        self.ended = False

    def give_up(self) -> None:
        """No one waits for it any more: it ends at its next token. From any thread."""
        self._given_up = True

    @property
    def wanted(self) -> bool:
        """Whether someone still waits for it."""
        return not self._given_up and not self.ended

    def take(self, token_id: int, logprob: float, alternatives: Alternatives) -> bool:
        """One more token; whether the row ends with it."""
        if self._given_up:
            self.ended = True
            return True
        self._count += 1
        self._waiting.append((token_id, logprob, alternatives[: self.request.alternatives]))
        self._said += self._text.push(token_id)
        stopped = token_id in self.request.stop_ids or self._text.stopped_by is not None
        self.ended = stopped or self._count >= self.request.max_tokens
        if self.ended:
            self._said += self._text.end()
            self._hand_out("stop" if stopped or self._text.stopped_by is not None else "length")
        elif self.request.in_pieces:
            self._hand_out(None)
        return self.ended

    def _hand_out(self, finish: Literal["stop", "length"] | None) -> None:
        self._emit(
            RowPiece(
                index=self.index,
                text=self._said,
                token_ids=[token_id for token_id, _, _ in self._waiting],
                logprobs=[logprob for _, logprob, _ in self._waiting],
                alternatives=[alternatives for _, _, alternatives in self._waiting],
                finish=finish,
                stopped_by=self._text.stopped_by,
            )
        )
        self._waiting, self._said = [], ""
