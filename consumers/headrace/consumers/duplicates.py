"""The duplicate window: a group id is a duplicate if it was admitted among the model's last W groups (exactly-once rule 11).

Guarantees: the same sequence of ids gives the same answers, whenever and wherever it runs: no clock, no cache. Ids of dead letters never
enter. Gives up: ids that collide in 64 bits of SHA-256 (odds about W / 2^64 for a new id).
"""

import hashlib
from array import array
from collections import deque


class DuplicateWindow:
    """The last `size` admitted ids as 64-bit hashes.

    Args:
        size: W, in groups.
        stored: A window as `to_bytes` gave it.
    """

    def __init__(self, size: int, stored: bytes = b"") -> None:
        self._order = deque(array("Q", stored), maxlen=size)
        self._known = set(self._order)

    def seen(self, group_id: str) -> bool:
        """Whether the id was admitted within the window."""
        return _hash(group_id) in self._known

    def add(self, group_id: str) -> None:
        """Note an admitted id; the oldest one leaves when the window is full."""
        value = _hash(group_id)
        if value in self._known:
            return
        if len(self._order) == self._order.maxlen:
            self._known.discard(self._order[0])
        self._order.append(value)
        self._known.add(value)

    def to_bytes(self) -> bytes:
        """Oldest first, 8 bytes each in the host's order (little-endian on every supported one)."""
        return array("Q", self._order).tobytes()


def _hash(group_id: str) -> int:
    return int.from_bytes(hashlib.sha256(group_id.encode(errors="surrogatepass")).digest()[:8], "little")
