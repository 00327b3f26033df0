"""The token entries of the hosted APIs' JSON by one pass in C (`hosted_scan.c`), where it was compiled.

A group of 8 × 2,000 tokens is 1.5 MB of `{"token":"token_id:5","bytes":[…],"logprob":-0.5,"top_logprobs":[]}`. Keys in any order, white
space, nulls, and entries without `bytes` or `top_logprobs` are read too. Of a number the digits become an integer and a power of ten, and
these a double that is at most a few of its last bits away; unless the float32 next to it is the same for all that it may be, orjson reads
the number.

Guarantees: what it finds are entries as JSON has them, and their numbers are, bit for bit, those that orjson and a rounding to float32
give. The GIL is not held. Gives up: lists with an entry that is otherwise: they are left where they stand.
Shapes: E entries of all turns of the group.
"""

import ctypes
import logging
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from headrace.core.hosted_scan_build import library

logger = logging.getLogger(__name__)

_SHORTEST = len('{"token":"token_id:1","logprob":0}')
_MOST_TURNS = 1 << 16
_MOST_ODD = 1 << 12
_POINTER, _INT64 = ctypes.c_void_p, ctypes.c_int64


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A list of entries, taken out of a body."""

    start: int
    """Where its first entry begins in the body."""
    end: int
    """Where its last one ends."""
    entries: slice
    """Its part of the columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The entries of a body."""

    turns: list[Turn]
    """In the order of the body."""
    token_ids: npt.NDArray[np.int32]
    """int32[E]."""
    logprobs: npt.NDArray[np.float32]
    """float32[E]; NaN where null."""


def scan(body: bytes | memoryview) -> Columns | None:
    """The entries of a body; None where there is no compiled scanner.

    Raises:
        Exception: a number is none that float32 holds; others say what is wrong.
    """
    function = _function()
    if function is None:
        return None
    data = np.frombuffer(body, np.uint8)
    most = len(data) // _SHORTEST + 1
    token_ids, logprobs = np.empty(most, np.int32), np.empty(most, np.float32)
    most_turns = min(most, _MOST_TURNS)
    turns, odd, counts = np.empty((most_turns, 3), np.int64), np.empty((_MOST_ODD, 3), np.int64), np.zeros(2, np.int64)
    count = function(
        data.ctypes.data,
        len(data),
        token_ids.ctypes.data,
        logprobs.ctypes.data,
        most,
        turns.ctypes.data,
        most_turns,
        odd.ctypes.data,
        _MOST_ODD,
        counts.ctypes.data,
    )
    entries, odd_count = counts.tolist()
    found = []
    first = 0
    for start, end, stop in turns[:count].tolist():
        found.append(Turn(start=start, end=end, entries=slice(first, stop)))
        first = stop
    logprobs = logprobs[:entries]
    for i, start, end in odd[:odd_count].tolist():
        logprobs[i] = _float32(orjson.loads(data[start:end].tobytes()))
    return Columns(turns=found, token_ids=token_ids[:entries], logprobs=logprobs)


def _float32(value: float) -> np.float32:
    with np.errstate(over="ignore"):
        rounded = np.float32(float(value))
    if not np.isfinite(rounded):
        raise ValueError
    return rounded


@cache
def _function() -> Any:  # noqa: ANN401 - a function of ctypes
    try:
        function = ctypes.CDLL(str(library())).headrace_hosted_scan
    except (OSError, AttributeError) as error:
        logger.info("hosted JSON is read by numpy, five times as slow: `python -m headrace.core.hosted_scan_build` compiles it (%s)", error)
        return None
    function.restype = _INT64
    function.argtypes = [_POINTER, _INT64, _POINTER, _POINTER, _INT64, _POINTER, _INT64, _POINTER, _INT64, _POINTER]
    return function
