"""RLOR trainer jobs: create, get, list, delete, `:executeTrainStep`, `:cancel`, `:resume`.

Guarantees: an answer comes after the commit, and each change is one transaction; a creation is the job, the command that creates its model
and, with `dataset`, its step. Of two creations with one id, at any gateways, one is answered with 200. Of two changes of one job at two
gateways in the same moment, one is made; the other is 409, and the client may repeat it. The client's own retry of a creation or a step
gets the first answer. A call that the job's state does not allow is 400 with gRPC's FAILED_PRECONDITION and the state. Unknown keys are
accepted, since the hosted service's own clients send some; `status.message` names the keys without effect.
Limitations: a job runs one step at a time. No `trainingShape`; validations cannot be skipped.
"""

import asyncio
import hashlib
import re
import uuid
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse
from pydantic import Field

from headrace.gateway.access import Caller, KnownCaller
from headrace.gateway.gate import Gate, OpenGate
from headrace.gateway.log_writer import OvertakenError
from headrace.gateway.problems import FAILED_PRECONDITION, ProblemError
from headrace.gateway.rlor.dataset_files import S3_SECRET, parse_credentials
from headrace.gateway.rlor.deployment_state import belongs_to_another, check_snapshot_source
from headrace.gateway.rlor.filters import ReadMask, resource_response
from headrace.gateway.rlor.job_fields import JobFields, without_effect
from headrace.gateway.rlor.job_rules import base_model_name, check_fields, fill_defaults, model_settings, warm_start
from headrace.gateway.rlor.job_status import KIND, Job, RlorTrainerJob, each_job, find_job, job_resource, lock_job, step_views
from headrace.gateway.rlor.lists import ListParameters, list_page
from headrace.gateway.rlor.models import check_output_model
from headrace.gateway.rlor.resources import (
    PROJECT,
    Empty,
    ListPage,
    OwnAccount,
    Wire,
    parse_as,
    read_object,
    request_body,
    resource_id,
    resource_name,
    rlor_model_id,
)
from headrace.gateway.rlor.steps import prepare_step, seal_commands, without_step, write_job, write_step
from headrace.gateway.rlor.tracking import NO_KEY, can_track, is_offline
from headrace.gateway.tables import Tables
from headrace.gateway.tokens import SecretBox, SecretBoxError
from headrace.schemas.base import utc_now
from headrace.schemas.commands import CancelJob, CreateModel, DeleteModel, ResumeJob, ResumeModel
from headrace.schemas.jobs import JobState
from headrace.schemas.rlor import RlorJob, rlor_job_key
from headrace.schemas.weights import WeightsRef

router = APIRouter(prefix="/v1/accounts/{account}/rlorTrainerJobs", tags=["RLOR: jobs"])

_JOB_ID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,126}$")
_BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/RlorTrainerJob"}}},
    }
}
_NO_BODY = request_body(Empty, required=False)
_SECRETS = (("wandb_config", "api_key", "wandbConfig.apiKey"), ("aws_s3_config", "credentials_secret", S3_SECRET))


class JobList(ListPage):
    """A page of jobs."""

    rlor_trainer_jobs: list[RlorTrainerJob]


class TrainStep(Wire):
    """Body of `:executeTrainStep`."""

    dataset: str = Field(min_length=1)
    output_model: str = Field(min_length=1)


@router.post("", response_model=RlorTrainerJob, openapi_extra=_BODY)
async def create_job(
    *,
    account: OwnAccount,
    request: Request,
    caller: KnownCaller,
    gate: OpenGate,
    job_id: Annotated[str, Query(alias="rlorTrainerJobId")] = "",
    deployment_id: Annotated[str, Query(alias="deploymentId")] = "",
    training_shape: Annotated[str, Query(alias="trainingShape")] = "",
    skip_validations: Annotated[bool, Query(alias="skipValidations")] = False,  # noqa: ARG001 - accepted; validations are cheap
) -> JSONResponse:
    """Create a job; with `dataset` its one step begins, with `keepAlive` it waits for `:executeTrainStep`. 409 if it exists."""
    raw = await read_object(request)
    if training_shape:
        raise ProblemError(501, "trainingShape: there are no shapes here: set baseModel, loraRank and maxContextLength")
    fields = _with_deployment_ids(account, _with_deployment(parse_as(JobFields, raw), deployment_id))
    check_fields(fields)
    if fields.aws_s3_config is not None and (secret := fields.aws_s3_config.credentials_secret):
        parse_credentials(secret, gate.settings.s3)
    if job_id and not _JOB_ID.fullmatch(job_id):
        raise ProblemError(400, f"rlorTrainerJobId: {job_id[:80]!r}: 1 to 127 letters, digits, dots, dashes and underscores are possible")
    # Without an id, equal requests take turns: one may be the retry of the other.
    lock_name = job_id or f"/{hashlib.sha256(orjson.dumps(raw)).hexdigest()}"
    while True:
        async with lock_job(gate, account, lock_name) as tables:
            check_snapshot_source(tables, account, fields.hot_load_deployment_id)
            for name in (fields.rollout_deployment_name, fields.hot_load_deployment_id):
                if name and belongs_to_another(tables, account, name):
                    raise ProblemError(404, f"{resource_name(account, 'deployments', name)} does not exist")
            existing = _existing_job(tables, account, job_id)
            record = _job_record(gate, tables, caller, fields, job_id=job_id or str(uuid.uuid4()), no_effect=_no_effect(raw, fields))
            if _is_retry(request) and (first := await _first_job(tables, record, existing, named=bool(job_id))) is not None:
                return resource_response(job_resource(first))
            if existing is not None:
                raise ProblemError(
                    409, f"{existing.name} exists and is JOB_STATE_{existing.status.state}: delete it first, or take another id"
                )
            try:
                await _write_new(gate, tables, record)
            except OvertakenError:
                continue  # another request created the job or its output model meanwhile: the next round answers accordingly
            return resource_response(job_resource(find_job(gate.view.tables, account, record.id)))


@router.get("", response_model=JobList)
async def list_jobs(account: OwnAccount, gate: OpenGate, parameters: ListParameters) -> JSONResponse:
    """Jobs of the account, without deleted ones; 50 a page by default, 200 at most."""
    tables = await gate.view.fresh()
    rows = [job_resource(job) async for job in each_job(tables, account)]
    return JSONResponse(await asyncio.to_thread(list_page, rows, RlorTrainerJob, parameters, key=KIND, account=account))


@router.get("/{job_id}", response_model=RlorTrainerJob)
async def get_job(account: OwnAccount, job_id: str, gate: OpenGate, read_mask: ReadMask = "") -> JSONResponse:
    """One job; for 30 days also a deleted one, as JOB_STATE_DELETING."""
    return resource_response(job_resource(find_job(await gate.view.fresh(), account, job_id)), read_mask)


@router.delete("/{job_id}")
async def delete_job(account: OwnAccount, job_id: str, gate: OpenGate) -> Empty:
    """Delete a job: its step ends, its model takes no more steps. Output models stay. Deleting it again is no error."""
    async with lock_job(gate, account, job_id) as tables:
        job = find_job(tables, account, job_id)
        if job.record.deleted_at is None:
            commands = seal_commands(gate, [DeleteModel(model_id=job.record.model_id)])
            await write_job(gate, job.record.model_copy(update={"deleted_at": utc_now()}), commands, before=job.record)
    return Empty()


@router.post("/{job_id}:executeTrainStep", openapi_extra=request_body(TrainStep))
async def execute_train_step(account: OwnAccount, job_id: str, request: Request, caller: KnownCaller, gate: OpenGate) -> Empty:
    """Train one step on a dataset; the result is the model `outputModel`, once that is READY."""
    body = parse_as(TrainStep, await read_object(request))
    async with lock_job(gate, account, job_id) as tables:
        job = find_job(tables, account, job_id)
        if _is_retry(request) and _is_last_step(job, body):
            return Empty()
        if not job.fields.keep_alive and job.status.state != "DELETED":
            raise ProblemError(400, f"{job.name} takes no steps: it was made without keepAlive", code=FAILED_PRECONDITION)
        if job.status.busy and job.status.state == "RUNNING":
            output = job.record.step.output_model if job.record.step is not None else ""
            raise ProblemError(400, f"{job.name}: the step of {output} has not ended: wait for it", code=FAILED_PRECONDITION)
        if job.status.state != "RUNNING":
            raise job.wrong_state("execute a train step of a")
        output = check_output_model(tables, gate, account, body.output_model, "outputModel")
        step = await prepare_step(gate, tables, job.record, job.fields, dataset=body.dataset, output=output, owner=caller.owner)
        await write_step(gate, step, before=job.record)
    return Empty()


@router.post("/{job_id}:cancel", openapi_extra=_NO_BODY)
async def cancel_job(account: OwnAccount, job_id: str, request: Request, gate: OpenGate) -> Empty:
    """Cancel a job: its step ends unless it is committed already. The job stays."""
    await read_object(request)
    async with lock_job(gate, account, job_id) as tables:
        job = find_job(tables, account, job_id)
        if job.status.state in {"COMPLETED", "FAILED", "EXPIRED", "DELETED"}:
            raise job.wrong_state("cancel")
        if job.record.cancelled_at is None:
            open_jobs = [view.job_id for view in step_views(tables, job.record) if not view.final]
            commands = [CancelJob(model_id=job.record.model_id, job_id=training_job) for training_job in open_jobs]
            record = job.record.model_copy(update={"cancelled_at": utc_now()})
            await write_job(gate, record, seal_commands(gate, commands), before=job.record)
    return Empty()


@router.post("/{job_id}:resume", response_model=RlorTrainerJob, openapi_extra=_NO_BODY)
async def resume_job(account: OwnAccount, job_id: str, request: Request, caller: KnownCaller, gate: OpenGate) -> JSONResponse:
    """Resume a job that is paused, failed, cancelled or expired.

    With `keepAlive` it takes steps again; else its step, unless it is committed, runs again on the same dataset.
    """
    await read_object(request)
    async with lock_job(gate, account, job_id) as tables:
        job = find_job(tables, account, job_id)
        if job.status.state not in {"PAUSED", "FAILED", "CANCELLED", "EXPIRED", "COMPLETED"}:
            raise job.wrong_state("resume")
        await _resume(gate, tables, job, caller.owner)
        return resource_response(job_resource(find_job(gate.view.tables, account, job_id)))


def _is_retry(request: Request) -> bool:
    return request.headers.get("x-stainless-retry-count", "0") not in {"", "0"}


async def _write_new(gate: Gate, tables: Tables, record: RlorJob) -> None:
    before = tables.facts.get(rlor_job_key(record.account, record.id))
    fields = JobFields.model_validate(record.request)
    config = fields.training_config
    weights: WeightsRef | None = None
    base = base_model_name(config.base_model)
    if config.warm_start_from:
        start = warm_start(tables, record.account, config.warm_start_from)
        weights, base = start.weights, start.base_model
    command = CreateModel(
        model_id=record.model_id,
        account=record.account,
        project=PROJECT,
        name=record.id,
        settings=model_settings(fields, gate.settings, base),
        worker_group=gate.settings.worker.group,
        start_weights=weights,
    )
    records = seal_commands(gate, [command])
    if fields.dataset:
        output = check_output_model(tables, gate, record.account, config.output_model or record.id, "trainingConfig.outputModel")
        step = await prepare_step(gate, tables, record, fields, dataset=fields.dataset, output=output, owner=record.owner)
        await write_step(gate, step, records, before=before)
    else:
        await write_job(gate, record, records, before=before)


def _job_record(gate: Gate, tables: Tables, caller: Caller, fields: JobFields, *, job_id: str, no_effect: tuple[str, ...]) -> RlorJob:
    config, account = fields.training_config, caller.account
    original = warm_start(tables, account, config.warm_start_from).original if config.warm_start_from else None
    fields, secrets = _encrypt_secrets(fill_defaults(fields, gate.settings, original), SecretBox(gate.settings.gateway.secrets_key))
    return RlorJob(
        account=account,
        id=job_id,
        owner=caller.owner,
        model_id=rlor_model_id(account, job_id),
        nonce=uuid.uuid4().hex,
        request=fields.model_dump(mode="json", by_alias=True, exclude_none=True),
        secrets=secrets,
        without_effect=no_effect,
    )


def _encrypt_secrets(fields: JobFields, box: SecretBox) -> tuple[JobFields, dict[str, str]]:
    """The fields without secrets, and the encrypted secrets by their paths."""
    secrets: dict[str, str] = {}
    for part, name, path in _SECRETS:
        holder = getattr(fields, part)
        if holder is None or not (secret := getattr(holder, name)):
            continue
        try:
            secrets[path] = box.seal(path, secret)
        except SecretBoxError as error:
            raise ProblemError(400, str(error)) from None
        fields = fields.model_copy(update={part: holder.model_copy(update={name: None})})
    return fields, secrets


def _no_effect(raw: dict[str, Any], fields: JobFields) -> tuple[str, ...]:
    names = without_effect(raw, fields)
    if fields.wandb_config is None or not fields.wandb_config.enabled:
        return names
    if not can_track():
        return (*names, "wandbConfig (this gateway is installed without the extra `wandb`)")
    return names if fields.wandb_config.api_key or is_offline() else (*names, f"wandbConfig ({NO_KEY})")


def _existing_job(tables: Tables, account: str, job_id: str) -> Job | None:
    try:
        job = find_job(tables, account, job_id)
    except ProblemError:
        return None
    return None if job.record.deleted_at is not None else job


async def _first_job(tables: Tables, record: RlorJob, existing: Job | None, *, named: bool) -> Job | None:
    """The job that an earlier attempt of this request created: the one of its id, or without an id an equal one that has not ended."""

    def is_equal(job: Job) -> bool:
        return job.record.request == record.request and job.record.owner == record.owner

    if named:
        return existing if existing is not None and is_equal(existing) else None
    async for job in each_job(tables, record.account):
        if is_equal(job) and not job.status.completed_at:
            return job
    return None


def _with_deployment(fields: JobFields, deployment_id: str) -> JobFields:
    in_body = fields.hot_load_deployment_id
    if not deployment_id or in_body == deployment_id:
        return fields
    if in_body:
        raise ProblemError(
            400, f"deploymentId={deployment_id[:80]!r} differs from hotLoadDeploymentId={in_body[:80]!r}: they are the same thing"
        )
    return fields.model_copy(update={"hot_load_deployment_id": deployment_id})


def _with_deployment_ids(account: str, fields: JobFields) -> JobFields:
    """The fields with ids in place of the resource names of deployments."""
    changes: dict[str, Any] = {}
    for field, path in (("rollout_deployment_name", "rolloutDeploymentName"), ("hot_load_deployment_id", "hotLoadDeploymentId")):
        if name := getattr(fields, field):
            changes[field] = resource_id(account, "deployments", name, path)
            if not _JOB_ID.fullmatch(changes[field]):
                raise ProblemError(400, f"{path}: {name[:200]!r} is no deployment: accounts/{account}/deployments/<id> is needed")
    return fields.model_copy(update=changes)


async def _resume(gate: Gate, tables: Tables, job: Job, owner: str) -> None:
    record, model = job.record, tables.model(job.record.model_id)
    if job.status.state == "COMPLETED":
        return
    if job.status.state == "PAUSED":
        paused = [view.job_id for view in step_views(tables, record) if view.state is JobState.PAUSED]
        resumes = [ResumeJob(model_id=record.model_id, job_id=training_job) for training_job in paused]
        await write_job(gate, record, seal_commands(gate, resumes), before=record)
        return
    if model is None or model.status in {"deleting", "deleted"}:
        raise job.wrong_state("resume")
    commands = seal_commands(gate, [ResumeModel(model_id=record.model_id)] if model.status in {"stopped", "diverged"} else [])
    resumed = record.model_copy(update={"resumed_at": utc_now(), "cancelled_at": None})
    failed = any(view.state in {JobState.FAILED, JobState.CANCELLED} for view in step_views(tables, record))
    if job.fields.keep_alive or record.step is None or not failed:
        await write_job(gate, without_step(tables, resumed) if failed else resumed, commands, before=record)
        return
    dataset, output = record.step.dataset or "", record.step.output_model
    step = await prepare_step(gate, tables, resumed, job.fields, dataset=dataset, output=output, owner=owner)
    await write_step(gate, step, commands, before=record)


def _is_last_step(job: Job, body: TrainStep) -> bool:
    step, account = job.record.step, job.record.account
    return step is not None and (step.dataset, step.output_model) == (
        resource_id(account, "datasets", body.dataset, "dataset"),
        resource_id(account, "models", body.output_model, "outputModel"),
    )
