"""The token entries of the hosted APIs' JSON by numpy, where `hosted_scan.py` has nothing compiled.

To parse them as JSON takes several times as long as all the rest of admission, and ten times their size in memory. Entries as servers
write them differ in their digits only: their other bytes are compared eight at a time, and their numbers are copied out into one plain
list.

Guarantees: what it finds are entries as JSON has them, with the numbers that orjson reads; it raises where anything is not just so (other
keys, white space, text tokens, alternatives). Gives up: token ids of more than 7 digits.
Shapes: E entries of all turns of the group.
"""

from array import array
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import orjson

from headrace.core.hosted_scan import Columns, Turn

Positions = npt.NDArray[np.int64]

_ENTRY = b'{"token":"token_id:'
_LAST = b',"top_logprobs":[]}'
_ID_BYTES, _NUMBER_BYTES, _MOST_BYTES = 8, 32, 256
_MARGIN = 512
_OWN = np.array([(1 << 8 * n) - 1 for n in range(9)], np.uint64)
"""The first n of eight bytes."""
_SPACES = np.uint64(0x2020202020202020)
_ZEROS = np.uint64(0x3030303030303030)
_PAIRS = np.uint64(0x000000FF000000FF)
_LOW, _HIGH = np.uint64(0x0101010101010101), np.uint64(0x8080808080808080)


class OtherwiseError(Exception):
    """Something is not as it mostly is."""


def find_columns(body: bytes | memoryview) -> Columns:
    """The entries of a body.

    Raises:
        Exception: anything is not just so.
    """
    if len(body) < _MARGIN:
        raise OtherwiseError
    # What follows an entry is looked at in words: behind the last one of a body there is white space, which JSON allows.
    padded = b"".join((body, b" " * _MARGIN))
    found = _found(padded)
    token_ids, logprobs = _columns(padded, found)
    turns = [
        Turn(start=int(found.starts[first]), end=int(found.ends[stop - 1]) + 1, entries=slice(first, stop)) for first, stop in found.turns
    ]
    return Columns(turns=turns, token_ids=token_ids, logprobs=logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entries:
    """Where the entries are."""

    starts: Positions
    """int64[E]: of each entry's brace."""
    ends: Positions
    """int64[E]: of its closing one."""
    turns: list[tuple[int, int]]
    """The entries of each turn, as [first, last + 1)."""


def need(fine: object) -> None:
    """Go on only with what is as it mostly is.

    Raises:
        OtherwiseError: it is not.
    """
    if not fine:
        raise OtherwiseError


def _found(body: bytes) -> _Entries:
    """Entries are objects that follow each other: `[{…},{…}]` behind `"content":`."""
    bytes_ = np.frombuffer(body, np.uint8)
    braces = np.flatnonzero(bytes_ == ord("{"))
    braces = braces[(braces > _MARGIN // 8) & (braces < len(body) - _MARGIN)]
    word = _words(body)
    entry = _is(word, braces, _ENTRY)
    follows = entry & (bytes_[braces - 1] == ord(",")) & (bytes_[braces - 2] == ord("}"))
    others = np.flatnonzero(entry & ~follows)
    firsts = others[_is(word, braces[others] - 11, b'"content":[')]
    need(len(firsts))
    breaks = np.flatnonzero(~follows)
    stops = np.append(breaks, len(braces))[np.searchsorted(breaks, firsts, side="right")]
    starts = [braces[first:stop] for first, stop in zip(firsts, stops, strict=True)]
    ends = []
    for turn in starts:
        last = body.find(b"}]", turn[-1], turn[-1] + _MARGIN)
        need(last > 0)
        ends += [turn[1:] - 2, np.array([last])]
    bounds = np.cumsum([0, *map(len, starts)]).tolist()
    return _Entries(starts=np.concatenate(starts), ends=np.concatenate(ends), turns=list(pairwise(bounds)))


def _columns(body: bytes, entries: _Entries) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Token ids int32[E] and log-probabilities float32[E]."""
    word = _words(body)
    digits = entries.starts + len(_ENTRY)
    behind_id = _find(word, digits, b'"', 1)
    tail = entries.ends + 1 - len(_LAST)
    need(_is(word, tail, _LAST).all())
    if _is(word, behind_id[:1], b'","bytes":[').all():  # as OpenAI's client orders the keys
        need(_is(word, behind_id, b'","bytes":[').all())
        inside = behind_id + 11
        behind_bytes = _find(word, inside, b"]", _MOST_BYTES // 8)
        need(_is(word, behind_bytes, b'],"logprob":').all())
        number, behind_number = behind_bytes + 12, tail
    else:  # as vLLM does
        need(_is(word, behind_id, b'","logprob":').all())
        number = behind_id + 12
        behind_number = _find(word, number, b",", _NUMBER_BYTES // 8)
        need(_is(word, behind_number, b',"bytes":[').all())
        inside, behind_bytes = behind_number + 10, tail - 1
        need(_is(word, behind_bytes, b'],"top_lo').all())
    _check_bytes(word, inside, behind_bytes - inside)
    return _ids(word, digits, behind_id - digits), _numbers(word, number, behind_number - number)


def _words(body: bytes) -> npt.NDArray[np.uint64]:
    """The eight bytes at every place of a body, as a view."""
    return np.ndarray((len(body) - 7,), "<u8", body, strides=(1,))


def _is(word: npt.NDArray[np.uint64], at: Positions, text: bytes) -> npt.NDArray[np.bool_]:
    """Whether a text of at least 8 bytes stands at each place."""
    fits = np.ones(len(at), np.bool_)
    for i in {*range(0, len(text) - 7, 8), len(text) - 8}:
        fits &= word[at + i] == np.frombuffer(text, "<u8", 1, i)[0]
    return fits


def _find(word: npt.NDArray[np.uint64], at: Positions, byte: bytes, words: int) -> Positions:
    """The next place with a byte, from each place on, within so many words."""
    wanted = _LOW * np.uint64(byte[0])
    skipped = _skipped(word[at] ^ wanted)
    found = at + skipped
    left = np.flatnonzero(skipped == 8)
    for _ in range(1, words):
        if len(left) == 0:
            return found
        skipped = _skipped(word[found[left]] ^ wanted)
        found[left] += skipped
        left = left[skipped == 8]
    if len(left) == 0:
        return found
    raise OtherwiseError


def _skipped(other: npt.NDArray[np.uint64]) -> Positions:
    """How many bytes of each word stand before its first that is zero; 8 where none is."""
    zero = (other - _LOW) & ~other & _HIGH  # the lowest bit that is set belongs to the first
    skipped: Positions = np.bitwise_count((zero & (~zero + np.uint64(1))) - np.uint64(1)).astype(np.int64) >> 3
    return skipped


def _texts(word: npt.NDArray[np.uint64], at: Positions, lengths: Positions, width: int) -> npt.NDArray[np.uint8]:
    """uint8[E, width]: what stands at each place, spaces behind it."""
    need((lengths >= 0).all() and (lengths < width).all())
    texts = np.empty((len(at), width // 8), np.uint64)
    for i in range(width // 8):
        own = _OWN[np.clip(lengths - 8 * i, 0, 8)]
        texts[:, i] = (word[at + 8 * i] & own) | (_SPACES & ~own)
    return texts.view(np.uint8)


def _ids(word: npt.NDArray[np.uint64], at: Positions, lengths: Positions) -> npt.NDArray[np.int32]:
    texts = _texts(word, at, lengths, _ID_BYTES).view("<u8")[:, 0]
    need((lengths > 0).all() and not (texts & _HIGH).any() and (_digits(texts) == _OWN[lengths] & _LOW).all())
    # Digits to the right, zeros before them; then pairs of digits, and two and two of those.
    ones = (texts << (8 * (_ID_BYTES - lengths)).astype(np.uint64)) & np.uint64(0x0F0F0F0F0F0F0F0F)
    pairs = ones * np.uint64(10) + (ones >> np.uint64(8))
    outer = (pairs & _PAIRS) * np.uint64(100 + (1_000_000 << 32))
    inner = ((pairs >> np.uint64(16)) & _PAIRS) * np.uint64(1 + (10_000 << 32))
    return ((outer + inner) >> np.uint64(32)).astype(np.int32)


def _numbers(word: npt.NDArray[np.uint64], at: Positions, lengths: Positions) -> npt.NDArray[np.float32]:
    """JSON says what is a number, and which: they are read as one list, with the spaces that JSON allows."""
    longest = int(lengths.max())
    need((lengths > 0).all() and longest < _NUMBER_BYTES)
    texts = _texts(word, at, lengths, 8 * (longest // 8 + 1))
    texts[:, -1] = ord(",")
    # What is made of these is a number, a list of numbers, or no JSON.
    need((((texts >= ord("+")) & (texts <= ord("9"))) | ((texts | np.uint8(32)) == ord("e")) | (texts == ord(" "))).all())
    texts[-1, -1] = ord(" ")
    values = array("d", orjson.loads(b"[" + texts.tobytes() + b"]"))
    need(len(values) == len(at))
    with np.errstate(over="ignore"):
        numbers = np.frombuffer(values, np.float64).astype(np.float32)
    need(np.isfinite(numbers).all())
    return numbers


def _check_bytes(word: npt.NDArray[np.uint64], at: Positions, lengths: Positions) -> None:
    """Numbers with commas between them, as JSON wants them. Nobody reads them, and a group with others is no JSON."""
    need((lengths >= 0).all() and (lengths < _MOST_BYTES).all())
    shortest = 0
    while shortest < _MOST_BYTES:  # mostly all are short: what is longer than twice as long is looked at apart
        longest = max(16, 2 * shortest)
        chosen = (lengths >= shortest) & (lengths < longest)
        if chosen.all():
            _check_digits(word, at, lengths, longest // 8)
            return
        if chosen.any():
            _check_digits(word, at[chosen], lengths[chosen], longest // 8)
        shortest = longest


def _check_digits(word: npt.NDArray[np.uint64], at: Positions, lengths: Positions, words: int) -> None:
    """Looks at eight bytes at once: flags in the lowest bit of each byte."""
    begins: npt.NDArray[np.uint64] | np.uint64 = np.uint64(1)  # a number begins there: behind a comma, or in front
    zero_begun: npt.NDArray[np.uint64] | np.uint64 = np.uint64(0)
    empty = (lengths == 0).astype(np.uint64)
    for i in range(words):
        own = _OWN[np.clip(lengths - 8 * i, 0, 8)]
        text = (word[at + 8 * i] & own) | (_SPACES & ~own)
        need(not (text & _HIGH).any())
        digit = _digits(text)
        comma = _equal(text, ord(","))
        need(((digit | comma) == own & _LOW).all())
        starts = (comma << np.uint64(8)) | begins
        zeros = starts & _equal(text, ord("0"))
        lone = zeros << np.uint64(8) | zero_begun
        need(not (starts & ~digit & ~(empty if i == 0 else np.uint64(0))).any())
        need(not (lone & digit).any())
        begins = comma >> np.uint64(56)
        zero_begun = zeros >> np.uint64(56)
    need(not np.any(begins))


def _digits(text: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Which bytes, all below 128, are digits: 0 to 9 add up to less than 128 with 118."""
    return ~(((text ^ _ZEROS) + _LOW * np.uint64(118)) >> np.uint64(7)) & _LOW


def _equal(text: npt.NDArray[np.uint64], byte: int) -> npt.NDArray[np.uint64]:
    """Which bytes, all below 128, are this one."""
    other = text ^ (_LOW * np.uint64(byte))
    return ~((other + _LOW * np.uint64(127)) >> np.uint64(7)) & _LOW
