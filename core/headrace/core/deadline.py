"""A time limit that ends what it limits, also where a library loses a cancellation.

`asyncio.timeout` cancels once. Before Python 3.12 `asyncio.wait_for`, which the Kafka client uses within, loses a cancellation that arrives
as its inner task ends: what was limited then runs for ever. Guarantees: a block that is over its time is cancelled again until it ends;
a cancellation from outside stays one. Limitations: a block that ends by itself after all is no error, and cleaning up may be interrupted
`AGAIN_SECONDS` after it began.
"""

import asyncio
from types import TracebackType

AGAIN_SECONDS = 5.0


class deadline:  # noqa: N801 - reads as `asyncio.timeout` does
    """Raise TimeoutError if the block takes longer: `async with deadline(10): ...`.

    Args:
        seconds: The limit.
        again: Seconds between one cancellation and the next.
    """

    def __init__(self, seconds: float, *, again: float = AGAIN_SECONDS) -> None:
        self._seconds = seconds
        self._again = again
        self._cancels = 0

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a coroutine runs in a task
        self._task = task
        self._before = task.cancelling()
        self._loop = asyncio.get_running_loop()
        self._next = self._loop.call_later(self._seconds, self._expire)

    def _expire(self) -> None:
        self._cancels += 1
        self._task.cancel()
        self._next = self._loop.call_later(self._again, self._expire)

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._next.cancel()
        for _ in range(self._cancels):
            self._task.uncancel()
        ours = self._cancels > 0 and self._task.cancelling() <= self._before
        if ours and kind is not None and issubclass(kind, asyncio.CancelledError):
            raise TimeoutError from error
