"""All models that one engine serves: followed as they come and go, and found by the names that clients use.

Guarantees: a model can be asked for as soon as the command that creates it is in the log; one that was deleted is gone, and so is its ack.
A failure of one model holds up no other. Names: `<model id>@<version>`, `<model id>` for its current version, the base model's own name.
Limitations: taking acks back where the process is killed: it falls silent (`weights.acks`), and an engine that starts under the same id
writes over them.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from headrace.consumers.subscribers.engine_acks import STOP_SECONDS, AckTopic, EngineAcks
from headrace.consumers.subscribers.weight_applier import WeightCache
from headrace.core.deadline import deadline
from headrace.core.kafka import client_options
from headrace.core.ledger import StepRange, read_ledger
from headrace.core.model_names import pick_model
from headrace.core.models import UnknownModelError
from headrace.core.settings import Settings
from headrace.core.store import open_store
from headrace.engine.sampling.batching import Batcher
from headrace.engine.sampling.policy_engine import PolicyEngine
from headrace.engine.serving.held_versions import HeldVersions
from headrace.engine.serving.model_watch import Followed, ModelWatch
from headrace.engine.serving.served_model import BASE_DIGEST, NEWS_SECONDS, NoSuchPolicyError, Policy, PolicyNotReadyError, ServedModel
from headrace.schemas.weights import WeightsPublished, WeightsRef

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineIdentity:
    """Who an engine is, to those who read its acks."""

    engine_id: str
    base_url: str
    deployment: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A name that can be asked for."""

    name: str
    model_id: str
    version: int
    created_at: float


class ServedModels:
    """Run it as a context, and `run` within.

    Args:
        settings: Kafka, topics and store.
        base_model: Name in the catalogue.
        identity: Who the engine is.
        watch: What is to be served.
        engine: Where weights are held.
        batcher: Whose thread owns the engine.
        keep: Versions of each model that are held next to version 0.
        cache_dir: Folder for downloads. None: `.headrace/engines/<engine id>`.
    """

    def __init__(
        self,
        settings: Settings,
        base_model: str,
        *,
        identity: EngineIdentity,
        watch: ModelWatch,
        engine: PolicyEngine,
        batcher: Batcher,
        keep: int = 2,
        cache_dir: Path | None = None,
    ) -> None:
        self._settings = settings
        self.base_model = base_model
        self._identity = identity
        self._watch = watch
        self._engine = engine
        self._batcher = batcher
        self._keep = keep
        self._store = open_store(settings.store.url, settings.s3)
        self._root = cache_dir or Path(".headrace") / "engines" / quote(identity.engine_id, safe="")
        options = client_options(settings.kafka, f"headrace-engine-{identity.engine_id}")
        self._topic = AckTopic(options, settings.topic_names.weight_acks, identity.engine_id)
        self._models: dict[str, ServedModel] = {}
        self._moved = asyncio.Condition()
        self._ending = False
        self._known = False

    @property
    def ready(self) -> bool:
        """Whether all models that there were at the start are known."""
        return self._known

    def offers(self) -> list[Offer]:
        """What can be asked for by name without a download."""
        return [
            Offer(name=f"{model_id}@{version}", model_id=model_id, version=version, created_at=model.created_at)
            for model_id, model in sorted(self._models.items())
            for version in model.versions
        ]

    async def start(self) -> None:
        """Connect, and say that the base model is served.

        Raises:
            KafkaUnavailableError: Kafka can't be reached.
        """
        await self._topic.start()
        base = WeightsPublished(
            model_id=self.base_model,
            incarnation="",
            policy_version=0,
            base_model=self.base_model,
            format="full",
            uri="",
            digest=BASE_DIGEST,
            files=(),
        )
        await self._acks(self.base_model).applied(base, reported=self.base_model, seconds=0.0, served_as=self.base_model)

    async def run(self) -> None:
        """Follow the models until cancelled."""
        while True:
            await self._watch.changed.wait()
            self._watch.changed.clear()
            followed = self._watch.followed()
            for model_id in self._models.keys() - followed.keys():
                logger.info("model %s is served no longer", model_id)
                gone = self._models.pop(model_id)
                await gone.end()
                await asyncio.to_thread(gone.cache.remove)
            for model_id, one in followed.items():
                if model_id not in self._models:
                    logger.info("serving model %s (%s/%s)", model_id, one.view.project, one.view.name)
                    self._models[model_id] = self._served(one)
            self._known = True  # they are not acked yet, one after the other, but can be asked for
            for model_id, one in followed.items():
                await self._models[model_id].update(one)
            async with self._moved:
                self._moved.notify_all()

    async def stop(self) -> None:
        """Take all acks back, and disconnect. After `run` was cancelled; requests under way continue."""
        self._ending = True
        models, self._models = self._models, {}
        with suppress(TimeoutError):  # Kafka does not answer: the engine falls silent instead
            async with deadline(STOP_SECONDS):
                await asyncio.gather(*[model.end() for model in models.values()])
                await self._acks(self.base_model).retract()
        await self._topic.stop()

    @asynccontextmanager
    async def policy(self, name: str) -> AsyncIterator[Policy]:
        """The policy that a client names; it stays as long as the block runs.

        Raises:
            NoSuchPolicyError: there is none of that name; says what there is.
            PolicyNotReadyError: it is not loaded yet, or could not be.
        """
        if name == self.base_model:
            yield Policy(model_id=name, version=0, weights=None, switches={})
            return
        model_id, at, version = name.partition("@")
        model = await self._find(model_id)
        if model is None:
            if self._ending:
                raise PolicyNotReadyError("the engine is ending: ask another one")
            if not self.ready:
                raise PolicyNotReadyError("the engine has not read all models yet: try again")
            # Their names belong to several accounts, and this text may be passed on.
            raise NoSuchPolicyError(f"there is no model {model_id[:200]!r} here: GET /v1/models lists what there is")
        if at and not (version.isascii() and version.isdigit() and len(version) < 19):
            raise NoSuchPolicyError(f"{name!r}: what follows the @ is a policy version, a number")
        async with model.policy(int(version) if at else None) as policy:
            yield policy

    async def _find(self, wanted: str) -> ServedModel | None:
        """A model, by its id or its name; one that was just created is on its way here."""
        if self._named(wanted) is None:
            with suppress(TimeoutError):
                async with deadline(NEWS_SECONDS), self._moved:
                    await self._moved.wait_for(lambda: self._named(wanted) is not None or self._ending)
        return self._named(wanted)

    def _named(self, wanted: str) -> ServedModel | None:
        if wanted in self._models:
            return self._models[wanted]
        with suppress(UnknownModelError):
            views = [model.view for model in self._models.values()]
            return self._models[pick_model(views, wanted, account=self._settings.account).model_id]
        return None

    def _served(self, followed: Followed) -> ServedModel:
        model_id = followed.view.model_id
        cache = WeightCache(self._store, self._root / quote(model_id, safe=""), self._keep + 1)
        return ServedModel(
            followed,
            held=HeldVersions(self._engine, self._batcher, self._keep),
            cache=cache,
            acks=self._acks(model_id),
            ledger=self._weights_in_ledger,
        )

    def _acks(self, model_id: str) -> EngineAcks:
        identity = self._identity
        key = f"{identity.engine_id}:{model_id}"
        return EngineAcks(self._topic, engine_id=key, base_url=identity.base_url, deployment=identity.deployment)

    async def _weights_in_ledger(self, model_id: str, incarnation: str, version: int) -> WeightsRef | None:
        shadow_of = self._models[model_id].view.shadow_of
        only = StepRange(first=version, last=version)
        found = await read_ledger(self._settings, model_id, incarnation=incarnation, steps=only, shadow_of=shadow_of)
        return next((record.weights for record in found if record.policy_version_after == version), None)
