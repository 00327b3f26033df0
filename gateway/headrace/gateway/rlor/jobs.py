"""RLOR trainer jobs: create, get, list, delete. What else is asked of one is in `job_verbs`.

Guarantees: a creation is one transaction (the job, the command that creates its model, and with `dataset` its step); of two of one id, at
whatever gateways, one is answered with 200; one that is repeated by the client's own retry is answered as the first. Unknown keys are
taken, as the hosted service's own clients send some, and `status.message` names what has no effect. Gives up: `trainingShape`; validations
can't be skipped.
"""

import asyncio
import hashlib
import re
import uuid
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse

from headrace.core.lanes import lane_of
from headrace.gateway.access import Caller
from headrace.gateway.gate import Gate, OpenGate
from headrace.gateway.log_writer import OvertakenError, Sealed, sealed
from headrace.gateway.problems import ProblemError
from headrace.gateway.rlor.bodies import object_of, read_as
from headrace.gateway.rlor.deployment_facts import check_own_bucket, is_of_another
from headrace.gateway.rlor.job_facts import KIND, Job, changing, each_job, find_job
from headrace.gateway.rlor.job_fields import JobFields, without_effect
from headrace.gateway.rlor.job_rules import base_model_name, check, filled, model_settings
from headrace.gateway.rlor.lists import Asked, listed
from headrace.gateway.rlor.masks import ReadMask, answered
from headrace.gateway.rlor.names import PROJECT, OwnAccount, id_in, name_of, rlor_model_id
from headrace.gateway.rlor.s3_datasets import S3_SECRET, credentials
from headrace.gateway.rlor.shown_job import RlorTrainerJob, shown
from headrace.gateway.rlor.steps import output_model, prepare, write_job, write_step
from headrace.gateway.rlor.tracking import NO_KEY, can_track, is_offline
from headrace.gateway.rlor.warm_start import warm_start
from headrace.gateway.rlor.wire import Empty, Wire
from headrace.gateway.secret_box import SecretBox, SecretBoxError
from headrace.gateway.tables import Tables
from headrace.schemas.base import utc_now
from headrace.schemas.commands import CreateModel, DeleteModel
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
_SECRETS = (("wandb_config", "api_key", "wandbConfig.apiKey"), ("aws_s3_config", "credentials_secret", S3_SECRET))


class Listing(Wire):
    """A page of jobs."""

    rlor_trainer_jobs: list[RlorTrainerJob]
    next_page_token: str | None = None
    total_size: int


@router.post("", response_model=RlorTrainerJob, openapi_extra=_BODY)
async def create_job(
    *,
    account: str,
    request: Request,
    caller: OwnAccount,
    gate: OpenGate,
    job_id: Annotated[str, Query(alias="rlorTrainerJobId")] = "",
    deployment_id: Annotated[str, Query(alias="deploymentId")] = "",
    training_shape: Annotated[str, Query(alias="trainingShape")] = "",
    skip_validations: Annotated[bool, Query(alias="skipValidations")] = False,  # noqa: ARG001 - taken; validations are cheap
) -> JSONResponse:
    """Create a job; with `dataset` its one step begins, with `keepAlive` it waits for `:executeTrainStep`. 409 where there is one."""
    raw = await object_of(request)
    if training_shape:
        raise ProblemError(501, "trainingShape: there are no shapes here: say baseModel, loraRank and maxContextLength")
    fields = _of_this_account(account, _with_deployment(read_as(JobFields, raw), deployment_id))
    check(fields)
    if fields.aws_s3_config is not None and (secret := fields.aws_s3_config.credentials_secret):
        credentials(secret, gate.settings.s3)
    if job_id and not _JOB_ID.fullmatch(job_id):
        raise ProblemError(400, f"rlorTrainerJobId: {job_id[:80]!r}: 1 to 127 letters, digits, dots, dashes and underscores are possible")
    repeated = request.headers.get("x-stainless-retry-count", "0") not in {"", "0"}
    # Without an id, those that ask for the same take turns: one may be the other's retry.
    turn = job_id or f"/{hashlib.sha256(orjson.dumps(raw)).hexdigest()}"
    while True:
        async with changing(gate, account, turn) as tables:
            check_own_bucket(tables, account, fields.hot_load_deployment_id)
            _check_deployments(tables, account, fields)
            known = _known(tables, account, job_id)
            fact = _fact(gate, tables, caller, fields, job_id=job_id or str(uuid.uuid4()), idle=_idle(raw, fields))
            if (same := await _repeated(tables, fact, known, named=bool(job_id)) if repeated else None) is not None:
                return _answer(same)
            if known is not None:
                raise ProblemError(409, f"{known.name} exists and is JOB_STATE_{known.stands.state}: delete it first, or take another id")
            try:
                await _create(gate, tables, fact)
            except OvertakenError:
                continue  # somebody has made it, or its output, in the same moment: the next look says what
            return _answer(find_job(gate.view.tables, account, fact.id))


@router.get("", response_model=Listing)
async def list_jobs(
    *,
    account: str,
    caller: OwnAccount,  # noqa: ARG001 - checks
    gate: OpenGate,
    asked: Asked,
) -> JSONResponse:
    """Jobs of the account, without deleted ones; 50 a page unless asked, 200 at most."""
    tables = await gate.view.fresh()
    rows = [shown(job) async for job in each_job(tables, account)]
    return JSONResponse(await asyncio.to_thread(listed, rows, RlorTrainerJob, asked, key=KIND, account=account))


@router.get("/{job_id}", response_model=RlorTrainerJob)
async def get_job(
    *,
    account: str,
    job_id: str,
    caller: OwnAccount,  # noqa: ARG001 - checks
    gate: OpenGate,
    read_mask: ReadMask = "",
) -> JSONResponse:
    """One job; for 30 days also a deleted one, as JOB_STATE_DELETING."""
    return _answer(find_job(await gate.view.fresh(), account, job_id), read_mask)


@router.delete("/{job_id}")
async def delete_job(account: str, job_id: str, caller: OwnAccount, gate: OpenGate) -> Empty:  # noqa: ARG001 - checks
    """Delete a job: its step is given up, its model takes no more. Output models stay. Deleting it again is no error."""
    async with changing(gate, account, job_id) as tables:
        job = find_job(tables, account, job_id)
        if job.fact.deleted_at is None:
            command = DeleteModel(model_id=job.fact.model_id)
            record = sealed(
                command, topic=gate.settings.topic_names.commands, key=command.model_id, partition=_lane(gate, command.model_id)
            )
            await write_job(gate, job.fact.model_copy(update={"deleted_at": utc_now()}), [record], before=job.fact)
    return Empty()


async def _create(gate: Gate, tables: Tables, fact: RlorJob) -> None:
    before = tables.facts.get(rlor_job_key(fact.account, fact.id))
    fields = JobFields.model_validate(fact.request)
    config = fields.training_config
    start: WeightsRef | None = None
    base = base_model_name(config.base_model)
    if config.warm_start_from:
        begun = warm_start(tables, fact.account, config.warm_start_from)
        start, base = begun.weights, begun.base_model
    command = CreateModel(
        model_id=fact.model_id,
        account=fact.account,
        project=PROJECT,
        name=fact.id,
        settings=model_settings(fields, gate.settings, base),
        worker_group=gate.settings.worker.group,
        start_weights=start,
    )
    topics = gate.settings.topic_names
    records: list[Sealed] = [sealed(command, topic=topics.commands, key=fact.model_id, partition=_lane(gate, fact.model_id))]
    if fields.dataset:
        output = output_model(tables, gate, fact.account, config.output_model or fact.id, "trainingConfig.outputModel")
        step = await prepare(gate, tables, fact, fields, dataset=fields.dataset, output=output, owner=fact.owner)
        await write_step(gate, step, records, before=before)
    else:
        await write_job(gate, fact, records, before=before)


def _fact(gate: Gate, tables: Tables, caller: Caller, fields: JobFields, *, job_id: str, idle: tuple[str, ...]) -> RlorJob:
    config, account = fields.training_config, caller.account
    original = warm_start(tables, account, config.warm_start_from).original.training_config if config.warm_start_from else None
    fields, secrets = _without_secrets(filled(fields, gate.settings, original), SecretBox(gate.settings.gateway.secrets_key))
    return RlorJob(
        account=account,
        id=job_id,
        owner=caller.owner,
        model_id=rlor_model_id(account, job_id),
        nonce=uuid.uuid4().hex,
        request=fields.model_dump(mode="json", by_alias=True, exclude_none=True),
        secrets=secrets,
        without_effect=idle,
    )


def _without_secrets(fields: JobFields, box: SecretBox) -> tuple[JobFields, dict[str, str]]:
    secrets: dict[str, str] = {}
    for part, name, shown_name in _SECRETS:
        holder = getattr(fields, part)
        if holder is None or not (secret := getattr(holder, name)):
            continue
        try:
            secrets[shown_name] = box.seal(shown_name, secret)
        except SecretBoxError as error:
            raise ProblemError(400, str(error)) from None
        fields = fields.model_copy(update={part: holder.model_copy(update={name: None})})
    return fields, secrets


def _idle(raw: dict[str, Any], fields: JobFields) -> tuple[str, ...]:
    idle = without_effect(raw, fields)
    if fields.wandb_config is None or not fields.wandb_config.enabled:
        return idle
    if not can_track():
        return (*idle, "wandbConfig (this gateway lacks the extra headrace[wandb])")
    return idle if fields.wandb_config.api_key or is_offline() else (*idle, f"wandbConfig ({NO_KEY})")


def _known(tables: Tables, account: str, job_id: str) -> Job | None:
    try:
        job = find_job(tables, account, job_id)
    except ProblemError:
        return None
    return None if job.fact.deleted_at is not None else job


async def _repeated(tables: Tables, fact: RlorJob, known: Job | None, *, named: bool) -> Job | None:
    """The job that a client's retry means: the one of its id, or without an id an unfinished one that was asked for alike."""

    def alike(job: Job) -> bool:
        return job.fact.request == fact.request and job.fact.owner == fact.owner

    if named:
        return known if known is not None and alike(known) else None
    async for job in each_job(tables, fact.account):
        if alike(job) and not job.stands.completed_at:
            return job
    return None


def _with_deployment(fields: JobFields, deployment_id: str) -> JobFields:
    said = fields.hot_load_deployment_id
    if not deployment_id or said == deployment_id:
        return fields
    if said:
        raise ProblemError(
            400, f"deploymentId={deployment_id[:80]!r} differs from hotLoadDeploymentId={said[:80]!r}: they are the same thing"
        )
    return fields.model_copy(update={"hot_load_deployment_id": deployment_id})


def _of_this_account(account: str, fields: JobFields) -> JobFields:
    """Resource names as the ids that they stand for, where a job keeps ids."""
    changes: dict[str, Any] = {}
    for field, name in (("rollout_deployment_name", "rolloutDeploymentName"), ("hot_load_deployment_id", "hotLoadDeploymentId")):
        said = getattr(fields, field)
        if said:
            found = id_in(account, "deployments", said, name)
            if not _JOB_ID.fullmatch(found):
                raise ProblemError(400, f"{name}: {said[:200]!r} is no deployment: accounts/{account}/deployments/<id> is needed")
            changes[field] = found
    return fields.model_copy(update=changes)


def _check_deployments(tables: Tables, account: str, fields: JobFields) -> None:
    for name in (fields.rollout_deployment_name, fields.hot_load_deployment_id):
        if name and is_of_another(tables, account, name):
            raise ProblemError(404, f"{name_of(account, 'deployments', name)} does not exist")


def _lane(gate: Gate, model_id: str) -> int:
    return lane_of(model_id, gate.view.lanes)


def _answer(job: Job, read_mask: str = "") -> JSONResponse:
    return answered(shown(job), read_mask)
