"""What stands in `dead-letters`: foreign records with our headers behind theirs, and our own records of what became of them.

A record there is a dead letter if it has the header `headrace-error-reason`, whatever its `ce_type` says: that one is its sender's. Our
headers are one block at the end that begins with this one, so an original with headers of such names gives them back unchanged.

A letter always fits into the topic. If the original is larger than `WHOLE_BYTES`, the letter has the beginnings of its parts, and our
headers have its sizes and its digest: the record itself is where it was, until retention takes it.
"""

import hashlib
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Literal

from pydantic import Field

from headrace.schemas.base import Record, utc_now

ERROR_REASON = "headrace-error-reason"
"""The first of our headers of a dead letter."""
ERROR_VALUE = "headrace-error-value"
"""`null`: the original had no value. The letter's own is empty where there was no key either: such a record can't be written."""

ERROR_SHA256 = "headrace-error-sha256"
"""Of a letter that is cut: `record_digest` of the original. A letter without it has all of the original."""
ERROR_KEY_BYTES = "headrace-error-key-bytes"
ERROR_VALUE_BYTES = "headrace-error-value-bytes"
ERROR_HEADERS = "headrace-error-headers"
"""How many the original has."""

WHOLE_BYTES = 1_500_000
"""Key, value and headers of a record that its letter has untouched: with our headers it is below the topic's `max.message.bytes`."""
CUT_KEY_BYTES, CUT_VALUE_BYTES, CUT_HEADER_BYTES = 1024, 64 * 1024, 16 * 1024
"""What a letter that is cut has of each."""
_HEADER_BYTES = 10
"""Of a header next to its name and value, at most."""

Headers = Sequence[tuple[str, bytes | None]]


class DeadLetterResolved(Record):
    """Someone sent a dead letter again, or decided to forget it. Stands in the letter's own partition, behind it, with its key."""

    partition: int
    """Of `dead-letters`: where the letter is."""
    offset: int
    action: Literal["retried", "dropped"]
    by: str
    """Who did it."""
    attempt: str
    """One id for each call: how an unclear commit is told from another's."""
    topic: str | None = None
    """Of a retried letter: where its record stands now, and under which offset."""
    new_partition: int | None = None
    new_offset: int | None = None
    resolved_at: datetime = Field(default_factory=utc_now)


def is_dead_letter(headers: Iterable[tuple[str, bytes | None]]) -> bool:
    """Whether a record of `dead-letters` is a letter, not a record of Headrace about one."""
    return any(name == ERROR_REASON for name, _ in headers)


def record_bytes(key: bytes | None, value: bytes | None, headers: Headers) -> int:
    """What a record needs, at most."""
    return len(key or b"") + len(value or b"") + sum(map(_header_bytes, headers))


def first_headers(headers: Headers) -> Headers:
    """The first ones of a record, as many as a letter that is cut has room for."""
    kept: list[tuple[str, bytes | None]] = []
    size = 0
    for header in headers:
        size += _header_bytes(header)
        if size > CUT_HEADER_BYTES:
            break
        kept.append(header)
    return kept


def record_digest(key: bytes | None, value: bytes | None, headers: Headers) -> str:
    """SHA-256 of a record, in hex: of each part its length and its bytes, -1 where there is none."""
    digest = hashlib.sha256()
    for part in (key, value, *(part for name, content in headers for part in (name.encode(), content))):
        digest.update(b"%d:" % (-1 if part is None else len(part)))
        digest.update(part or b"")
    return digest.hexdigest()


def _header_bytes(header: tuple[str, bytes | None]) -> int:
    return len(header[0].encode()) + len(header[1] or b"") + _HEADER_BYTES


def split_headers(headers: Sequence[tuple[str, bytes]]) -> tuple[tuple[tuple[str, bytes], ...], dict[str, str]]:
    """A dead letter's headers as the original's and ours (name to text).

    Raises:
        ValueError: it is no dead letter.
    """
    ours = max((index for index, (name, _) in enumerate(headers) if name == ERROR_REASON), default=None)
    if ours is None:
        raise ValueError(f"no header {ERROR_REASON}: this is no dead letter")
    return tuple(headers[:ours]), {name: (value or b"").decode(errors="replace") for name, value in headers[ours:]}
