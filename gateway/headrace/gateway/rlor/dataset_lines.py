"""Lines of a dataset: JSONL split into lines, and the form of a line in each format.

A byte order mark at the beginning and empty lines are ignored. A line may end in CRLF, and the last one needs no line end. Guarantees:
memory holds one line at most, of at most `MAX_LINE_BYTES`. A line that could hold more than `MAX_LINE_VALUES` values is not parsed, so that
parsing never holds the interpreter for more than a fraction of a second. A fault names the place and the line, counted from 1 with the
empty ones. Limitations: only the first fault is named; brackets and commas inside texts count as values too.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headrace.core.errors import HeadraceError
from headrace.schemas.chat import Message, Tool
from headrace.schemas.parsing import load_json, validate
from headrace.schemas.reasons import CodecError
from headrace.schemas.rlor import DatasetFormat

MAX_LINE_BYTES = 16 * 1024 * 1024
MAX_LINE_VALUES = 500_000
_BOM = b"\xef\xbb\xbf"


class DatasetFaultError(HeadraceError):
    """A file that cannot be part of a dataset; the message has the line and the fault."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line that is not empty, without its end. Raises `DatasetFaultError` if it could hold more than `MAX_LINE_VALUES` values."""

    number: int
    """From 1, with the empty ones."""
    text: bytes
    ended: bool
    """Whether a line end follows; only the last line may have none."""

    def __post_init__(self) -> None:
        # Each value of an object or array has a bracket or a comma before it.
        if sum(self.text.count(mark) for mark in (b"{", b"[", b",")) > MAX_LINE_VALUES:
            raise DatasetFaultError(
                f"line {self.number} holds more than {MAX_LINE_VALUES} brackets and commas: split it into several lines"
            )


class _Example(BaseModel):
    model_config = ConfigDict(extra="allow", allow_inf_nan=False, protected_namespaces=())


class ChatLine(_Example):
    """A line of format CHAT: a conversation to imitate."""

    messages: list[Message] = Field(min_length=1)
    tools: list[Tool] | None = None

    @model_validator(mode="after")
    def _is_trainable(self) -> Self:
        role = self.messages[-1].role
        if role != "assistant":
            raise ValueError(f"messages: the last one is of {role}: the answer to train on, of assistant, must be the last")
        return self


class RlSample(ChatLine):
    """One answer to a prompt: its conversation and its scores. Other keys are allowed."""

    evals: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _has_metrics(self) -> Self:
        for name, value in (self.evals or {}).items():
            if not _is_number(value):
                raise ValueError(f"evals.{name}: a metric is a JSON number, not {type(value).__name__}")
        if not self.metrics:
            raise ValueError('no metric: give numbers in `evals`, such as {"score": 0.5}, or next to `messages`')
        return self

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics by name: those in `evals`; if it has none, the other numbers of the sample."""
        numbers = {name: value for name, value in (self.model_extra or {}).items() if _is_number(value)}
        return {name: float(value) for name, value in (self.evals or numbers).items()}


class RlLine(_Example):
    """A line of format RL: the answers to one prompt."""

    samples: list[RlSample] = Field(min_length=2)


class CompletionLine(_Example):
    """A line of format COMPLETION."""

    prompt: str
    completion: str = Field(min_length=1)


_EXAMPLES: dict[DatasetFormat, type[RlLine | ChatLine | CompletionLine]] = {"RL": RlLine, "CHAT": ChatLine, "COMPLETION": CompletionLine}
_FORMAT_KEYS: dict[str, DatasetFormat] = {"samples": "RL", "messages": "CHAT", "prompt": "COMPLETION"}


def split_lines(chunks: Iterable[bytes]) -> Iterator[Line]:
    """The lines that are not empty. Raises DatasetFaultError (a line above `MAX_LINE_BYTES`)."""
    begun: list[bytes] = []
    number, size = 1, 0
    for chunk in chunks:
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            yield from _line(number, b"".join((*begun, end)), ended=True)
            number, size = number + 1, 0
            begun.clear()
        begun.append(rest)
        size += len(rest)
        if size > MAX_LINE_BYTES:
            raise DatasetFaultError(f"line {number} has more than {MAX_LINE_BYTES} bytes: are there line ends (\\n) in the file?")
    yield from _line(number, b"".join(begun), ended=False)


def read_line(line: Line, format: DatasetFormat) -> RlLine | ChatLine | CompletionLine:  # noqa: A002 - the API's word
    """The example on a line. Raises DatasetFaultError (the line is not of this format)."""
    value = _parse(line)
    try:
        return validate(_EXAMPLES[format], value)
    except CodecError as error:
        raise DatasetFaultError(f"line {line.number}: {error}") from error


def infer_format(line: Line) -> DatasetFormat:
    """The format of a line. Raises DatasetFaultError (no format has such a line)."""
    found = _parse(line)
    if isinstance(found, dict):
        for key, format in _FORMAT_KEYS.items():  # noqa: A001 - as above
            if key in found:
                return format
    raise DatasetFaultError(
        f"line {line.number} is no example: an object with `samples` (RL), `messages` (CHAT) or `prompt` (COMPLETION) is needed"
    )


def _line(number: int, text: bytes, *, ended: bool) -> Iterator[Line]:
    if number == 1:
        text = text.removeprefix(_BOM)
    if text := text.strip():
        yield Line(number, text, ended)


def _parse(line: Line) -> Any:  # noqa: ANN401 - raw JSON
    try:
        return load_json(line.text)
    except CodecError as error:
        cut_off = "" if line.ended else ". It is the last line, and has no line end: was the file cut off?"
        raise DatasetFaultError(f"line {line.number}: {error}{cut_off}") from error


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
