"""`/v1/preview/models/{id}/checkpoints`: the versions of a model whose weights can be had, step 0 (the base model) included.

Guarantees: ids are the same in every gateway and after every start; a version is listed as soon as its step is committed; a deleted one is
neither listed nor served by its name as soon as the answer is given. Deleting the newest is allowed: the model continues from it, and its
name without a step still means it. Limitations: deleting at once what recovery may still need; the lane's owner deletes files when nothing
needs them.
"""

import uuid
from typing import Annotated, Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field

from headrace.core.lanes import lane_of
from headrace.core.model_views import ModelView
from headrace.gateway.access import KnownCaller
from headrace.gateway.gate import OpenGate
from headrace.gateway.log_writer import sealed
from headrace.gateway.step_history import whole_steps
from headrace.gateway.tables import Tables, is_model
from headrace.gateway.training_jobs.events import incarnation, is_deleted, model_of
from headrace.gateway.training_jobs.pages import DEFAULT_LIMIT, After, Limit, Listed, Page, page
from headrace.schemas.commands import DeleteCheckpoints
from headrace.schemas.gateway import DeletedCheckpoint, checkpoint_key
from headrace.schemas.state import offset_ranges

router = APIRouter(prefix="/v1/preview/models/{model_id}/checkpoints", tags=["training-jobs: checkpoints"])

_NAMESPACE = uuid.UUID("c8a54d4f-6f0e-5a57-9a0d-58a3a6d0f1c2")
_MOST_STEPS = 10_000


class Checkpoint(Listed):
    """A version."""

    step: int
    metrics: dict[str, float]


@router.get("")
async def list_checkpoints(
    model_id: str,
    caller: KnownCaller,
    gate: OpenGate,
    *,
    after: After = None,
    limit: Limit = DEFAULT_LIMIT,
    order: Literal["asc", "desc"] = "asc",
) -> Page[Checkpoint]:
    """The checkpoints of a model by step."""
    tables = await gate.view.fresh()
    model = model_of(tables, caller, model_id)
    found = checkpoints_of(tables, model)
    cut = page(found if order == "asc" else found[::-1], after=after, limit=limit)
    whole = await whole_steps(gate.settings, tables.history(model), [item.step for item in cut.data])
    data = [item.model_copy(update={"metrics": dict(whole[item.step].metrics)}) if item.step in whole else item for item in cut.data]
    return cut.model_copy(update={"data": data})


class DeletedCheckpoints(BaseModel):
    """What a deletion came to."""

    deleted_count: int
    not_found_steps: list[int]


class DeleteRequest(BaseModel):
    """Which steps."""

    steps: list[Annotated[int, Field(ge=0)]] = Field(max_length=_MOST_STEPS)


@router.delete("")
async def delete_checkpoints(model_id: str, request: DeleteRequest, caller: KnownCaller, gate: OpenGate) -> DeletedCheckpoints:
    """Delete versions: they are listed and served no more, and their files go when no step that may have to be run again needs them."""
    tables = await gate.view.fresh()
    model = model_of(tables, caller, model_id)
    own = incarnation(model)
    listed = {checkpoint.step for checkpoint in checkpoints_of(tables, model)}
    asked = sorted(set(request.steps))
    steps = [step for step in asked if step in listed]
    if steps:
        records = [
            sealed(
                DeletedCheckpoint(model_id=model_id, incarnation=own, step=step, owner=caller.owner),
                topic=gate.settings.topic_names.gateway,
                key=checkpoint_key(model_id, own, step),
            )
            for step in steps
        ]
        if files := _whose_files_go(tables, model, steps):
            command = DeleteCheckpoints(
                model_id=model_id, incarnation=own, steps=tuple((span.first, span.last) for span in offset_ranges(files))
            )
            lane = lane_of(model.shadow_of or model_id, gate.view.lanes)
            records.append(sealed(command, topic=gate.settings.topic_names.commands, key=model_id, partition=lane))
        last = checkpoint_key(model_id, own, steps[-1])
        await gate.writer.commit(records, is_in=lambda: last in gate.view.tables.facts)
    return DeletedCheckpoints(deleted_count=len(steps), not_found_steps=[step for step in asked if step not in listed])


def _whose_files_go(tables: Tables, model: ModelView, steps: list[int]) -> list[int]:
    """Without the base model, which is no file of Headrace, and without what another model begins with: it may have to begin again."""
    begun = {view.start_weights.uri for view in tables.models() if view.start_weights is not None and is_model(view)}
    history = tables.history(model)
    entries = [entry for step in steps if (entry := history.find(step)) is not None]
    return [entry.step for entry in entries if entry.weights.uri not in begun]


def checkpoints_of(tables: Tables, model: ModelView) -> list[Checkpoint]:
    """Those that are listed, by step, without their metrics."""
    own = incarnation(model)
    listed = [step for step in (0, *tables.history(model).numbers) if not is_deleted(tables, model, step)]
    return [Checkpoint(id=str(uuid.uuid5(_NAMESPACE, f"{own}/{step}")), step=step, metrics={}) for step in listed]
