"""What is asked of an RLOR job after its creation: `:executeTrainStep`, `:cancel`, `:resume`.

Guarantees: an answer is given after the commit; what a job's state does not allow is 400 with gRPC's FAILED_PRECONDITION and the state. A
step that is asked for again by the client's own retry is done once. Of two changes of one job that two gateways are asked for in the same
moment one is made; the other is 409, with leave to repeat it. Gives up: steps side by side; one after the other.
"""

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import Field

from headrace.core.lanes import lane_of
from headrace.gateway.gate import Gate, OpenGate
from headrace.gateway.log_writer import Sealed, sealed
from headrace.gateway.problems import FAILED_PRECONDITION, ProblemError
from headrace.gateway.rlor.bodies import object_of, read_as
from headrace.gateway.rlor.job_facts import Job, changing, find_job
from headrace.gateway.rlor.job_state import step_views
from headrace.gateway.rlor.names import OwnAccount, id_in
from headrace.gateway.rlor.shown_job import RlorTrainerJob, shown
from headrace.gateway.rlor.steps import output_model, prepare, without_step, write_job, write_step
from headrace.gateway.rlor.wire import Empty, Wire
from headrace.gateway.tables import Tables
from headrace.schemas.base import utc_now
from headrace.schemas.commands import CancelJob, Command, ResumeJob, ResumeModel
from headrace.schemas.jobs import JobState

router = APIRouter(prefix="/v1/accounts/{account}/rlorTrainerJobs/{job_id}", tags=["RLOR: jobs"])

_OVER = ("COMPLETED", "FAILED", "EXPIRED", "DELETED")


class TrainStep(Wire):
    """Body of `:executeTrainStep`."""

    dataset: str = Field(min_length=1)
    output_model: str = Field(min_length=1)


def _takes(model: type[Wire], *, required: bool) -> dict[str, object]:
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": model.model_json_schema()}}}}


@router.post(":executeTrainStep", openapi_extra=_takes(TrainStep, required=True))
async def execute_train_step(account: str, job_id: str, request: Request, caller: OwnAccount, gate: OpenGate) -> Empty:
    """Train one step on a dataset; what comes of it can be had as `outputModel`, once that is READY."""
    asked = read_as(TrainStep, await object_of(request))
    repeated = request.headers.get("x-stainless-retry-count", "0") not in {"", "0"}
    async with changing(gate, account, job_id) as tables:
        job = find_job(tables, account, job_id)
        if repeated and _is_the_last(job, asked):
            return Empty()
        if not job.fields.keep_alive and job.stands.state != "DELETED":
            raise ProblemError(400, f"{job.name} takes no steps: it was made without keepAlive", code=FAILED_PRECONDITION)
        if job.stands.busy and job.stands.state == "RUNNING":
            said = job.fact.step.output_model if job.fact.step is not None else ""
            raise ProblemError(400, f"{job.name}: the step of {said} has not ended: wait for it", code=FAILED_PRECONDITION)
        if job.stands.state != "RUNNING":
            raise job.refused("execute a train step of a")
        output = output_model(tables, gate, account, asked.output_model, "outputModel")
        step = await prepare(gate, tables, job.fact, job.fields, dataset=asked.dataset, output=output, owner=caller.owner)
        await write_step(gate, step, before=job.fact)
    return Empty()


@router.post(":cancel", openapi_extra=_takes(Empty, required=False))
async def cancel_job(account: str, job_id: str, request: Request, caller: OwnAccount, gate: OpenGate) -> Empty:  # noqa: ARG001 - checks
    """Cancel a job: its step is given up unless it is committed already. The job stays."""
    await object_of(request)
    async with changing(gate, account, job_id) as tables:
        job = find_job(tables, account, job_id)
        if job.stands.state in _OVER:
            raise job.refused("cancel")
        if job.fact.cancelled_at is None:
            open_jobs = [view.job_id for view in step_views(tables, job.fact) if not view.final]
            commands = [CancelJob(model_id=job.fact.model_id, job_id=training_job) for training_job in open_jobs]
            fact = job.fact.model_copy(update={"cancelled_at": utc_now()})
            await write_job(gate, fact, _sealed(gate, commands), before=job.fact)
    return Empty()


@router.post(":resume", response_model=RlorTrainerJob, openapi_extra=_takes(Empty, required=False))
async def resume_job(account: str, job_id: str, request: Request, caller: OwnAccount, gate: OpenGate) -> JSONResponse:
    """Let a job go on that is paused, failed, cancelled or expired.

    With `keepAlive` it takes steps again; else its step, unless it is committed, is run again on the same dataset.
    """
    await object_of(request)
    async with changing(gate, account, job_id) as tables:
        job = find_job(tables, account, job_id)
        if job.stands.state not in {"PAUSED", "FAILED", "CANCELLED", "EXPIRED", "COMPLETED"}:
            raise job.refused("resume")
        await _resume(gate, tables, job, caller.owner)
        found = find_job(gate.view.tables, account, job_id)
    return JSONResponse(shown(found).model_dump(mode="json", by_alias=True, exclude_none=True))


async def _resume(gate: Gate, tables: Tables, job: Job, owner: str) -> None:
    fact, model = job.fact, tables.model(job.fact.model_id)
    if job.stands.state == "COMPLETED":
        return  # nothing is left to do
    if job.stands.state == "PAUSED":
        paused = [view.job_id for view in step_views(tables, fact) if view.state is JobState.PAUSED]
        commands_of_it = [ResumeJob(model_id=fact.model_id, job_id=training_job) for training_job in paused]
        await write_job(gate, fact, _sealed(gate, commands_of_it), before=fact)
        return
    if model is None or model.status in {"deleting", "deleted"}:
        raise job.refused("resume")
    commands: list[Command] = [ResumeModel(model_id=fact.model_id)] if model.status in {"stopped", "diverged"} else []
    again = fact.model_copy(update={"resumed_at": utc_now(), "cancelled_at": None})
    failed = any(view.state in {JobState.FAILED, JobState.CANCELLED} for view in step_views(tables, fact))
    if job.fields.keep_alive or fact.step is None or not failed:
        await write_job(gate, without_step(tables, again) if failed else again, _sealed(gate, commands), before=fact)
        return
    step = await prepare(gate, tables, again, job.fields, dataset=fact.step.dataset or "", output=fact.step.output_model, owner=owner)
    await write_step(gate, step, _sealed(gate, commands), before=fact)


def _sealed(gate: Gate, commands: list[Command] | list[CancelJob] | list[ResumeJob]) -> list[Sealed]:
    topic = gate.settings.topic_names.commands
    return [
        sealed(command, topic=topic, key=command.model_id, partition=lane_of(command.model_id, gate.view.lanes)) for command in commands
    ]


def _is_the_last(job: Job, asked: TrainStep) -> bool:
    step, account = job.fact.step, job.fact.account
    return step is not None and (step.dataset, step.output_model) == (
        id_in(account, "datasets", asked.dataset, "dataset"),
        id_in(account, "models", asked.output_model, "outputModel"),
    )
