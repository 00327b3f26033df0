"""Pages of a list: `pageSize`, `pageToken`, `nextPageToken`.

Guarantees: a token is good for the call that gave it only, with the same other parameters; sizes above 200 are 200. A token names the row
that it comes after, so a list that grows or shrinks meanwhile repeats nothing and leaves nothing out. Gives up: that, where this very row
is deleted meanwhile.
"""

import base64
import binascii
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import orjson

from headrace.gateway.problems import ProblemError

DEFAULT_SIZE = 50
LARGEST_SIZE = 200

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Page(Generic[Row]):
    """Rows, and where the next ones are; None: these are the last."""

    rows: Sequence[Row]
    next_page_token: str | None
    total_size: int


def page(rows: Sequence[tuple[str, Row]], *, size: int | None, token: str | None, asked: Sequence[object]) -> Page[Row]:
    """One page.

    Args:
        rows: All of the list, in its order, each with its name, which is unique.
        size: Asked for; None or 0: 50.
        token: Of the page before.
        asked: The other parameters of the call, to which tokens are bound.

    Raises:
        ProblemError: 400: a negative size, or a token of another call.
    """
    if size is not None and size < 0:
        raise ProblemError(400, f"pageSize: {size}: 0 (for {DEFAULT_SIZE}) to {LARGEST_SIZE} are possible")
    size = min(size or DEFAULT_SIZE, LARGEST_SIZE)
    bound = hashlib.sha256(orjson.dumps([str(part) for part in asked])).hexdigest()[:16]
    first = _place(rows, token, bound) if token else 0
    chosen = rows[first : first + size]
    there_are_more = first + size < len(rows)
    following = _token(bound, first + size, chosen[-1][0]) if there_are_more else None
    return Page([row for _, row in chosen], following, len(rows))


def _token(bound: str, place: int, after: str) -> str:
    return base64.urlsafe_b64encode(orjson.dumps([bound, place, after])).decode().rstrip("=")


def _place(rows: Sequence[tuple[str, Row]], token: str, bound: str) -> int:
    try:
        said, place, after = orjson.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
    except (ValueError, binascii.Error, TypeError):
        raise ProblemError(400, "pageToken: no token of this gateway: take nextPageToken of the page before as it is") from None
    if said != bound or not isinstance(place, int) or place < 0:
        raise ProblemError(400, "pageToken: the token is of a call with other parameters: repeat filter, orderBy and readMask as they were")
    for index, (name, _) in enumerate(rows):
        if name == after:
            return index + 1
    return max(place - 1, 0)  # it is gone: its followers moved up by one
