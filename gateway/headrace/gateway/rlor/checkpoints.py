"""Checkpoints of the RLOR API: the versions of a job's model, and their promotion to models.

A checkpoint is named `accounts/<account>/rlorTrainerJobs/<job>/checkpoints/<job>-v<version>`; `:promote` needs the last part only.
Guarantees: checkpoints can be listed and promoted while the record of their job exists. A promotion is committed when it is answered.
Limitations: checkpoints cannot be downloaded.
"""

import re
from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import Field

from headrace.gateway.access import KnownCaller
from headrace.gateway.facts import write_fact
from headrace.gateway.gate import OpenGate
from headrace.gateway.log_writer import Turn
from headrace.gateway.problems import ProblemError
from headrace.gateway.rlor.job_status import KIND, Job, find_job, lock_job
from headrace.gateway.rlor.lists import cut_page
from headrace.gateway.rlor.models import check_output_model
from headrace.gateway.rlor.resources import (
    ListPage,
    OwnAccount,
    Timestamp,
    Wire,
    parse_as,
    read_object,
    request_body,
    resource_id,
    resource_name,
)
from headrace.gateway.step_history import BriefStep, StepHistory
from headrace.gateway.tables import Tables
from headrace.schemas.rlor import ModelAlias, model_alias_key

router = APIRouter(prefix="/v1/accounts/{account}", tags=["RLOR: jobs"])

_CHECKPOINT = re.compile(r"^(?P<job>.+)-v(?P<version>[1-9]\d{0,8})$")


class Checkpoint(Wire):
    """A version of a job's model."""

    name: str
    create_time: Timestamp
    update_time: Timestamp
    checkpoint_type: str
    promotable: bool = True
    restore_reference: str
    """Not in the hosted API: the folder of the weights in the object store."""


class CheckpointList(ListPage):
    """A page of checkpoints."""

    checkpoints: list[Checkpoint]


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


@router.get("/rlorTrainerJobs/{job_id}/checkpoints", response_model_exclude_none=True)
async def list_checkpoints(
    account: OwnAccount,
    job_id: str,
    gate: OpenGate,
    page_size: Annotated[int | None, Query(alias="pageSize")] = None,
    page_token: Annotated[str, Query(alias="pageToken")] = "",
) -> CheckpointList:
    """The checkpoints of a job."""
    tables = await gate.view.fresh()
    job = find_job(tables, account, job_id)
    history = _find_history(tables, job)
    steps = [(str(step), step) for step in history.numbers]
    shown, next_token = cut_page(steps, size=page_size, token=page_token, call=("checkpoints", account, job_id))
    rows = [_checkpoint(job, entry) for step in shown if (entry := history.find(step)) is not None]
    return CheckpointList(checkpoints=rows, next_page_token=next_token, total_size=len(steps))


@router.post("/checkpoints/{checkpoint}:promote", openapi_extra=request_body(Promotion), response_model_exclude_none=True)
async def promote(account: OwnAccount, checkpoint: str, request: Request, caller: KnownCaller, gate: OpenGate) -> Promoted:
    """Give a checkpoint a name as an output model, which can be loaded and trained further."""
    body = parse_as(Promotion, await read_object(request))
    named = _CHECKPOINT.match(checkpoint)
    if named is None:
        raise ProblemError(404, f"{resource_name(account, 'checkpoints', checkpoint)[:300]} does not exist")
    job_id = resource_id(account, KIND, body.trainer_job_id, "trainer_job_id") if body.trainer_job_id else named["job"]
    async with lock_job(gate, account, job_id) as tables:
        job = find_job(tables, account, job_id)
        version = int(named["version"])
        if named["job"] != job_id or _find_history(tables, job).find(version) is None:
            raise ProblemError(404, f"{job.name} has no checkpoint {checkpoint[:100]!r}: list its checkpoints")
        output = check_output_model(tables, gate, account, body.output_model, "output_model")
        alias = ModelAlias(account=account, id=output, job=job_id, model_id=job.record.model_id, version=version, owner=caller.owner)
        key = model_alias_key(account, output)
        await write_fact(gate, alias, turn=Turn.while_unchanged(account, gate.view.tables.facts, {key: None}))
    return Promoted(
        model=PromotedModel(name=resource_name(account, "models", output), kind=_checkpoint_kind(job, "HF_PEFT_ADDON", "HF_BASE_MODEL"))
    )


def _find_history(tables: Tables, job: Job) -> StepHistory:
    view = tables.model(job.record.model_id)
    if view is None or job.record.deleted_at is not None:
        found = tables.steps.get(job.record.model_id)
        return StepHistory("", 0) if found is None else found
    return tables.history(view)


def _checkpoint(job: Job, entry: BriefStep) -> Checkpoint:
    return Checkpoint(
        name=f"{job.name}/checkpoints/{job.record.id}-v{entry.step}",
        create_time=entry.committed_at,
        update_time=entry.committed_at,
        checkpoint_type=_checkpoint_kind(job, "CHECKPOINT_TYPE_INFERENCE_LORA", "CHECKPOINT_TYPE_INFERENCE_BASE"),
        restore_reference=entry.weights.uri,
    )


def _checkpoint_kind(job: Job, lora: str, full: str) -> str:
    return lora if job.fields.training_config.lora_rank else full
