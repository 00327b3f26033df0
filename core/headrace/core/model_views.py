"""What is known of models: states in `models`, with the commands folded over them that no owner has read yet. Pure; `models` reads the log.

A command counts as unread if its offset is not below its lane's `commands_through`; the last of them by offset wins.
"""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal, cast

from aiokafka import ConsumerRecord
from pydantic import BaseModel

from headrace.core.errors import HeadraceError
from headrace.core.reading import latest_by_key
from headrace.schemas.commands import COMMANDS, Command, CreateModel, DeleteModel, ResumeModel
from headrace.schemas.envelope import header_text, open_record
from headrace.schemas.errors import CodecError
from headrace.schemas.state import LaneState, ModelState
from headrace.schemas.training import ModelSettings
from headrace.schemas.weights import WeightsRef

_NAMESPACE = uuid.UUID("0f4c9a52-43cf-5d47-a1a5-6a2d3d2f4f0e")

Status = Literal["creating", "active", "stopped", "diverged", "resuming", "deleting", "deleted"]


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


def fold(states: list[ConsumerRecord], commands: list[ConsumerRecord]) -> dict[str, ModelView]:
    """Views by model id, from records of `models` and of `commands`, each partition in offset order.

    Raises:
        HeadraceError: a record of `models` can't be read.
    """
    views: dict[str, ModelView] = {}
    through: dict[int, int] = {}
    for record in latest_by_key(states).values():
        state = open_state(record)
        if isinstance(state, LaneState):
            through[state.lane] = state.commands_through
        else:
            views[state.model_id] = _view(state)
    for record in commands:
        if record.offset < through.get(record.partition, 0):
            continue
        try:
            command = cast("Command", open_record(record.value, header_text(record.headers), COMMANDS))
        except CodecError:
            continue  # its owner will dead-letter it
        known = views.get(command.model_id)
        place = (record.partition, record.offset)
        if isinstance(command, CreateModel) and (known is None or known.status in {"deleted", "deleting"}):
            views[command.model_id] = replace(created_view(command), command=place)
        elif isinstance(command, DeleteModel) and known is not None and known.status != "deleted":
            views[command.model_id] = replace(known, status="deleting", command=place)
        elif isinstance(command, ResumeModel) and known is not None and known.status in {"stopped", "diverged"}:
            views[command.model_id] = replace(known, status="resuming", command=place)
    return views


def open_state(record: ConsumerRecord) -> ModelState | LaneState:
    """A record of `models`. Raises as `open_kept`."""
    return cast("ModelState | LaneState", open_kept(record, (ModelState, LaneState)))


def open_kept(record: ConsumerRecord, kinds: Sequence[type[BaseModel]]) -> BaseModel:
    """A record of a topic that only our own workers write.

    Raises:
        HeadraceError: says where it is and what is wrong.
    """
    try:
        return open_record(record.value, header_text(record.headers), kinds)
    except CodecError as error:
        raise HeadraceError(f"{record.topic} partition {record.partition} offset {record.offset} can't be read: {error}") from error


def _view(state: ModelState) -> ModelView:
    return ModelView(
        model_id=state.model_id,
        account=state.account,
        project=state.project,
        name=state.name,
        status=state.status,
        status_detail=state.status_detail,
        settings=state.settings,
        worker_group=state.worker_group,
        created_at=state.created_at,
        start_weights=state.start_weights,
        shadow_of=state.shadow_of,
        state=state,
    )


def incarnation_of(model_id: str, offset: int) -> str:
    """The incarnation that a `CreateModel` at this offset of its lane makes: whoever applies it makes the same one."""
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
