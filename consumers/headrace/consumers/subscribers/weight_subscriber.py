"""Keeps one engine at the latest policy version: follows `weights`, downloads and verifies, applies through an adapter, acks.

Guarantees: those of `WeightTarget` and `WeightApplier`: the version never goes back within an incarnation, only verified weights reach the
engine, and it serves during a download. The failure that ends the subscriber is raised to its caller in `wait_for` and `stop`.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

from headrace.consumers.subscribers.engine_acks import AckTopic, EngineAcks
from headrace.consumers.subscribers.weight_applier import WeightAdapter, WeightApplier, WeightCache
from headrace.consumers.subscribers.weight_feed import WeightFeed
from headrace.core.errors import HeadraceError
from headrace.core.kafka import client_options
from headrace.core.kafka_outage import folding
from headrace.core.model_names import known_model_id
from headrace.core.settings import Settings
from headrace.core.store import open_store
from headrace.schemas.weights import WeightsPublished


class ModelDeletedError(HeadraceError):
    """The model was deleted, and the version that was waited for will not come."""


class WeightSubscriber:
    """Run it as a context: `async with WeightSubscriber(settings, adapter, model_id="m", engine_id="e") as weights: …`.

    Args:
        settings: Kafka, topics and store.
        adapter: How weights get into the engine.
        engine_id: Name of the engine: key of its acks.
        model_id: Follow this model: its id, or its name as `name`, `project/name` or `account/project/name`.
        deployment: Follow the models that name this deployment and are of its account. Exactly one of the two.
        base_url: Where the engine answers; in the acks.
        cache_dir: Folder for downloads, the engine's own. None: `.headrace/engines/<engine id>`.
        keep_versions: Downloaded versions that are kept there.
        on_applied: Called after each version is served and acknowledged; an exception is logged.
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
        options = self._options = client_options(settings.kafka, f"headrace-weights-{engine_id}")
        self._settings = settings
        self._model_id = model_id
        shadows = settings.worker.shadow_prefix is not None
        self._feed = WeightFeed(options, settings.topic_names, model_id=model_id, deployment=deployment, shadows=shadows)
        root = cache_dir or Path(".headrace") / "engines" / quote(engine_id, safe="")
        self._cache = WeightCache(open_store(settings.store.url, settings.s3), root, keep_versions)
        self._acks = AckTopic(options, settings.topic_names.weight_acks, engine_id)
        acks = EngineAcks(self._acks, engine_id=engine_id, base_url=base_url, deployment=deployment)
        self._applier = WeightApplier(self._feed, self._cache, adapter, acks, moved=self._notify, on_applied=on_applied)
        self._tasks: list[asyncio.Task[None]] = []
        self._waking: asyncio.Task[None] | None = None  # held, since the loop itself keeps no task alive
        self._moved = asyncio.Condition()

    @property
    def published(self) -> WeightsPublished | None:
        """The version that the engine serves; None: the weights that it started with."""
        return self._applier.published

    @property
    def version(self) -> int:
        """Policy version that the engine serves; 0: the base model."""
        return self._applier.version

    async def wait_for(self, version: int) -> None:
        """Return when the engine serves this version or a later one. Use `asyncio.timeout` for a limit.

        Raises:
            ModelDeletedError: the model was deleted meanwhile.
            Exception: the failure that ended the subscriber, if one did.
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
            UnknownModelError: there is no such model, or several have the name.
        """
        with folding(lambda: self._options):
            if self._model_id is not None:
                self._feed.follow_model(await known_model_id(self._settings, self._model_id))
            runs = await self._feed.runs()
            await self._acks.start()
            self._tasks = [asyncio.create_task(run) for run in runs]
            self._tasks.append(asyncio.create_task(self._applier.run()))
        for task in self._tasks:
            task.add_done_callback(self._wake_waiters)

    async def stop(self) -> None:
        """Stop following. The engine continues with what it has.

        Raises:
            Exception: the failure that ended the subscriber before, if one did.
        """
        failure = self._ended()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        await self._acks.stop()
        if failure is not None:
            raise failure

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.stop()

    async def _notify(self) -> None:
        async with self._moved:
            self._moved.notify_all()

    def _ended(self) -> BaseException | None:
        """The failure of a task; cancellation is none."""
        done = [task for task in self._tasks if task.done() and not task.cancelled()]
        return next((error for task in done if (error := task.exception()) is not None), None)

    def _wake_waiters(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled():
            self._waking = asyncio.create_task(self._notify())
