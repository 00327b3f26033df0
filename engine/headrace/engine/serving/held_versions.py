"""The versions of one model that an engine holds: which one is current, which are in use, and which go when there is no more room.

Guarantees: a version that a request samples from is not taken away under it; the current one stays; of the others those go first that were
not used for longest, once more than `keep` are held. A name in the engine is never used for other weights. Limitations: keeping to that
number while requests hold all of them.
"""

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from headrace.engine.sampling.batching import Batcher
from headrace.engine.sampling.policy_engine import PolicyEngine

Version = tuple[str, int]
"""(incarnation, policy version)."""


class HeldVersions:
    """What is held of one model.

    Args:
        engine: Where weights are held.
        batcher: Whose thread owns the engine.
        keep: How many.
    """

    def __init__(self, engine: PolicyEngine, batcher: Batcher, keep: int) -> None:
        self._engine = engine
        self._batcher = batcher
        self._keep = keep
        self._names: dict[Version, str] = {}  # in the engine; the least recently used first
        self._pins: dict[str, int] = {}
        self._gone: set[str] = set()  # no one asks for them any more, but a request still samples from them
        self.current: Version | None = None
        """The version that a name without one stands for."""

    def __contains__(self, version: Version) -> bool:
        return version in self._names

    def of(self, incarnation: str) -> list[int]:
        """The versions of an incarnation that are held."""
        return [version for held, version in self._names if held == incarnation]

    async def take(self, version: Version, folder: Path) -> None:
        """Hold the weights in a folder; files are read while the engine samples.

        Raises:
            WeightsMismatchError: they do not fit; everything is as it was.
        """
        tensors = await asyncio.to_thread(self._engine.read, folder)
        name = f"v{version[1]}-{uuid.uuid4().hex}"
        over = self._spare(version) if len(self._names) >= self._keep else None
        replaced = None if over is None else self._names.pop(over)
        try:
            await self._batcher.call(partial(self._engine.hold, name, folder, tensors, replaced))
        except Exception:
            if over is not None and replaced is not None:
                self._names = {over: replaced, **self._names}
            raise
        self._names[version] = name
        self._trim(version)

    def make_current(self, version: Version) -> None:
        """From now on a name without a version means this one."""
        self.current = version
        self._trim()

    @contextmanager
    def used(self, version: Version) -> Iterator[str]:
        """The name of a version in the engine; it stays as long as the block runs."""
        self._names[version] = name = self._names.pop(version)
        self._pins[name] = self._pins.get(name, 0) + 1
        try:
            yield name
        finally:
            self._unpin(name)

    def forget_all(self, but: str | None = None) -> None:
        """Take versions away, except those of one incarnation; each at once, or when the last request is done with it."""
        for version in [held for held in self._names if held[0] != but]:
            self._forget(version)

    def _spare(self, besides: Version | None) -> Version | None:
        spare = (held for held, name in self._names.items() if held not in {besides, self.current} and name not in self._pins)
        return next(spare, None)

    def _trim(self, besides: Version | None = None) -> None:
        while len(self._names) > self._keep and (spare := self._spare(besides)) is not None:
            self._forget(spare)

    def _forget(self, version: Version) -> None:
        name = self._names.pop(version)
        if version == self.current:
            self.current = None
        if name in self._pins:
            self._gone.add(name)
        else:
            self._batcher.post(partial(self._engine.drop, name))

    def _unpin(self, name: str) -> None:
        self._pins[name] -= 1
        if self._pins[name]:
            return
        del self._pins[name]
        if name in self._gone:
            self._gone.discard(name)
            self._batcher.post(partial(self._engine.drop, name))
        else:
            self._trim()
