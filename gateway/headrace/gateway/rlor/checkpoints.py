"""Checkpoints of an RLOR job: the versions of its model, oldest first; and `:promote`, which gives one a name as an output model.

A checkpoint is named `accounts/<account>/rlorTrainerJobs/<job>/checkpoints/<job>-v<version>`; its last part is enough to promote it.
Guarantees: also those of a deleted job are listed and can be promoted, for as long as it is known; promoting is done when it is answered.
Gives up: downloading them; the weights are in the store.
"""

import re
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import Field

from headrace.gateway.facts import write_fact
from headrace.gateway.gate import OpenGate
from headrace.gateway.log_writer import Turn
from headrace.gateway.problems import ProblemError
from headrace.gateway.rlor.bodies import object_of, read_as
from headrace.gateway.rlor.job_facts import KIND, Job, changing, find_job
from headrace.gateway.rlor.names import OwnAccount, id_in, name_of
from headrace.gateway.rlor.paging import page
from headrace.gateway.rlor.steps import output_model
from headrace.gateway.rlor.wire import Timestamp, Wire
from headrace.gateway.step_history import BriefStep, StepHistory
from headrace.gateway.tables import Tables
from headrace.schemas.rlor_resources import ModelAlias, model_alias_key

router = APIRouter(prefix="/v1/accounts/{account}", tags=["RLOR: jobs"])

_NAME = re.compile(r"^(?P<job>.+)-v(?P<version>[1-9]\d{0,8})$")


class Checkpoint(Wire):
    """A version of a job's model."""

    name: str
    create_time: Timestamp
    update_time: Timestamp
    checkpoint_type: str
    promotable: bool = True
    restore_reference: str
    """Ours: the folder of its weights in the object store."""


class CheckpointList(Wire):
    """A page of checkpoints."""

    checkpoints: list[Checkpoint]
    next_page_token: str | None = None
    total_size: int


class Promotion(Wire):
    """Body of `:promote`."""

    output_model: str = Field(min_length=1)
    trainer_job_id: str = ""
    base_model: str = ""
    async_promotion: bool = False
    hot_load_deployment_id: str = ""


class PromotedModel(Wire):
    """The model that a checkpoint became."""

    name: str
    state: str = "READY"
    kind: str


class Promoted(Wire):
    """Answer of `:promote`."""

    model: PromotedModel


_PROMOTION: dict[str, Any] = {"requestBody": {"required": True, "content": {"application/json": {"schema": Promotion.model_json_schema()}}}}


@router.get("/rlorTrainerJobs/{job_id}/checkpoints", response_model_exclude_none=True)
async def list_checkpoints(
    *,
    account: str,
    job_id: str,
    caller: OwnAccount,  # noqa: ARG001 - checks
    gate: OpenGate,
    page_size: Annotated[int | None, Query(alias="pageSize")] = None,
    page_token: Annotated[str, Query(alias="pageToken")] = "",
) -> CheckpointList:
    """The checkpoints of a job."""
    tables = await gate.view.fresh()
    job = find_job(tables, account, job_id)
    history = _versions(tables, job)
    rows = [(str(step), step) for step in history.numbers]
    found = page(rows, size=page_size, token=page_token, asked=("checkpoints", account, job_id))
    listed = [_shown(job, entry) for step in found.rows if (entry := history.find(step)) is not None]
    return CheckpointList(checkpoints=listed, next_page_token=found.next_page_token, total_size=found.total_size)


@router.post("/checkpoints/{checkpoint}:promote", openapi_extra=_PROMOTION, response_model_exclude_none=True)
async def promote(account: str, checkpoint: str, request: Request, caller: OwnAccount, gate: OpenGate) -> Promoted:
    """Give a checkpoint a name as an output model, which can be loaded and gone on from."""
    asked = read_as(Promotion, await object_of(request))
    named = _NAME.match(checkpoint)
    if named is None:
        raise ProblemError(404, f"{name_of(account, 'checkpoints', checkpoint)[:300]} does not exist")
    job_id = id_in(account, KIND, asked.trainer_job_id, "trainer_job_id") if asked.trainer_job_id else named["job"]
    async with changing(gate, account, job_id) as tables:
        job = find_job(tables, account, job_id)
        version = int(named["version"])
        if named["job"] != job_id or _versions(tables, job).find(version) is None:
            raise ProblemError(404, f"{job.name} has no checkpoint {checkpoint[:100]!r}: list its checkpoints")
        output = output_model(tables, gate, account, asked.output_model, "output_model")
        alias = ModelAlias(account=account, id=output, job=job_id, model_id=job.fact.model_id, version=version, owner=caller.owner)
        key = model_alias_key(account, output)
        await write_fact(gate, alias, turn=Turn.while_unchanged(account, gate.view.tables.facts, {key: None}))
    return Promoted(model=PromotedModel(name=name_of(account, "models", output), kind=_kind(job, "HF_PEFT_ADDON", "HF_BASE_MODEL")))


def _versions(tables: Tables, job: Job) -> StepHistory:
    view = tables.model(job.fact.model_id)
    if view is None or job.fact.deleted_at is not None:
        found = tables.steps.get(job.fact.model_id)
        return StepHistory("", 0) if found is None else found
    return tables.history(view)


def _shown(job: Job, entry: BriefStep) -> Checkpoint:
    return Checkpoint(
        name=f"{job.name}/checkpoints/{job.fact.id}-v{entry.step}",
        create_time=entry.committed_at,
        update_time=entry.committed_at,
        checkpoint_type=_kind(job, "CHECKPOINT_TYPE_INFERENCE_LORA", "CHECKPOINT_TYPE_INFERENCE_BASE"),
        restore_reference=entry.weights.uri,
    )


def _kind(job: Job, lora: str, full: str) -> str:
    return lora if job.fields.training_config.lora_rank else full
