"""An owner of a lane that acts when a command has come: in a thread, since the command line that waits for it holds this one."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import aclosing

from headrace.core.kafka import client_options
from headrace.core.reading import follow
from headrace.core.settings import KafkaSettings


def once_commanded(kafka: str, prefix: str, lane: int, offset: int, act: Callable[[], None]) -> threading.Thread:
    """Start a thread that calls `act` when the lane has a command at this offset."""

    async def come() -> None:
        options = client_options(KafkaSettings(bootstrap_servers=kafka), "test-owner")
        async with aclosing(follow(options, f"{prefix}commands", lane)) as batches:
            async for batch in batches:
                if batch[-1].offset >= offset:
                    return

    def run() -> None:
        asyncio.run(come())
        act()

    owner = threading.Thread(target=run)
    owner.start()
    return owner
