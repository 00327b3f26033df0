"""Keeps one engine at the latest policy version: follows `weights`, downloads and verifies, applies through an adapter, acks.

Guarantees: the engine serves while a version is downloaded; nothing unverified reaches it; the version never goes back within an
incarnation; a version that was overtaken while it was downloaded is not applied; a version is applied once in a process, by (incarnation,
version, digest), and at least once over kills. What can't be downloaded after `_ATTEMPTS` or applied becomes a `WeightsFailed`, and the
engine goes on with what it has: an unreachable store is tried on and on, wrong content until a newer version comes.
Gives up: stopping a download that runs in a thread; it is left to end by itself. An ack that Kafka does not take is logged, not kept.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError

from headrace.consumers.adapters import WeightAdapter
from headrace.consumers.weight_cache import WeightCache
from headrace.consumers.weight_feed import WeightFeed
from headrace.core.errors import HeadraceError
from headrace.core.kafka import client_options, plain_errors
from headrace.core.settings import Settings
from headrace.core.store import StoreError, StoreUnavailableError, open_store
from headrace.schemas.envelope import seal
from headrace.schemas.weights import WeightsApplied, WeightsFailed, WeightsPublished

logger = logging.getLogger(__name__)

_ATTEMPTS = 3
_FIRST_PAUSE = 0.2
_LONGEST_PAUSE = 30.0  # seconds, between attempts to reach a store


class ModelDeletedError(HeadraceError):
    """The model that is waited for was deleted."""


class WeightSubscriber:
    """Run it as a context: `async with WeightSubscriber(settings, adapter, model_id="m", engine_id="e") as weights: …`.

    Args:
        settings: Kafka, topics and store.
        adapter: How weights get into the engine.
        engine_id: Name of the engine: key of its acks.
        model_id: Follow this model.
        deployment: Follow whatever names this deployment. Exactly one of the two.
        base_url: Where the engine answers; in the acks.
        cache_dir: Folder for downloads, the engine's own. None: `.headrace/engines/<engine id>`.
        keep_versions: Downloaded versions that are kept there.
        on_applied: Called after each version is served and acknowledged; what it raises is logged.
    """

    def __init__(
        self,
        settings: Settings,
        adapter: WeightAdapter,
        *,
        engine_id: str,
        model_id: str | None = None,
        deployment: str | None = None,
        base_url: str | None = None,
        cache_dir: Path | None = None,
        keep_versions: int = 2,
        on_applied: Callable[[WeightsPublished], Awaitable[None]] | None = None,
    ) -> None:
        self._options = client_options(settings.kafka, f"headrace-weights-{engine_id}")
        self._acks_topic = settings.topic_names.weight_acks
        shadows = settings.worker.shadow_prefix is not None
        self._feed = WeightFeed(self._options, settings.topic_names.weights, model_id=model_id, deployment=deployment, shadows=shadows)
        root = cache_dir or Path(".headrace") / "engines" / quote(engine_id, safe="")
        self._cache = WeightCache(open_store(settings.store.url, settings.s3), root, keep_versions)
        self._adapter = adapter
        self._engine_id = engine_id
        self._deployment = deployment
        self._base_url = base_url
        self._on_applied = on_applied
        self._producer: AIOKafkaProducer | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._waking: asyncio.Task[None] | None = None  # held, since the loop itself keeps no task alive
        self._moved = asyncio.Condition()
        self.published: WeightsPublished | None = None
        """What the engine serves; None: what it was started with."""

    @property
    def version(self) -> int:
        """Policy version that the engine serves; 0: the base model."""
        return 0 if self.published is None else self.published.policy_version

    async def wait_for(self, version: int) -> None:
        """Return when the engine serves this version or a later one. Use `asyncio.timeout` for a limit.

        Raises:
            ModelDeletedError: the model was deleted meanwhile.
            Exception: what ended the subscriber, if something did.
        """
        async with self._moved:
            await self._moved.wait_for(lambda: self.version >= version or self._feed.deleted or self._ended() is not None)
        if self.version >= version:
            return
        if (failure := self._ended()) is not None:
            raise failure
        raise ModelDeletedError(f"version {version} will not come: the model was deleted while the engine served version {self.version}")

    async def start(self) -> None:
        """Connect and begin to follow.

        Raises:
            KafkaUnavailableError: Kafka can't be reached, or has no `weights` topic.
        """
        partitions = await self._feed.partitions()
        with plain_errors(self._options):
            self._producer = AIOKafkaProducer(**self._options, enable_idempotence=True)
            try:
                await self._producer.start()
            except BaseException:
                await self._producer.stop()
                raise
        self._tasks = [asyncio.create_task(self._feed.run(partition)) for partition in partitions]
        self._tasks.append(asyncio.create_task(self._apply_all()))
        for task in self._tasks:
            task.add_done_callback(self._wake_waiters)

    async def stop(self) -> None:
        """Stop following. The engine goes on with what it has.

        Raises:
            Exception: what ended the subscriber before, if something did: it is not swallowed.
        """
        failure = self._ended()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self._producer is not None:
            await self._producer.stop()
            self._producer = None
        if failure is not None:
            raise failure

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.stop()

    async def _apply_all(self) -> None:
        while True:
            await self._feed.changed.wait()
            self._feed.changed.clear()
            if self._feed.deleted:
                logger.warning("the model of engine %s was deleted; the engine goes on with version %d", self._engine_id, self.version)
            await self._notify()
            target = self._feed.target
            if target is not None and _identity(target) != _identity(self.published):
                await self._take(target, time.monotonic())

    async def _take(self, target: WeightsPublished, arrived: float) -> None:
        """Download, apply, ack; returns early when a newer version came."""
        folder = await self._download(target)
        if folder is None or self._feed.target is not target:
            return
        try:
            reported = await self._adapter.apply(folder, target)
        except Exception as error:  # noqa: BLE001 - an adapter is foreign code: whatever it raises, the engine has the old version
            await self._failed(target, error)
            return
        self.published = target
        applied = WeightsApplied(
            engine_id=self._engine_id,
            model_id=target.model_id,
            incarnation=target.incarnation,
            policy_version=target.policy_version,
            digest=target.digest,
            base_url=self._base_url,
            deployment=self._deployment,
            reported=reported,
            seconds=time.monotonic() - arrived,
        )
        logger.info("engine %s serves version %d after %.2f s", self._engine_id, target.policy_version, applied.seconds)
        await self._ack(applied, "applied")
        await self._notify()
        if self._on_applied is not None:
            try:
                await self._on_applied(target)
            except Exception:  # the caller's code: it must not stop the weights
                logger.exception("on_applied failed for version %d", target.policy_version)
        await asyncio.to_thread(self._cache.prune, target)

    async def _download(self, target: WeightsPublished) -> Path | None:
        """A verified folder; None when a newer version came or the content is wrong for good."""
        attempt, pause = 0, _FIRST_PAUSE
        while self._feed.target is target:
            attempt += 1
            try:
                return await asyncio.to_thread(self._cache.fetch, target)
            except StoreError as error:
                logger.warning("download of version %d, attempt %d: %s", target.policy_version, attempt, error)
                if attempt == _ATTEMPTS:
                    await self._failed(target, error)
                if attempt >= _ATTEMPTS and not isinstance(error, StoreUnavailableError):
                    return None
            await self._pause(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return None

    async def _pause(self, seconds: float) -> None:
        """Between attempts; a newer version ends it. The event stays set for the loop that acts on it."""
        try:
            await asyncio.wait_for(self._feed.changed.wait(), seconds)
        except TimeoutError:
            return

    async def _failed(self, target: WeightsPublished, error: Exception) -> None:
        logger.error("engine %s can't take version %d and stays at %d: %s", self._engine_id, target.policy_version, self.version, error)
        failed = WeightsFailed(
            engine_id=self._engine_id,
            model_id=target.model_id,
            incarnation=target.incarnation,
            policy_version=target.policy_version,
            digest=target.digest,
            error=f"{type(error).__name__}: {error}"[:2000],
            base_url=self._base_url,
            deployment=self._deployment,
        )
        await self._ack(failed, "failed")

    async def _ack(self, record: WeightsApplied | WeightsFailed, kind: str) -> None:
        # Derived, so that whoever counts can drop the repeat after a kill (exactly-once rule 12).
        event_id = f"{record.incarnation}-{record.policy_version}-{kind}-{self._engine_id}"
        value, headers = seal(record, source=self._engine_id, event_id=event_id)
        assert self._producer is not None  # noqa: S101 - tasks live between start and stop
        try:
            await self._producer.send_and_wait(self._acks_topic, value, key=self._engine_id.encode(), headers=headers)
        except KafkaError as error:
            logger.error("the ack of version %d (%s) was not taken: %s", record.policy_version, kind, error)  # noqa: TRY400 - said by its text

    async def _notify(self) -> None:
        async with self._moved:
            self._moved.notify_all()

    def _ended(self) -> BaseException | None:
        """What ended a task of ours; cancellation is no failure."""
        done = [task for task in self._tasks if task.done() and not task.cancelled()]
        return next((error for task in done if (error := task.exception()) is not None), None)

    def _wake_waiters(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled():
            self._waking = asyncio.create_task(self._notify())


def _identity(published: WeightsPublished | None) -> tuple[str, str, int, str] | None:
    if published is None:
        return None
    return published.model_id, published.incarnation, published.policy_version, published.digest
