"""How weights get into an engine: one method, and the two adapters that need no server.

An adapter gets a folder whose files have been verified. It must be idempotent (a kill between applying and the ack applies twice,
exactly-once rule 20), must leave the engine serving what it had when it raises, and never reuse an adapter name for other weights.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from headrace.schemas.weights import WeightsPublished

if TYPE_CHECKING:
    from headrace.engine.sampling.local_engine import LocalEngine


class WeightAdapter(Protocol):
    """Puts weights into one engine."""

    async def apply(self, folder: Path, published: WeightsPublished) -> str:
        """Make the engine serve these weights; returns what it itself says it serves now: a version or a checksum.

        Anything it raises becomes a `WeightsFailed`, and the engine continues with what it has.
        """
        ...


class CallableAdapter:
    """Any function `(folder, published)`; a plain one runs in a thread. What it returns (None: the version) is what the engine says."""

    def __init__(self, function: Callable[[Path, WeightsPublished], object | Awaitable[object]]) -> None:
        self._function = function

    async def apply(self, folder: Path, published: WeightsPublished) -> str:
        """See `WeightAdapter`."""
        if inspect.iscoroutinefunction(self._function):
            said = await self._function(folder, published)
        else:
            said = await asyncio.to_thread(self._function, folder, published)
        return str(published.policy_version if said is None else said)


class LocalEngineAdapter:
    """The engine in this process: files are read in a thread while it generates, the swap is between two of its calls."""

    def __init__(self, engine: "LocalEngine") -> None:
        self._engine = engine

    async def apply(self, folder: Path, published: WeightsPublished) -> str:
        """See `WeightAdapter`."""
        await asyncio.to_thread(self._engine.load, folder, published.policy_version)
        return str(self._engine.policy_version)
