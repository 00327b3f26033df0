"""What stands in `dead-letters`: foreign records with our headers behind theirs, and our own records of what became of them.

A record there is a dead letter if it has the header `headrace-error-reason`, whatever its `ce_type` says: that one is its sender's. Our
headers are one block at the end that begins with this one, so an original with headers of such names gives them back unchanged.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Literal

from pydantic import Field

from headrace.schemas.base import Record, utc_now

ERROR_REASON = "headrace-error-reason"
"""The first of our headers of a dead letter."""
ERROR_VALUE = "headrace-error-value"
"""`null`: the original had no value. The letter's own is empty where there was no key either: such a record can't be written."""


class DeadLetterResolved(Record):
    """Somebody sent a dead letter again, or decided to forget it. Stands in the letter's own partition, behind it, with its key."""

    partition: int
    """Of `dead-letters`: where the letter is."""
    offset: int
    action: Literal["retried", "dropped"]
    by: str
    """Who did it."""
    attempt: str
    """One id for each call: how an unclear commit is told from somebody else's."""
    topic: str | None = None
    """Of a retried letter: where its record stands now, and under which offset."""
    new_partition: int | None = None
    new_offset: int | None = None
    resolved_at: datetime = Field(default_factory=utc_now)


def is_dead_letter(headers: Iterable[tuple[str, bytes | None]]) -> bool:
    """Whether a record of `dead-letters` is a letter, not a record of ours about one."""
    return any(name == ERROR_REASON for name, _ in headers)


def split_headers(headers: Sequence[tuple[str, bytes]]) -> tuple[tuple[tuple[str, bytes], ...], dict[str, str]]:
    """A dead letter's headers as the original's and ours (name to text).

    Raises:
        ValueError: it is no dead letter.
    """
    ours = max((index for index, (name, _) in enumerate(headers) if name == ERROR_REASON), default=None)
    if ours is None:
        raise ValueError(f"no header {ERROR_REASON}: this is no dead letter")
    return tuple(headers[:ours]), {name: (value or b"").decode(errors="replace") for name, value in headers[ours:]}
