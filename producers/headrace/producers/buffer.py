"""A bound in bytes on what waits for its acknowledgement; aiokafka itself has none (40 sends of 5 MB grow a process by 300 MB).

Guarantees: first come, first served; something larger than the whole buffer waits until the buffer is empty and then goes alone,
so that it can't deadlock; a cancelled wait takes nothing. For one event loop only.
"""

import asyncio
from collections import deque


class ByteBuffer:
    """Counts bytes in, lets them out.

    Args:
        capacity: Bytes.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._used = 0
        self._waiters: deque[tuple[asyncio.Future[None], int]] = deque()

    @property
    def used(self) -> int:
        """Bytes held now; above the capacity only while one oversized thing is alone, or grew while it was encoded."""
        return self._used

    def try_take(self, size: int) -> bool:
        """Take bytes if there is room and no one waits."""
        if self._waiters or not self._fits(size):
            return False
        self._used += size
        return True

    async def take(self, size: int) -> None:
        """Take bytes, waiting for room."""
        if self.try_take(size):
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((granted, size))
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.give_back(size)  # granted in the same moment
            else:
                self._grant()  # a smaller one behind may fit now
            raise

    def give_back(self, size: int) -> None:
        """Give bytes back (a negative size takes more, without waiting: what was estimated turned out larger)."""
        self._used -= size
        self._grant()

    def _fits(self, size: int) -> bool:
        return self._used + size <= self._capacity or self._used == 0

    def _grant(self) -> None:
        while self._waiters:
            granted, size = self._waiters[0]
            if not granted.done():
                if not self._fits(size):
                    return
                self._used += size
                granted.set_result(None)
            self._waiters.popleft()
