"""One model in an engine that serves several: its current version, older ones that someone asked for, and the names they have there.

Guarantees: the current version never goes back within an incarnation; a version that a request samples from is not taken away under it; an
older version is downloaded once, however many ask for it; what was created or published a moment ago is waited for. Limitations: serving
version 0 in the place of a later one that is still being loaded, or that could not be.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from headrace.consumers.subscribers.engine_acks import EngineAcks
from headrace.consumers.subscribers.weight_applier import WeightApplier, WeightCache
from headrace.consumers.subscribers.weight_feed import WeightTarget
from headrace.core.deadline import deadline
from headrace.core.errors import HeadraceError
from headrace.core.model_views import ModelView
from headrace.core.store import StoreError, StoreUnavailableError
from headrace.engine.sampling.engine_weights import WeightsMismatchError
from headrace.engine.serving.held_versions import HeldVersions, Version
from headrace.engine.serving.model_watch import Followed
from headrace.schemas.weights import WeightsPublished, WeightsRef

logger = logging.getLogger(__name__)

BASE_DIGEST = "base"
"""What an ack of version 0 says as its digest, where that is the base model."""
NEWS_SECONDS = 0.5
"""What was just created or published is on its way here: a name that is not known yet is waited for so long."""
_LOOKED_BACK = 16
_LOADING_SECONDS = 120.0
"""A request waits for a version to be loaded so long at most."""

Ledger = Callable[[str, str, int], Awaitable[WeightsRef | None]]
"""(model id, incarnation, version) → where its weights are."""


class NoSuchPolicyError(HeadraceError):
    """Nothing here has that name or version; says what there is."""


class PolicyNotReadyError(HeadraceError):
    """The version is not loaded yet, or could not be; try again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What a request samples from."""

    model_id: str
    """Or the name of the base model."""
    version: int
    weights: str | None
    """Name in the engine; None: the base model's own."""
    switches: Mapping[str, bool | int | float | str]
    """Of the chat template."""

    @property
    def name(self) -> str:
        """As clients ask for it: `<model id>@<version>`."""
        return f"{self.model_id}@{self.version}"


class ServedModel:
    """A model that is followed.

    Args:
        followed: As it stands now.
        held: Its versions in the engine, next to version 0.
        cache: Downloads, of this model alone.
        acks: Of the engine, for this model.
        ledger: Where older versions are looked up.
    """

    def __init__(self, followed: Followed, *, held: HeldVersions, cache: WeightCache, acks: EngineAcks, ledger: Ledger) -> None:
        self._followed = followed
        self._held = held
        self.cache = cache
        """Its downloads."""
        self._acks = acks
        self._ledger = ledger
        self._target = WeightTarget(model_id=followed.view.model_id)
        self._applier = WeightApplier(self._target, cache, self, acks, moved=self._notify, named=self._name_of, older=self._before)
        self._moved = asyncio.Condition()
        self._loads: dict[Version, asyncio.Task[None]] = {}
        self._said_zero: str | None = None
        self._following: asyncio.Task[None] | None = None

    @property
    def versions(self) -> list[int]:
        """That are held, version 0 included where it can be served at once."""
        zero = [] if self._followed.view.start_weights is not None else [0]
        return sorted({*zero, *self._held.of(self._followed.incarnation)})

    @property
    def created_at(self) -> float:
        """Seconds since 1970."""
        return self._followed.view.created_at.timestamp()

    @property
    def view(self) -> ModelView:
        """The model as it stands."""
        return self._followed.view

    async def update(self, followed: Followed) -> None:
        """The model as it stands now; begins to follow it at the first call."""
        self._followed = followed
        self._held.forget_all(but=followed.incarnation)
        self._target.aim(followed.published)
        if self._following is None:
            self._following = asyncio.create_task(self._applier.run(), name=f"weights of {followed.view.model_id}")
        if followed.published is None and self._said_zero != followed.incarnation:
            await self._serve_zero(followed)
        await self._notify()

    async def end(self) -> None:
        """Serve it no longer: the engine forgets its weights, and its ack is taken back."""
        for task in [self._following, *self._loads.values()]:
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self._held.forget_all()
        await self._acks.retract()

    async def apply(self, folder: Path, published: WeightsPublished) -> str:
        """Make a version the current one. See `WeightAdapter`."""
        key = (published.incarnation, published.policy_version)
        if key not in self._held:
            await self._held.take(key, folder)
        self._held.make_current(key)
        self._held.forget_all(but=self._followed.incarnation)  # the model may have been created again meanwhile
        return self._name(published.policy_version)

    @asynccontextmanager
    async def policy(self, version: int | None) -> AsyncIterator[Policy]:
        """A version, which stays as long as the block runs; None: the current one.

        Raises:
            NoSuchPolicyError: it was never published, or its weights are gone.
            PolicyNotReadyError: it is not loaded yet, or could not be.
        """
        if version is None:
            version = await self._current_version()
        view = self._followed.view
        if version == 0 and view.start_weights is None:
            yield self._policy(0, None)
            return
        key = await self._loaded(version)
        with self._held.used(key) as name:
            yield self._policy(version, name)

    @property
    def _latest(self) -> int:
        published = self._followed.published
        latest = 0 if published is None else published.policy_version
        # A deployment may be asked to go back; what is current does not.
        return latest if self._held.current is None else max(latest, self._held.current[1])

    async def _current_version(self) -> int:
        """The version that a name without one stands for; waits until it is loaded."""
        published = self._followed.published
        if published is None:
            return 0
        if not self._is_current(published.incarnation):
            await self._until_applied(published.policy_version)
        assert self._held.current is not None  # noqa: S101 - applied
        return self._held.current[1]

    async def _loaded(self, version: int) -> Version:
        """A version, which is held when this returns."""
        key = (self._followed.incarnation, version)
        if version > self._latest:
            with suppress(TimeoutError):
                async with deadline(NEWS_SECONDS), self._moved:
                    await self._moved.wait_for(lambda: version <= self._latest)
        if version > self._latest:
            model_id = self._followed.view.model_id
            raise NoSuchPolicyError(f"version {version} of model {model_id} is not published yet: the latest is {self._latest}")
        if key not in self._held and 0 < version == self._latest:
            await self._until_applied(version)
        while key not in self._held:
            await self._load(key)
        return key

    async def _until_applied(self, version: int) -> None:
        """Wait until the applier has the version or a later one."""

        def over() -> bool:
            return self._is_current(self._followed.incarnation, version) or self._failure(version) is not None

        try:
            async with deadline(_LOADING_SECONDS), self._moved:
                await self._moved.wait_for(over)
        except TimeoutError as error:
            raise PolicyNotReadyError(f"{self._name(version)} is still being loaded: try again") from error
        if not self._is_current(self._followed.incarnation, version):
            raise PolicyNotReadyError(f"{self._name(version)} could not be loaded: {self._failure(version)}")

    def _is_current(self, incarnation: str, version: int = 0) -> bool:
        current = self._held.current
        return current is not None and current[0] == incarnation and current[1] >= version

    def _failure(self, version: int) -> Exception | None:
        refused = self._applier.refused
        if refused is None or refused[0].incarnation != self._followed.incarnation or refused[0].policy_version < version:
            return None
        return refused[1]

    async def _load(self, key: Version) -> None:
        """Bring an older version in; those who ask for it at the same time share the work."""
        if key not in self._loads:
            self._loads[key] = asyncio.create_task(self._fetch_and_hold(key), name=f"loading {self._name(key[1])}")
            self._loads[key].add_done_callback(lambda _: self._loads.pop(key, None))
        await asyncio.shield(self._loads[key])

    async def _fetch_and_hold(self, key: Version) -> None:
        incarnation, version = key
        view = self._followed.view
        try:
            ref = view.start_weights if version == 0 else await self._ledger(view.model_id, incarnation, version)
        except HeadraceError as error:
            raise PolicyNotReadyError(f"the ledger can't be read for {self._name(version)}: {error}") from error
        if ref is None:
            raise NoSuchPolicyError(f"version {version} of model {view.model_id} is not in the ledger")
        wanted = self._as_published(key, ref)
        try:
            await self._held.take(key, await asyncio.to_thread(self.cache.fetch, wanted))
        except StoreUnavailableError as error:
            raise PolicyNotReadyError(f"the weights of {self._name(version)} can't be reached: {error}") from error
        except StoreError as error:
            raise NoSuchPolicyError(f"the weights of {self._name(version)} are no longer stored: {error}") from error
        except WeightsMismatchError as error:
            raise NoSuchPolicyError(f"the weights of {self._name(version)} do not fit this engine's base model: {error}") from error

    async def _before(self, published: WeightsPublished) -> AsyncGenerator[WeightsPublished]:
        """The versions before one that are in the ledger, newest first; not more than `_LOOKED_BACK` versions back."""
        newest = published.policy_version - 1
        for version in range(newest, max(0, newest - _LOOKED_BACK), -1):
            try:
                ref = await self._ledger(published.model_id, published.incarnation, version)
            except HeadraceError as error:
                logger.warning("the ledger can't be read for %s: %s", self._name(version), error)
                return
            if ref is not None:
                yield self._as_published((published.incarnation, version), ref)

    def _as_published(self, key: Version, ref: WeightsRef) -> WeightsPublished:
        view = self._followed.view
        return WeightsPublished(
            model_id=view.model_id,
            incarnation=key[0],
            policy_version=key[1],
            base_model=view.settings.base_model,
            format=view.settings.adaptation,
            uri=ref.uri,
            digest=ref.digest,
            files=(),
        )

    async def _serve_zero(self, followed: Followed) -> None:
        """Say that version 0 is served."""
        self._said_zero = followed.incarnation
        view = followed.view
        started = view.start_weights
        zero = WeightsPublished(
            model_id=view.model_id,
            incarnation=followed.incarnation,
            policy_version=0,
            base_model=view.settings.base_model,
            format=view.settings.adaptation,
            uri="" if started is None else started.uri,
            digest=BASE_DIGEST if started is None else started.digest,
            files=(),
        )
        await self._acks.applied(zero, reported=self._name(0), seconds=0.0, served_as=self._name(0))

    def _policy(self, version: int, weights: str | None) -> Policy:
        view = self._followed.view
        return Policy(model_id=view.model_id, version=version, weights=weights, switches=view.settings.chat_template_kwargs)

    def _name_of(self, published: WeightsPublished) -> str:
        return self._name(published.policy_version)

    def _name(self, version: int) -> str:
        return f"{self._followed.view.model_id}@{version}"

    async def _notify(self) -> None:
        async with self._moved:
            self._moved.notify_all()
