"""How often each token may call: a bucket of requests, filled evenly over the minute.

Limitations: limits across several gateways; each counts for itself.
"""

import time


class Pace:
    """A bucket of requests for each token, filled evenly over the minute."""

    def __init__(self, per_minute: int) -> None:
        self._per_second = per_minute / 60
        self._size = float(max(per_minute, 1))
        self._buckets: dict[str, tuple[float, float]] = {}

    def wait_for(self, token_id: str) -> float:
        """Take one; 0, or the seconds until there is one."""
        now = time.monotonic()
        left, since = self._buckets.get(token_id, (self._size, now))
        left = min(self._size, left + (now - since) * self._per_second)
        if left < 1:
            self._buckets[token_id] = (left, now)
            return (1 - left) / self._per_second
        self._buckets[token_id] = (left - 1, now)
        return 0.0
