"""Calls on an existing RLOR job: `:executeTrainStep`, `:cancel`, `:resume`.

Guarantees: the answer comes after the commit. A call that the job's state does not allow is 400 with gRPC's FAILED_PRECONDITION and the
state. The client's own retry of a step runs no second step. Of two changes of one job at two gateways in the same moment, one is made; the
other is 409, and the client may repeat it.
Limitations: a job runs one step at a time.
"""

from collections.abc import Sequence

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import Field

from headrace.core.lanes import lane_of
from headrace.gateway.access import KnownCaller
from headrace.gateway.gate import Gate, OpenGate
from headrace.gateway.log_writer import Sealed, sealed
from headrace.gateway.problems import FAILED_PRECONDITION, ProblemError
from headrace.gateway.rlor.field_paths import resource_response
from headrace.gateway.rlor.job_status import Job, RlorTrainerJob, find_job, job_resource, lock_job, step_views
from headrace.gateway.rlor.resources import OwnAccount, resource_id
from headrace.gateway.rlor.steps import check_output_model, prepare_step, without_step, write_job, write_step
from headrace.gateway.rlor.wire import Empty, Wire, parse_as, read_object, request_body
from headrace.gateway.tables import Tables
from headrace.schemas.base import utc_now
from headrace.schemas.commands import CancelJob, Command, ResumeJob, ResumeModel
from headrace.schemas.jobs import JobState

router = APIRouter(prefix="/v1/accounts/{account}/rlorTrainerJobs/{job_id}", tags=["RLOR: jobs"])

_NO_BODY = request_body(Empty, required=False)


class TrainStep(Wire):
    """Body of `:executeTrainStep`."""

    dataset: str = Field(min_length=1)
    output_model: str = Field(min_length=1)


@router.post(":executeTrainStep", openapi_extra=request_body(TrainStep))
async def execute_train_step(account: OwnAccount, job_id: str, request: Request, caller: KnownCaller, gate: OpenGate) -> Empty:
    """Train one step on a dataset; the result is the model `outputModel`, once that is READY."""
    body = parse_as(TrainStep, await read_object(request))
    is_retry = request.headers.get("x-stainless-retry-count", "0") not in {"", "0"}
    async with lock_job(gate, account, job_id) as tables:
        job = find_job(tables, account, job_id)
        if is_retry and _is_last_step(job, body):
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


@router.post(":cancel", openapi_extra=_NO_BODY)
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
            await write_job(gate, record, _seal_commands(gate, commands), before=job.record)
    return Empty()


@router.post(":resume", response_model=RlorTrainerJob, openapi_extra=_NO_BODY)
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


async def _resume(gate: Gate, tables: Tables, job: Job, owner: str) -> None:
    record, model = job.record, tables.model(job.record.model_id)
    if job.status.state == "COMPLETED":
        return
    if job.status.state == "PAUSED":
        paused = [view.job_id for view in step_views(tables, record) if view.state is JobState.PAUSED]
        resumes = [ResumeJob(model_id=record.model_id, job_id=training_job) for training_job in paused]
        await write_job(gate, record, _seal_commands(gate, resumes), before=record)
        return
    if model is None or model.status in {"deleting", "deleted"}:
        raise job.wrong_state("resume")
    commands = _seal_commands(gate, [ResumeModel(model_id=record.model_id)] if model.status in {"stopped", "diverged"} else [])
    resumed = record.model_copy(update={"resumed_at": utc_now(), "cancelled_at": None})
    failed = any(view.state in {JobState.FAILED, JobState.CANCELLED} for view in step_views(tables, record))
    if job.fields.keep_alive or record.step is None or not failed:
        await write_job(gate, without_step(tables, resumed) if failed else resumed, commands, before=record)
        return
    dataset, output = record.step.dataset or "", record.step.output_model
    step = await prepare_step(gate, tables, resumed, job.fields, dataset=dataset, output=output, owner=owner)
    await write_step(gate, step, commands, before=record)


def _seal_commands(gate: Gate, commands: Sequence[Command]) -> list[Sealed]:
    topic, lanes = gate.settings.topic_names.commands, gate.view.lanes
    return [sealed(command, topic=topic, key=command.model_id, partition=lane_of(command.model_id, lanes)) for command in commands]


def _is_last_step(job: Job, body: TrainStep) -> bool:
    step, account = job.record.step, job.record.account
    return step is not None and (step.dataset, step.output_model) == (
        resource_id(account, "datasets", body.dataset, "dataset"),
        resource_id(account, "models", body.output_model, "outputModel"),
    )
