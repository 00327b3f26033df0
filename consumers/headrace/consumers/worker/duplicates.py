"""The duplicate window: a group id is a duplicate if it was admitted among the model's last W groups.

A snapshot holds the window of its time. The model's state lists the ids admitted since, so that any owner has the same window.

Guarantees: the same sequence of ids gives the same answers, at any time and on any machine: no clock, no cache. Ids of dead letters never
enter. Limitations: ids that collide in 64 bits of SHA-256 (odds about W / 2^64 for a new id). Where more than `LISTED` groups are admitted
between two snapshots, the window forgets the oldest of them, which a state could not list (the bounded-records invariant).
"""

import base64
import hashlib
import sys
from array import array
from collections import deque
from collections.abc import Iterable
from itertools import islice

LISTED = 20_000
"""Ids since the snapshot that a state lists, at most: 213 kB. A snapshot is due long before; only groups that never train come so far."""


class DuplicateWindow:
    """The last `size` admitted ids as 64-bit hashes."""

    def __init__(self, size: int, stored: bytes = b"", since: str = "") -> None:
        self._order = deque(_hashes(stored), maxlen=size)
        self._known = set(self._order)
        self._since: deque[int] = deque()
        self._unlisted = 0
        """How many ids admitted since the snapshot `_since` no longer lists: the oldest ones."""
        self.add_listed(since)

    def contains(self, group_id: str) -> bool:
        """Whether the id was admitted within the window."""
        return _hash(group_id) in self._known

    def add(self, group_id: str) -> None:
        """Note an admitted id; the oldest one leaves when the window is full."""
        self._add(_hash(group_id))

    def add_listed(self, since: str) -> None:
        """Note the ids that a state lists."""
        for value in _hashes(base64.b64decode(since)):
            self._add(value)

    def _add(self, value: int) -> None:
        if value in self._known:
            return
        if len(self._order) == self._order.maxlen:
            self._known.discard(self._order[0])
        self._order.append(value)
        self._known.add(value)
        self._since.append(value)
        if len(self._since) > LISTED:
            # It leaves the window, too: a later owner would not know it.
            oldest = self._since.popleft()
            self._unlisted += 1
            if oldest in self._known:
                self._known.discard(oldest)
                self._order.remove(oldest)

    def to_bytes(self) -> bytes:
        """For a snapshot: oldest first, 8 bytes each, little-endian."""
        return _bytes(self._order)

    @property
    def since(self) -> int:
        """Ids admitted since the snapshot."""
        return self._unlisted + len(self._since)

    def since_text(self, first: int = 0) -> str:
        """For the model's state: the ids admitted since the snapshot, without the first so many."""
        return base64.b64encode(_bytes(islice(self._since, max(0, first - self._unlisted), None))).decode()

    def snapshot_committed(self, ids: int) -> None:
        """A snapshot is committed that holds the first so many of the ids admitted since the one before."""
        for _ in range(ids - self._unlisted):
            self._since.popleft()
        self._unlisted = max(0, self._unlisted - ids)


def _hash(group_id: str) -> int:
    return int.from_bytes(hashlib.sha256(group_id.encode(errors="surrogatepass")).digest()[:8], "little")


def _bytes(values: Iterable[int]) -> bytes:
    found = array("Q", values)
    if sys.byteorder == "big":
        found.byteswap()
    return found.tobytes()


def _hashes(stored: bytes) -> "array[int]":
    found = array("Q", stored)
    if sys.byteorder == "big":
        found.byteswap()
    return found
