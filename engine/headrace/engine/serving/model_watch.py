"""Which models an engine should serve, and the latest version of each: `models`, `commands` and `weights`, followed by one consumer.

An engine of a deployment follows `gateway` too: requests to load a version there count like published versions that name the deployment,
and what is requested is served even where its model was deleted: the name of a version outlives the job that made it.

Guarantees: a model is seen as soon as the command that creates it is in the log, also with no worker alive; nothing is said before all that
was written at the start has been read, so an engine that starts late goes to the latest versions only; it lives through broker outages.
A version counts only if it is of the incarnation that the model's owner wrote last. What is not ours in these topics is left out, and the
log says so. Limitations: telling a model's first version from its creation in one look, since topics have no order between them.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from aiokafka import ConsumerRecord

from headrace.consumers.subscribers.weight_feed import DeploymentOwner, WeightTarget
from headrace.core.commands import commands_through
from headrace.core.errors import HeadraceError
from headrace.core.kafka import ClientOptions, client_options
from headrace.core.kafka_outage import kafka_back, log_trouble
from headrace.core.kept import kept_or_none
from headrace.core.model_views import ModelView, fold, kept_states
from headrace.core.reading import follow_all
from headrace.core.settings import Settings
from headrace.schemas.deployments import DeployedModel, HotLoad
from headrace.schemas.gateway import FACTS
from headrace.schemas.weights import WeightsPublished

logger = logging.getLogger(__name__)

_LONGEST_PAUSE = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """A model that is to be served."""

    view: ModelView
    published: WeightsPublished | None
    """Its latest version; None: version 0."""

    @property
    def incarnation(self) -> str:
        """Of the model; empty until its owner has read the command that created it."""
        return self.view.incarnation or ""


@dataclass(slots=True)
class _Lane:
    """One partition of `models` and of `commands`."""

    states: list[ConsumerRecord] = field(default_factory=list)
    commands: dict[int, ConsumerRecord] = field(default_factory=dict)
    views: dict[str, ModelView] = field(default_factory=dict)
    stale: bool = False
    """Records came since `views` were made."""


class ModelWatch:
    """Follows the models of one base model.

    Args:
        settings: Kafka and topics.
        base_model: Name in the catalogue.
        models: Only these ids; empty: all.
        deployment: Only models of its account of which a version names it, or that it was asked to load; None: all.
        client_id: Of the Kafka client.
    """

    def __init__(
        self, settings: Settings, base_model: str, *, models: Collection[str] = (), deployment: str | None = None, client_id: str
    ) -> None:
        self._options: ClientOptions = client_options(settings.kafka, client_id)
        self._topics = settings.topic_names
        self._base_model = base_model
        self._wanted = frozenset(models)
        self._deployment = deployment
        self._lanes: dict[int, _Lane] = defaultdict(_Lane)
        self._targets: dict[str, WeightTarget] = {}
        self._owner = None if deployment is None else DeploymentOwner(deployment)
        self._requests: dict[bytes, HotLoad | DeployedModel] = {}
        """What the deployment was asked to load, by the key of the request."""
        self.caught_up = asyncio.Event()
        """Set once all that was written at the start has been read."""
        self.changed = asyncio.Event()
        """Set when `followed` may have changed, not before it is caught up; the process that acts on it clears it."""

    async def run(self) -> None:
        """Follow until cancelled."""
        pause = 1.0
        while True:
            try:
                topics = [self._topics.models, self._topics.commands, self._topics.weights]
                if self._deployment is not None:
                    topics.append(self._topics.gateway)
                async with aclosing(follow_all(self._options, topics, self.caught_up)) as batches:
                    tell = asyncio.create_task(self._tell_when_caught_up())
                    try:
                        async for batch in batches:
                            pause = 1.0
                            self.observe(batch)
                    finally:
                        tell.cancel()
            except HeadraceError as error:
                log_trouble(logger, logging.WARNING, error, "following the models: %s; again in %g s", error, pause)
                await asyncio.sleep(pause)  # a pause between attempts, no synchronisation
                await kafka_back()
                pause = min(2 * pause, _LONGEST_PAUSE)

    def observe(self, batch: Sequence[ConsumerRecord]) -> None:
        """Take records of one partition in; again is harmless."""
        for record in batch:
            if record.topic == self._topics.commands:
                lane = self._lanes[record.partition]
                lane.commands[record.offset] = record
                lane.stale = True
            elif record.key is None:
                continue
            elif record.topic == self._topics.models:
                lane = self._lanes[record.partition]
                lane.states.append(record)
                lane.stale = True
            elif record.topic == self._topics.weights:
                model_id = record.key.decode(errors="replace")
                if model_id not in self._targets:
                    self._targets[model_id] = WeightTarget(model_id=model_id, deployment=self._deployment)
                self._targets[model_id].observe([record])
            elif record.topic == self._topics.gateway:
                self._ask(record)
                if self._owner is not None:
                    self._owner.observe([record])
        if self.caught_up.is_set():
            self.changed.set()

    def followed(self) -> dict[str, Followed]:
        """The models that are to be served, by id."""
        for number, lane in self._lanes.items():
            if lane.stale:
                _fold(number, lane)
        found = {}
        for lane in self._lanes.values():
            for model_id, view in lane.views.items():
                published = self._published(view)
                if self._concerns(view, published):
                    found[model_id] = Followed(view=view, published=published)
        return found

    def _ask(self, record: ConsumerRecord) -> None:
        """Take in a fact of the gateway's, if it asks this deployment to load something."""
        self._requests.pop(record.key, None)
        if record.value is None:
            return
        fact = kept_or_none(record, FACTS)
        removed = isinstance(fact, DeployedModel) and fact.removed_at is not None
        if isinstance(fact, HotLoad | DeployedModel) and fact.deployment == self._deployment and not removed:
            self._requests[record.key] = fact

    def _published(self, view: ModelView) -> WeightsPublished | None:
        target = self._targets.get(view.model_id)
        said = [] if target is None or target.target is None or not self._is_owned(view.account) else [target.target]
        said += [request for request in self._requested() if request.model_id == view.model_id]
        of_now = [published for published in said if published.incarnation == view.incarnation]
        return max(of_now, key=lambda published: published.policy_version, default=None)

    def _concerns(self, view: ModelView, published: WeightsPublished | None) -> bool:
        if view.settings.base_model != self._base_model:
            return False
        if view.status in {"deleting", "deleted"} and not self._is_requested(view):
            return False
        if self._deployment is not None and published is None:
            return False
        return not self._wanted or view.model_id in self._wanted

    def _is_requested(self, view: ModelView) -> bool:
        wanted = (view.model_id, view.incarnation)
        return any((request.model_id, request.incarnation) == wanted for request in self._requested())

    def _requested(self) -> list[WeightsPublished]:
        """What the deployment's own account asks for."""
        return [request.published for request in self._requests.values() if self._is_owned(request.account)]

    def _is_owned(self, account: str) -> bool:
        return self._owner is None or self._owner.account in {None, account}

    async def _tell_when_caught_up(self) -> None:
        await self.caught_up.wait()
        self.changed.set()


def _fold(number: int, lane: _Lane) -> None:
    lane.stale = False
    kept = kept_states(lane.states)
    lane.states = [record for record, _ in kept]
    states = [state for _, state in kept]
    through = commands_through(states).get(number, 0)
    lane.commands = {offset: record for offset, record in sorted(lane.commands.items()) if offset >= through}
    lane.views = fold(states, lane.commands.values())
