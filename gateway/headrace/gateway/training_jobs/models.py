"""`/v1/preview/models`: a model is made by a command to the owner of its lane, and is there when the command is committed.

Guarantees: the same entity, project and name are the same model, also when two gateways are asked at once: one request makes it, and the
others are answered as if they came later (409, or the model with `return_existing`). A setting that no model has is rejected with its path.
Limitations: no request waits for a worker; without one a model is there, and takes jobs. A model that the command line makes at the very
moment of a request has the settings of the first command in the log.
"""

import uuid
from itertools import islice
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace.core.lanes import lane_of
from headrace.core.model_views import ModelView
from headrace.core.models import ModelRefusedError, check_new_model, living_model, model_id_of
from headrace.core.settings import Settings
from headrace.gateway.access import KnownCaller
from headrace.gateway.gate import Gate, OpenGate
from headrace.gateway.log_writer import OvertakenError, Turn, sealed
from headrace.gateway.problems import FaultError, ProblemError, UnprocessableError
from headrace.gateway.reach import Reach
from headrace.gateway.tables import is_model
from headrace.gateway.training_jobs.checkpoints import checkpoints_of
from headrace.gateway.training_jobs.config import MOST, unreachable
from headrace.gateway.training_jobs.events import model_of
from headrace.schemas.base import unknown_fields
from headrace.schemas.commands import CreateModel, DeleteModel
from headrace.schemas.envelope import header_text
from headrace.schemas.training import ModelSettings

router = APIRouter(prefix="/v1/preview/models", tags=["training-jobs: models"])


class ModelRequest(BaseModel):
    """What is to be trained, and from what."""

    model_config = ConfigDict(extra="ignore")

    entity: str | None = None
    """Null: the account of the key."""
    project: str
    name: str
    base_model: str
    """Of the catalogue (`base_models` of the gateway's settings)."""
    return_existing: bool = False
    """A model with that name is returned whatever its settings are."""
    config: dict[str, Any] | None = Field(default=None, description="Headrace's own: fields of `ModelSettings` but for `base_model`.")


class ModelResponse(BaseModel):
    """A model."""

    id: str
    entity: str
    project: str
    name: str
    base_model: str
    run_id: str | None = None


class DeletedModel(BaseModel):
    """What a deletion took away."""

    model_id: str
    deleted_checkpoints: int
    deleted_run: bool = False


@router.post("")
async def create_model(request: ModelRequest, caller: KnownCaller, gate: OpenGate) -> ModelResponse:
    """Make a model, or find it."""
    account = caller.account if request.entity is None else request.entity
    if not caller.sees(account, request.project):
        raise ProblemError(404, f"this key sees no entity {account[:80]!r} with a project {request.project[:80]!r}")
    settings = _settings_of(request, gate.settings)
    command = CreateModel(
        model_id=model_id_of(account, request.project, request.name),
        account=account,
        project=request.project,
        name=request.name,
        settings=settings,
        worker_group=gate.settings.worker.group,
    )
    _check(gate, command)
    tables = await gate.view.fresh()
    view = _existing(tables.model(command.model_id), command, request)
    if view is None:
        own = Reach.of(gate, tables, caller)
        if faults := [FaultError(["body", "config", "train", name], said) for name, said in unreachable(settings.train, own)]:
            raise UnprocessableError(faults)
        made = await _make(gate, command)
        view = _existing(tables.model(command.model_id), command, request)
    else:
        made = False
    if view is not None and not made and not request.return_existing:
        raise ProblemError(
            409, f"there is a model {request.name!r} in project {request.project!r}: take another name, or ask with return_existing=true"
        )
    if view is None:
        raise ProblemError(409, f"model {request.name!r} was deleted by someone else at the same time: create it again")
    return ModelResponse(id=view.model_id, entity=view.account, project=view.project, name=view.name, base_model=view.settings.base_model)


@router.delete("/{model_id}")
async def delete_model(model_id: str, caller: KnownCaller, gate: OpenGate) -> DeletedModel:
    """Delete a model: it takes no more jobs, those that wait are cancelled, its checkpoints are listed no more."""
    tables = await gate.view.fresh()
    view = model_of(tables, caller, model_id)
    gone = len(checkpoints_of(tables, view))
    command, lane = DeleteModel(model_id=model_id), lane_of(view.shadow_of or model_id, gate.view.lanes)
    record = sealed(command, topic=gate.settings.topic_names.commands, key=model_id, partition=lane)
    await gate.writer.commit([record], is_in=lambda: not is_model(gate.view.tables.model(model_id)))
    return DeletedModel(model_id=model_id, deleted_checkpoints=gone)


async def _make(gate: Gate, command: CreateModel) -> bool:
    """Write the command that makes a model; False: another request made it in the meantime."""
    topic = gate.settings.topic_names.commands
    turn = Turn(of=f"model/{command.model_id}", still=lambda: not is_model(gate.view.tables.model(command.model_id)), others_write=topic)
    lane, own_id = lane_of(command.model_id, gate.view.lanes), str(uuid.uuid4())
    record = sealed(command, topic=topic, key=command.model_id, partition=lane, event_id=own_id)

    def is_in() -> bool:
        # By its own id: the same command of another request makes the model too, and is answered itself.
        written = gate.view.tables.commands.get(command.model_id, [])
        return any(header_text(one.headers).get("ce_id") == own_id for one in written)

    try:
        await gate.writer.commit([record], is_in=is_in, turn=turn)
    except OvertakenError:
        return False
    return True


def _settings_of(request: ModelRequest, settings: Settings) -> ModelSettings:
    given = dict(request.config or {})
    entry = settings.base_models.get(request.base_model)
    if entry is not None and "lora" not in entry.trainable:
        given.setdefault("adaptation", entry.trainable[0] if entry.trainable else "lora")
    said = given.pop("base_model", request.base_model)
    if said != request.base_model:
        raise UnprocessableError([FaultError(["body", "config", "base_model"], f"base_model is {request.base_model!r}: leave it out here")])
    try:
        found = ModelSettings.model_validate({**given, "base_model": request.base_model})
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False, include_context=False)
        raise UnprocessableError(
            [
                FaultError(
                    ["body", *(fault["loc"] if fault["loc"][:1] == ("base_model",) else ("config", *fault["loc"]))],
                    fault["msg"],
                    fault["type"],
                )
                for fault in faults
            ]
        ) from None
    if unknown := list(islice(unknown_fields(found), MOST)):
        raise UnprocessableError(
            [FaultError(["body", "config", *path], "no such setting of a model", "extra_forbidden") for path in unknown]
        )
    return found


def _check(gate: Gate, command: CreateModel) -> None:
    try:
        check_new_model(gate.settings, command.settings, account=command.account, project=command.project, name=command.name)
    except ModelRefusedError as error:
        where = {"account": ["entity"], "adaptation": ["config", "adaptation"]}.get(error.field or "", [error.field or "name"])
        raise UnprocessableError([FaultError(["body", *where], str(error))]) from error
    faults = [
        FaultError(["body", field], f"{value!r} holds one of / : @, which part the names under which its versions are served")
        for field, value in (("project", command.project), ("name", command.name))
        if set(value) & set("/:@")
    ]
    if faults:
        raise UnprocessableError(faults)


def _existing(known: ModelView | None, command: CreateModel, request: ModelRequest) -> ModelView | None:
    if known is not None and is_model(known) and request.return_existing and known.shadow_of is None:
        return known
    try:
        return living_model(known, command)
    except ModelRefusedError as error:
        raise ProblemError(409, f"{error}; or ask with return_existing=true for the one that is there") from error
