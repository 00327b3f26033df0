"""Brings versions into one engine: downloads and verifies the weights, applies them through an adapter, acks.

Guarantees: the engine serves during a download; only verified weights reach it; a version that was overtaken during its download is not
applied. A version is applied once in a process, by (incarnation, version, digest), and at least once over kills. A version that cannot be
downloaded after `_ATTEMPTS` attempts or applied becomes a `WeightsFailed`, and the engine continues with what it has: an unreachable store
is tried again and again, wrong content until a newer version comes. A folder of the cache has exactly the files of its manifest, each
checked by SHA-256, and the manifest by the published digest; a former process' download is used again if it is still right.
Limitations: a download in a thread cannot be stopped; it ends by itself. Each engine needs a cache folder of its own.
"""

import asyncio
import inspect
import logging
import shutil
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import quote

from headrace.consumers.subscribers.engine_acks import EngineAcks
from headrace.consumers.subscribers.weight_feed import WeightTarget
from headrace.core.outages import said
from headrace.core.processes import make_private_folder
from headrace.core.store import ObjectStore, StoreError, StoreUnavailableError, fetch_folder
from headrace.schemas.weights import WeightsPublished

if TYPE_CHECKING:
    from headrace.engine.sampling.local_engine import LocalEngine

logger = logging.getLogger(__name__)

_ATTEMPTS = 3
_FIRST_PAUSE = 0.2
_LONGEST_PAUSE = 30.0  # seconds, between attempts to reach a store


class WeightAdapter(Protocol):
    """Puts weights into one engine.

    It must be idempotent (*repeatable-acks*: a kill between applying and the ack applies twice), must leave the engine serving its
    present weights when it raises, and must never use an adapter name again for other weights.
    """

    async def apply(self, folder: Path, published: WeightsPublished) -> str:
        """Make the engine serve the verified weights in `folder`; returns the version or checksum that the engine itself reports.

        Anything it raises becomes a `WeightsFailed`.
        """
        ...


class CallableAdapter:
    """Any function `(folder, published)`; a plain one runs in a thread. Its result (None: the version) is what the engine reports."""

    def __init__(self, function: Callable[[Path, WeightsPublished], object | Awaitable[object]]) -> None:
        self._function = function

    async def apply(self, folder: Path, published: WeightsPublished) -> str:
        """See `WeightAdapter`."""
        if inspect.iscoroutinefunction(self._function):
            reported = await self._function(folder, published)
        else:
            reported = await asyncio.to_thread(self._function, folder, published)
        return str(published.policy_version if reported is None else reported)


class LocalEngineAdapter:
    """The engine in this process: a thread reads the files while it generates; the swap is between two of its calls."""

    def __init__(self, engine: "LocalEngine") -> None:
        self._engine = engine

    async def apply(self, folder: Path, published: WeightsPublished) -> str:
        """See `WeightAdapter`."""
        await asyncio.to_thread(self._engine.load, folder, published.policy_version)
        return str(self._engine.policy_version)


class WeightCache:
    """Folders of weights under `root`, which belongs to this cache alone.

    Args:
        store: Where versions are.
        root: Made at the first download.
        keep: Versions that stay after `prune`, at least 1.
    """

    def __init__(self, store: ObjectStore, root: Path, keep: int) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep}")
        self._store = store
        self._root = root
        self._keep = keep

    def fetch(self, published: WeightsPublished) -> Path:
        """Download a version, or continue a download that stopped. Blocks.

        Raises:
            StoreError: see `fetch_folder`.
        """
        make_private_folder(self._root)
        folder = self._folder(published)
        fetch_folder(self._store, published.uri, published.digest, folder)
        folder.touch()  # `prune` goes by the last use
        return folder

    def remove(self) -> None:
        """Remove all of it: the model is gone. Blocks."""
        shutil.rmtree(self._root, ignore_errors=True)

    def prune(self, current: WeightsPublished) -> None:
        """Remove all but the latest versions; `current` stays in any case. Blocks."""
        others = [path for path in self._root.glob("*weights-*") if path != self._folder(current)]
        others.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        for path in others[self._keep - 1 :]:
            shutil.rmtree(path, ignore_errors=True)  # a file that another process holds open goes the next time

    def _folder(self, published: WeightsPublished) -> Path:
        # Incarnation and digest come from a message: quoted, they name nothing outside `root`.
        name = f"{published.incarnation}-v{published.policy_version}-{published.digest[:16]}"
        return self._root / f"weights-{quote(name, safe='')}"


class WeightApplier:
    """Keeps one engine at a target.

    Args:
        target: The version to serve.
        cache: Downloads.
        adapter: How weights get into the engine.
        acks: Of the engine.
        moved: Called after each change: a version served or refused, the model deleted.
        on_applied: Called after each version is served and acknowledged; an exception is logged.
        named: The name under which the engine serves a version, for its ack; None: it has none.
        older: The versions before one, newest first; None: they are not known.
    """

    def __init__(
        self,
        target: WeightTarget,
        cache: WeightCache,
        adapter: WeightAdapter,
        acks: EngineAcks,
        *,
        moved: Callable[[], Awaitable[None]],
        on_applied: Callable[[WeightsPublished], Awaitable[None]] | None = None,
        named: Callable[[WeightsPublished], str] | None = None,
        older: Callable[[WeightsPublished], AsyncGenerator[WeightsPublished]] | None = None,
    ) -> None:
        self._target = target
        self._cache = cache
        self._adapter = adapter
        self._acks = acks
        self._moved = moved
        self._on_applied = on_applied
        self._named = named
        self._older = older
        self.published: WeightsPublished | None = None
        """The served version; None: the weights that the engine started with."""
        self.refused: tuple[WeightsPublished, Exception] | None = None
        """The last version that could not be applied, and why."""

    @property
    def version(self) -> int:
        """Policy version that the engine serves; 0: the weights that it started with."""
        return 0 if self.published is None else self.published.policy_version

    async def run(self) -> None:
        """Follow the target until cancelled."""
        while True:
            await self._target.changed.wait()
            self._target.changed.clear()
            if self._target.deleted:
                logger.warning("the model of engine %s was deleted; it continues with version %d", self._acks.engine_id, self.version)
            await self._moved()
            target = self._target.target
            if target is not None and (self.published is None or _identity(target) != _identity(self.published)):
                await self._take(target, time.monotonic())

    async def _take(self, target: WeightsPublished, arrived: float) -> None:
        """Download, apply, ack; returns early when a newer version came."""
        folder = await self._download(target)
        if folder is None or self._target.target is not target:
            return
        try:
            reported = await self._adapter.apply(folder, target)
        except Exception as error:  # noqa: BLE001 - an adapter is foreign code: whatever it raises, the engine has the old version
            await self._failed(target, error)
            return
        self.published, self.refused = target, None
        seconds = time.monotonic() - arrived
        logger.info("engine %s serves version %d after %.2f s", self._acks.engine_id, target.policy_version, seconds)
        served_as = None if self._named is None else self._named(target)
        await self._acks.applied(target, reported=reported, seconds=seconds, served_as=served_as)
        await self._moved()
        if self._on_applied is not None:
            try:
                await self._on_applied(target)
            except Exception:  # the caller's code: it must not stop the weights
                logger.exception("on_applied failed for version %d", target.policy_version)
        await asyncio.to_thread(self._cache.prune, target)

    async def _download(self, target: WeightsPublished) -> Path | None:
        """A verified folder; None when a newer version came or the content is wrong for good."""
        attempt, pause = 0, _FIRST_PAUSE
        while self._target.target is target:
            attempt += 1
            try:
                return await asyncio.to_thread(self._cache.fetch, target)
            except StoreError as error:
                logger.warning("download of version %d, attempt %d: %s", target.policy_version, attempt, error)
                if attempt == _ATTEMPTS:
                    await self._failed(target, error)
                if attempt >= _ATTEMPTS and not isinstance(error, StoreUnavailableError):
                    return None
            try:  # a newer version ends the pause; the event stays set for the loop that acts on it
                await asyncio.wait_for(self._target.changed.wait(), pause)
            except TimeoutError:
                pause = min(2 * pause, _LONGEST_PAUSE)
        return None

    async def _failed(self, target: WeightsPublished, error: Exception) -> None:
        engine = self._acks.engine_id
        if not self._is_of_incarnation(target):
            await self._take_older(target)
        logger.error("engine %s can't take version %d and stays at %d: %s", engine, target.policy_version, self.version, said(error))
        self.refused = (target, error)
        is_known = self.published is None or self._is_of_incarnation(target)
        await self._acks.failed(target, error, serving=self.version if is_known else None)
        await self._moved()

    def _is_of_incarnation(self, target: WeightsPublished) -> bool:
        return self.published is not None and _identity(self.published)[:2] == _identity(target)[:2]

    async def _take_older(self, target: WeightsPublished) -> None:
        """Serve the newest available version before one that is not, where none of the incarnation is served yet."""
        if self._older is None:
            return
        async with aclosing(self._older(target)) as versions:
            async for version in versions:
                if self._target.target is not target:
                    return
                try:
                    folder = await asyncio.to_thread(self._cache.fetch, version)
                    await self._adapter.apply(folder, version)
                except Exception as error:  # noqa: BLE001 - as above, or its files are gone too
                    logger.warning("version %d can't be served either: %s", version.policy_version, said(error))
                    continue
                self.published = version
                return


def _identity(published: WeightsPublished) -> tuple[str, str, int, str]:
    return published.model_id, published.incarnation, published.policy_version, published.digest
