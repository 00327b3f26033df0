"""`/v1/preview/models/{id}/checkpoints`: the versions of a model whose weights can be had, step 0 (the base model) included.

Guarantees: ids are the same in every gateway and after every start; a version is listed as soon as its step is committed; a deleted one is
listed no more as soon as the answer is given. Deleting the newest is allowed: it is listed and served no more, the model goes on from it.
Gives up: deleting at once what recovery may still need; the lane's owner deletes files when nothing needs them.
"""

import uuid
from typing import Literal

from fastapi import APIRouter

from headrace.core.model_views import ModelView
from headrace.gateway.access import KnownCaller
from headrace.gateway.gate import OpenGate
from headrace.gateway.tables import Tables
from headrace.gateway.training_jobs.pages import DEFAULT_LIMIT, After, Limit, Listed, Page, page
from headrace.gateway.training_jobs.seen import incarnation, model_of

router = APIRouter(prefix="/v1/preview/models/{model_id}/checkpoints", tags=["training-jobs: checkpoints"])

_NAMESPACE = uuid.UUID("c8a54d4f-6f0e-5a57-9a0d-58a3a6d0f1c2")


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
    found = checkpoints_of(tables, model_of(tables, caller, model_id))
    return page(found if order == "asc" else found[::-1], after=after, limit=limit)


def checkpoints_of(tables: Tables, model: ModelView) -> list[Checkpoint]:
    """Those that are listed, by step."""
    own = incarnation(model)

    def checkpoint(step: int, metrics: dict[str, float]) -> Checkpoint:
        return Checkpoint(id=str(uuid.uuid5(_NAMESPACE, f"{own}/{step}")), step=step, metrics=metrics)

    return [checkpoint(0, {}), *(checkpoint(entry.step, entry.metrics) for entry in tables.history(model))]
