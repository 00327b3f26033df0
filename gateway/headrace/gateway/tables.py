"""What the gateway knows: tables over the topics, kept by applying committed records in order. Pure; `log_view` reads the log.

Guarantees: the same records give the same tables in every gateway; a view of a model or a job folds the commands over it that no owner has
read yet (exactly-once rule 16), at the cost of that one model or job; a record that can't be read is counted and left out, since a gateway
that does not start serves no one. `step_history` says how much of a model's steps is held.
"""

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf

from aiokafka import ConsumerRecord
from pydantic import BaseModel

from headrace.core.errors import HeadraceError
from headrace.core.job_views import JobView, fold_jobs, open_document
from headrace.core.kept import NotOursError, open_kept
from headrace.core.model_views import ModelView, at_home, command_of, fold, latest_states, open_state
from headrace.gateway.step_history import StepHistory
from headrace.schemas.events import TrainingEvent
from headrace.schemas.gateway import FACTS
from headrace.schemas.state import LaneState, StepRecord
from headrace.schemas.topics import (
    COMMANDS as COMMANDS_TOPIC,
)
from headrace.schemas.topics import (
    GATEWAY,
    JOBS,
    MODELS,
    STEPS,
    TRAINING_EVENTS,
    WEIGHT_ACKS,
    WEIGHTS,
    lane_key,
)
from headrace.schemas.weights import EngineAlive, WeightsApplied, WeightsFailed, WeightsPublished, alive_key

logger = logging.getLogger(__name__)

FOLLOWED = (MODELS, COMMANDS_TOPIC, JOBS, GATEWAY, STEPS, WEIGHTS, WEIGHT_ACKS, TRAINING_EVENTS)
"""Topics that the tables are made of, without their prefix."""
_EVENTS_KEPT = 1000
_ACKS_KEPT = 1000
_CHANGES_KEPT = 5000
_EVENT_KINDS: tuple[type[BaseModel], ...] = TrainingEvent.__args__


@dataclass(slots=True)
class Tables:
    """All of it. Read through the methods; the dictionaries are theirs."""

    states: dict[str, ConsumerRecord] = field(default_factory=dict)
    """Of `models`, by key: models and lanes."""
    commands: dict[str, list[ConsumerRecord]] = field(default_factory=lambda: defaultdict(list))
    """By model id; those that an owner has read are dropped when they are looked at."""
    documents: dict[str, ConsumerRecord] = field(default_factory=dict)
    """Of `jobs`, by job id."""
    facts: dict[str, BaseModel] = field(default_factory=dict)
    """Of `gateway`, by key."""
    kinds: dict[str, dict[str, BaseModel]] = field(default_factory=lambda: defaultdict(dict))
    """The same by the first part of their keys."""
    steps: dict[str, StepHistory] = field(default_factory=dict)
    """The ledger of each model's latest incarnation."""
    published: dict[str, WeightsPublished] = field(default_factory=dict)
    acks: dict[str, WeightsApplied | WeightsFailed] = field(default_factory=dict)
    """The last of each engine."""
    acked: dict[str, deque[WeightsApplied | WeightsFailed]] = field(default_factory=dict)
    """By model id, in the order of the log: those that it still had at start, and all since."""
    alive: dict[str, float] = field(default_factory=dict)
    """When an engine said last that it lives, by its name: seconds since the epoch, by our clock for what came since we follow the log."""
    follows: bool = False
    """Whether records come as they are written; before, those from before the start are read."""
    as_of: float = 0.0
    """When it was last known that nothing is missing: while Kafka is away no one can say anything."""
    silence_seconds: float = inf
    """Of an engine that counts as silent."""
    events: deque[BaseModel] = field(default_factory=lambda: deque(maxlen=_EVENTS_KEPT))
    """The latest events, for the process that looks on."""
    changes: deque[tuple[str, str]] = field(default_factory=lambda: deque(maxlen=_CHANGES_KEPT))
    """(topic without prefix, key) of the latest records, for the process that looks on."""
    changed: int = 0
    """Records so far."""
    lanes: int = 0
    """Partitions of the lane topics; 0: not known yet."""
    unreadable: int = 0

    def apply(self, name: str, record: ConsumerRecord) -> None:
        """Take one record of the topic `name` (without prefix) in."""
        self.changes.append((name, _key(record)))
        self.changed += 1
        try:
            _APPLY[name](self, record)
        except HeadraceError as error:
            self.unreadable += 1
            logger.warning("left out: %s", error)

    def model(self, model_id: str) -> ModelView | None:
        """A model as it stands, with the commands that no owner has read; None: no one asked for it."""
        waiting = self._unread(model_id)
        state = self.states.get(model_id)
        if state is None and not waiting:
            return None
        return fold(latest_states(self._with_lane(state, waiting)), waiting).get(model_id)

    def models(self) -> Iterable[ModelView]:
        """All models, deleted ones too."""
        for model_id in {*(key for key in self.states if not key.startswith("lane:")), *self.commands}:
            if (view := self.model(model_id)) is not None:
                yield view

    def job(self, job_id: str) -> JobView | None:
        """A job as it stands, with the commands that no owner has read."""
        document = self.documents.get(job_id)
        if document is None:
            return None
        bare = fold_jobs([], [], [document])[job_id]
        waiting = self._unread(bare.model_id)
        state = self.states.get(bare.model_id)
        return fold_jobs(self._with_lane(state, waiting), waiting, [document])[job_id]

    def jobs(self) -> Iterable[JobView]:
        """All jobs, in no order."""
        for job_id in list(self.documents):
            if (view := self.job(job_id)) is not None:
                yield view

    def facts_under(self, prefix: str) -> list[BaseModel]:
        """The gateway's facts whose key begins so (with `<kind>/` at least), in the order of their keys."""
        of_kind = self.kinds.get(prefix.partition("/")[0], {})
        return [of_kind[key] for key in sorted(key for key in of_kind if key.startswith(prefix))]

    def history(self, model: ModelView) -> StepHistory:
        """The committed steps of a model that lives; none of an incarnation before it."""
        incarnation = model.incarnation or ""
        found = self.steps.get(model.model_id)
        return found if found is not None and found.incarnation == incarnation else StepHistory(incarnation, 0)

    def is_silent(self, ack: WeightsApplied | WeightsFailed) -> bool:
        """Whether the engine of an ack has not said for long that it lives; one that never says so is not."""
        said = self.alive.get(engine_of(ack))
        return said is not None and self.as_of - said > self.silence_seconds

    def _with_lane(self, state: ConsumerRecord | None, waiting: list[ConsumerRecord]) -> list[ConsumerRecord]:
        found = [] if state is None else [state]
        lane = state.partition if state is not None else waiting[0].partition if waiting else None
        owner = None if lane is None else self.states.get(lane_key(lane))
        return found if owner is None else [*found, owner]

    def _unread(self, model_id: str) -> list[ConsumerRecord]:
        found = self.commands.get(model_id)
        if not found:
            return []
        owner = self.states.get(lane_key(found[0].partition))
        lane = None if owner is None else open_state(owner)
        through = lane.commands_through if isinstance(lane, LaneState) else 0
        if found[0].offset < through:
            found[:] = [record for record in found if record.offset >= through]
            if not found:
                del self.commands[model_id]
        return list(found)


def _state(tables: Tables, record: ConsumerRecord) -> None:
    key = _key(record)
    if record.value is None:
        tables.states.pop(key, None)
    else:
        if not at_home(open_state(record), record.partition, tables.lanes):  # what can't be read is not kept
            raise NotOursError(record, "it does not belong to this partition", claims=False)
        tables.states[key] = record


def _command(tables: Tables, record: ConsumerRecord) -> None:
    if (command := command_of(record)) is None:
        raise NotOursError(record, "its lane dead-letters it", claims=False)
    tables.commands.setdefault(command.model_id, []).append(record)


def _document(tables: Tables, record: ConsumerRecord) -> None:
    if record.value is None:
        tables.documents.pop(_key(record), None)
    else:
        document = open_document(record)
        before = tables.documents.get(_key(record))
        # Two gateways that write one job within milliseconds: what its lane has said since is not covered by the second's beginning.
        if before is None or open_document(before).moves <= document.moves:
            tables.documents[_key(record)] = record


def _fact(tables: Tables, record: ConsumerRecord) -> None:
    key = _key(record)
    of_kind = tables.kinds[key.partition("/")[0]]
    if record.value is None:
        tables.facts.pop(key, None)
        of_kind.pop(key, None)
    else:
        tables.facts[key] = of_kind[key] = open_kept(record, FACTS)


def _step(tables: Tables, record: ConsumerRecord) -> None:
    step = open_kept(record, (StepRecord,))
    assert isinstance(step, StepRecord)  # noqa: S101 - narrows the type
    if step.lane != record.partition:
        raise NotOursError(record, "it does not belong to this partition", claims=False)
    history = tables.steps.get(step.model_id)
    if history is None or history.incarnation != step.incarnation:
        history = tables.steps[step.model_id] = StepHistory(step.incarnation, record.partition)
    history.append(step, record.offset)


def _weights(tables: Tables, record: ConsumerRecord) -> None:
    if record.value is None:
        tables.published.pop(_key(record), None)
        return
    published = open_kept(record, (WeightsPublished,))
    assert isinstance(published, WeightsPublished)  # noqa: S101 - narrows the type
    tables.published[published.model_id] = published


def _ack(tables: Tables, record: ConsumerRecord) -> None:
    if record.value is None:
        tables.acks.pop(_key(record), None)
        tables.alive.pop(_key(record).removeprefix(alive_key("")), None)
        return
    ack = open_kept(record, (WeightsApplied, WeightsFailed, EngineAlive))
    if isinstance(ack, EngineAlive):
        # From before the start it says when by its own clock, which may be ahead: no one has spoken in the future.
        now = time.time()
        tables.alive[ack.engine_id] = now if tables.follows else min(record.timestamp / 1000, now)
        return
    assert isinstance(ack, WeightsApplied | WeightsFailed)  # noqa: S101 - narrows the type
    tables.acks[ack.engine_id] = ack
    tables.acked.setdefault(ack.model_id, deque(maxlen=_ACKS_KEPT)).append(ack)


def _event(tables: Tables, record: ConsumerRecord) -> None:
    tables.events.append(open_kept(record, _EVENT_KINDS))


def _key(record: ConsumerRecord) -> str:
    return (record.key or b"").decode(errors="replace")


_APPLY: dict[str, Callable[[Tables, ConsumerRecord], None]] = {
    MODELS: _state,
    COMMANDS_TOPIC: _command,
    JOBS: _document,
    GATEWAY: _fact,
    STEPS: _step,
    WEIGHTS: _weights,
    WEIGHT_ACKS: _ack,
    TRAINING_EVENTS: _event,
}


def engine_of(ack: WeightsApplied | WeightsFailed) -> str:
    """The name of the engine that an ack is of; one that serves several models has an ack for each."""
    return ack.engine_id.removesuffix(f":{ack.model_id}")


def is_model(view: ModelView | None) -> bool:
    """Whether there is a model to speak of: known, and neither deleted nor about to be."""
    return view is not None and view.status not in {"deleted", "deleting"}
