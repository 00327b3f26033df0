"""What is known of models: states in `models`, with the commands folded over them that no owner has read yet. Pure; `models` reads the log.

A command counts as unread if its offset is not below its lane's `commands_through`; the last of them by offset wins.
"""

import uuid
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal, cast

from aiokafka import ConsumerRecord

from headrace.core.kept import latest_kept, open_kept
from headrace.core.lanes import lane_of
from headrace.core.polling import leave_out
from headrace.schemas.commands import COMMANDS, Command, CreateModel, DeleteModel, ResumeModel
from headrace.schemas.envelope import header_text, open_record
from headrace.schemas.reasons import CodecError
from headrace.schemas.state import LaneState, ModelState
from headrace.schemas.training import ModelSettings
from headrace.schemas.weights import WeightsRef

_NAMESPACE = uuid.UUID("0f4c9a52-43cf-5d47-a1a5-6a2d3d2f4f0e")

State = ModelState | LaneState
STATES = (ModelState, LaneState)
"""What `models` carries."""
Status = Literal["creating", "active", "waiting", "stopped", "diverged", "resuming", "deleting", "deleted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """A model as it stands, with what was asked of it."""

    model_id: str
    account: str
    project: str
    name: str
    status: Status
    status_detail: str | None
    settings: ModelSettings
    worker_group: str
    created_at: datetime
    start_weights: WeightsRef | None = None
    """What its version 0 is; None: the base model."""
    shadow_of: str | None = None
    """The model of another worker group whose groups it trains on, and whose lane it is on."""
    state: ModelState | None
    """As its owner wrote it last; None until an owner has read the command."""
    command: tuple[int, int] | None = None
    """(lane, offset) of the last command that no owner has read yet."""

    @property
    def incarnation(self) -> str | None:
        """The one that lives; None while it is being created: a model that is created again still has the state of the one before it."""
        return None if self.state is None or self.status == "creating" else self.state.incarnation


def fold(states: Iterable[State], commands: Iterable[ConsumerRecord]) -> dict[str, ModelView]:
    """Views by model id, from `latest_states` and records of `commands`, each partition in offset order; what is not ours is left out."""
    views: dict[str, ModelView] = {}
    through: dict[int, int] = {}
    for state in states:
        if isinstance(state, LaneState):
            through[state.lane] = state.commands_through
        else:
            views[state.model_id] = _view(state)
    for record in commands:
        if record.offset < through.get(record.partition, 0):
            continue
        if (command := command_of(record)) is None:
            continue
        known = views.get(command.model_id)
        place = (record.partition, record.offset)
        if isinstance(command, CreateModel) and (known is None or known.status in {"deleted", "deleting"}):
            views[command.model_id] = replace(created_view(command), command=place)
        elif isinstance(command, DeleteModel) and known is not None and known.status != "deleted":
            views[command.model_id] = replace(known, status="deleting", command=place)
        elif isinstance(command, ResumeModel) and known is not None and known.status in {"stopped", "diverged"}:
            views[command.model_id] = replace(known, status="resuming", command=place)
    return views


def open_state(record: ConsumerRecord) -> State:
    """A record of `models`. Raises as `open_kept`."""
    return cast("State", open_kept(record, STATES))


def latest_states(records: Iterable[ConsumerRecord], *, strict: bool = False) -> list[State]:
    """The states that records of `models` come to. As `kept_states`."""
    return [state for _, state in kept_states(records, strict=strict)]


def kept_states(records: Iterable[ConsumerRecord], *, strict: bool = False) -> list[tuple[ConsumerRecord, State]]:
    """The records of `models` that count, opened; those on a lane which is not theirs are left out. Otherwise as `latest_kept`."""
    found = [(record, cast("State", state)) for record, state in latest_kept(records, STATES, strict=strict)]
    # A lane's owner writes the lane's own record with each state of a model.
    counts = {record.partition: state.partitions for record, state in found if isinstance(state, LaneState)}
    states = []
    for record, state in found:
        if at_home(state, record.partition, counts.get(record.partition)):
            states.append((record, state))
        else:
            leave_out(record, "it does not belong to this partition")
    return states


def at_home(state: State, partition: int, lanes: int | None) -> bool:
    """Whether a state belongs to the partition that it stands in; of a model, as far as the number of lanes is known."""
    if isinstance(state, LaneState):
        return state.lane == partition
    return not lanes or lane_of(state.shadow_of or state.model_id, lanes) == partition


def command_of(record: ConsumerRecord) -> Command | None:
    """A record of `commands`; None: its owner will dead-letter it."""
    try:
        command = cast("Command", open_record(record.value, header_text(record.headers), COMMANDS))
    except CodecError:
        return None
    return command if record.key == command.model_id.encode() else None


def _view(state: ModelState) -> ModelView:
    return ModelView(
        model_id=state.model_id,
        account=state.account,
        project=state.project,
        name=state.name,
        status=state.status if state.status != "active" or state.waiting_for is None else "waiting",
        status_detail=state.waiting_for or state.status_detail,
        settings=state.settings,
        worker_group=state.worker_group,
        created_at=state.created_at,
        start_weights=state.start_weights,
        shadow_of=state.shadow_of,
        state=state,
    )


def incarnation_of(model_id: str, offset: int) -> str:
    """The incarnation that a `CreateModel` at this offset of its lane makes: the process that applies it makes the same one."""
    return str(uuid.uuid5(_NAMESPACE, f"{model_id}/{offset}"))


def created_view(command: CreateModel) -> ModelView:
    """A model that only its command knows."""
    return ModelView(
        model_id=command.model_id,
        account=command.account,
        project=command.project,
        name=command.name,
        status="creating",
        status_detail=f"no worker of group {command.worker_group} has read the command yet",
        settings=command.settings,
        worker_group=command.worker_group,
        created_at=command.created_at,
        start_weights=command.start_weights,
        shadow_of=command.shadow_of,
        state=None,
    )
