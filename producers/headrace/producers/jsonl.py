"""Groups from a file with one JSON group a line, in the hosted API's form or in our compact one.

Guarantees: a bad line is named (number, field, reason) and the next one is read; memory is bounded by the longest line. Blank lines
are skipped. Limitations: a line above `MAX_LINE_BYTES`, which no reader of the log would take.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

from headrace.core.payloads import MAX_RAW_BYTES
from headrace.schemas.codec import SampledGroup, decode_group
from headrace.schemas.errors import CodecError

MAX_LINE_BYTES = MAX_RAW_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodLine:
    """A line that holds a group."""

    number: int
    """From 1."""
    end: int
    """Bytes of the file up to and with this line."""
    group: SampledGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class BadLine:
    """A line that holds none, and why."""

    number: int
    end: int
    path: str
    detail: str


def read_groups(
    stream: BinaryIO, max_line: int = MAX_LINE_BYTES, decode: Callable[[bytes], SampledGroup] = decode_group
) -> Iterator[GoodLine | BadLine]:
    """Every line that is not blank, in order.

    Args:
        stream: Lines.
        max_line: Bytes.
        decode: What a line is; raises CodecError where it is none.
    """
    number = end = 0
    while line := stream.readline(max_line + 1):
        number += 1
        end += len(line)
        if len(line) > max_line:
            while not line.endswith(b"\n") and (line := stream.readline(max_line)):
                end += len(line)
            yield BadLine(number=number, end=end, path="", detail=f"longer than {max_line} bytes")
        elif line.strip():
            try:
                yield GoodLine(number=number, end=end, group=decode(line))
            except CodecError as error:
                yield BadLine(number=number, end=end, path=error.path, detail=error.detail)
