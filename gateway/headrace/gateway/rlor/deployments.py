"""Deployments of the RLOR API: create, get, list, change, scale, delete.

A deployment is a name that engines are started with (`headrace engine --deployment ID`); none is started here. It is CREATING until one of
its engines has said what it serves, READY from then on, and READY without any where `maxReplicaCount` is 0. Guarantees: what is shown of
engines is what they said themselves; one that was killed counts until it has been silent for `gateway.engine_silence_seconds`. Gives up:
telling whether an engine is gone that never said it would say that it lives.
"""

import uuid
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse

from headrace.gateway.facts import write_fact
from headrace.gateway.gate import Gate, OpenGate
from headrace.gateway.log_writer import OvertakenError, Sealed, Turn
from headrace.gateway.problems import FAILED_PRECONDITION, ProblemError
from headrace.gateway.rlor.bodies import object_of, read_as
from headrace.gateway.rlor.deployed_facts import deployed_of
from headrace.gateway.rlor.deployment_facts import Deployment, deployment_of, deployments_of, find_deployment, is_of_another, replicas_of
from headrace.gateway.rlor.deployment_fields import DeploymentFields, check_fields
from headrace.gateway.rlor.field_paths import UnknownFieldError, path_of
from headrace.gateway.rlor.job_facts import find_job
from headrace.gateway.rlor.job_rules import base_model_name
from headrace.gateway.rlor.lists import Asked, listed
from headrace.gateway.rlor.masks import MOST_FIELDS, ReadMask, answered
from headrace.gateway.rlor.names import OwnAccount, check_id, id_in, name_of
from headrace.gateway.rlor.wire import Empty, Status, Timestamp, Wire
from headrace.gateway.tables import Tables
from headrace.schemas.base import utc_now
from headrace.schemas.deployments import DeployedModel, DeploymentFact, deployed_model_key, deployment_key, hot_load_key

router = APIRouter(prefix="/v1/accounts/{account}/deployments", tags=["RLOR: deployments"])

_BODY = {"requestBody": {"required": True, "content": {"application/json": {"schema": DeploymentFields.model_json_schema()}}}}


class ReplicaStats(Wire):
    """Engines by what they do."""

    ready_replica_count: int


class DeploymentObject(DeploymentFields):
    """A deployment."""

    name: str
    state: Literal["CREATING", "READY"]
    status: Status
    create_time: Timestamp
    update_time: Timestamp
    created_by: str
    replica_count: int
    desired_replica_count: int
    replica_stats: ReplicaStats


class DeploymentList(Wire):
    """A page of deployments."""

    deployments: list[DeploymentObject]
    next_page_token: str | None = None
    total_size: int


class Scale(Wire):
    """Body of `:scale`."""

    replica_count: int = 0


@router.post("", response_model=DeploymentObject, openapi_extra=_BODY)
async def create_deployment(
    *,
    account: str,
    request: Request,
    caller: OwnAccount,
    gate: OpenGate,
    deployment_id: Annotated[str, Query(alias="deploymentId")] = "",
    validate_only: Annotated[bool, Query(alias="validateOnly")] = False,
) -> JSONResponse:
    """Create a deployment. 409 where there is one."""
    fields = read_as(DeploymentFields, await object_of(request))
    tables = await gate.view.fresh()
    base_model = _checked(gate, tables, account, fields)
    deployment = check_id(deployment_id, "deploymentId") if deployment_id else f"d-{uuid.uuid4().hex[:12]}"
    if (problem := _taken(tables, account, deployment)) is not None:
        raise problem
    fact = DeploymentFact(account=account, id=deployment, owner=caller.owner, base_model=base_model, request=_normal(fields))
    if not validate_only:
        try:
            turn = Turn(of=_turn_of(deployment), still=lambda: _taken(tables, account, deployment) is None)
            await write_fact(gate, fact, turn=turn)
        except OvertakenError as error:
            raise (_taken(tables, account, deployment) or error) from None
    return answered(_shown(gate.view.tables, deployment_of(fact)), "")


@router.get("", response_model=DeploymentList)
async def list_deployments(account: str, caller: OwnAccount, gate: OpenGate, asked: Asked) -> JSONResponse:  # noqa: ARG001 - checks
    """Deployments of the account."""
    tables = await gate.view.fresh()
    rows = [_shown(tables, found) for found in deployments_of(tables, account)]
    return JSONResponse(listed(rows, DeploymentObject, asked, key="deployments", account=account))


@router.get("/{deployment}", response_model=DeploymentObject)
async def get_deployment(
    account: str,
    deployment: str,
    caller: OwnAccount,  # noqa: ARG001 - checks
    gate: OpenGate,
    read_mask: ReadMask = "",
) -> JSONResponse:
    """One deployment."""
    tables = await gate.view.fresh()
    return answered(_shown(tables, find_deployment(tables, account, deployment)), read_mask)


@router.patch("/{deployment}:scale", response_model=DeploymentObject)
async def scale_deployment(account: str, deployment: str, body: Scale, caller: OwnAccount, gate: OpenGate) -> JSONResponse:  # noqa: ARG001 - checks
    """Say how many engines are wanted; starting and ending them is up to who runs them."""
    return await _change(gate, account, deployment, {"minReplicaCount": body.replica_count, "maxReplicaCount": body.replica_count})


@router.patch("/{deployment}", response_model=DeploymentObject, openapi_extra=_BODY)
async def change_deployment(
    *,
    account: str,
    deployment: str,
    request: Request,
    caller: OwnAccount,  # noqa: ARG001 - checks
    gate: OpenGate,
    update_mask: Annotated[str, Query(alias="updateMask")] = "",
) -> JSONResponse:
    """Change the fields that `updateMask` names, or without it those in the body. One that is named and not in the body is unset."""
    asked = read_as(DeploymentFields, await object_of(request)).model_dump(mode="json", by_alias=True, exclude_unset=True)
    if not update_mask.strip():
        return await _change(gate, account, deployment, asked)
    parts = update_mask.split(",")
    if len(parts) > MOST_FIELDS:
        raise ProblemError(400, f"updateMask: {len(parts)} fields, {MOST_FIELDS} at most are possible")
    try:
        names = [path_of(DeploymentFields, part)[0] for part in parts]
    except UnknownFieldError as error:
        raise ProblemError(400, f"updateMask: {error}") from None
    return await _change(gate, account, deployment, {name: asked.get(name) for name in names})


@router.delete("/{deployment}")
async def delete_deployment(
    *,
    account: str,
    deployment: str,
    caller: OwnAccount,  # noqa: ARG001 - checks
    gate: OpenGate,
    ignore_checks: Annotated[bool, Query(alias="ignoreChecks")] = False,
    hard: bool = False,  # noqa: ARG001 - it is gone at once either way
) -> Empty:
    """Delete a deployment; with models loaded on it only where `ignoreChecks` says so. Its engines go on until they are ended."""
    tables = await gate.view.fresh()
    found = find_deployment(tables, account, deployment)
    loaded = [one.name for one in deployed_of(tables, account, deployment=deployment) if one.state != "UNDEPLOYING"]
    if loaded and not ignore_checks:
        said = f"{found.name} has models loaded, {loaded[0]} among them: delete them first, or say ignoreChecks=true"
        raise ProblemError(400, said, code=FAILED_PRECONDITION)
    on_it = [fact for fact in tables.facts_under(deployed_model_key(account, "")) if isinstance(fact, DeployedModel)]
    models = [deployed_model_key(account, fact.id) for fact in on_it if fact.deployment == deployment]
    key, facts = deployment_key(account, deployment), tables.facts
    # In the turn of those that change it: what was deleted must not come back with a change that was decided before.
    turn = Turn.while_unchanged(_turn_of(deployment), facts, {key: found.fact})
    await _remove(gate, [key, hot_load_key(account, deployment), *models], turn)
    return Empty()


@router.delete("/{deployment}/ledger")
async def delete_ledger(account: str, deployment: str, caller: OwnAccount, gate: OpenGate) -> Empty:  # noqa: ARG001 - checks
    """Forget which snapshot was asked for last. Every load is of a full snapshot here, so the next one is, too."""
    find_deployment(await gate.view.fresh(), account, deployment)
    await _remove(gate, [hot_load_key(account, deployment)])
    return Empty()


async def _change(gate: Gate, account: str, deployment: str, changes: dict[str, object]) -> JSONResponse:
    tables = await gate.view.fresh()
    found = find_deployment(tables, account, deployment)
    merged = {**found.fact.request, **changes}
    fields = read_as(DeploymentFields, {name: value for name, value in merged.items() if value is not None})
    if _checked(gate, tables, account, fields) != found.fact.base_model:
        raise ProblemError(400, f"baseModel: that of {found.name} can't be changed: create another deployment")
    fact = found.fact.model_copy(update={"request": _normal(fields), "updated_at": utc_now()})
    turn = Turn.while_unchanged(_turn_of(deployment), tables.facts, {deployment_key(account, deployment): found.fact})
    await write_fact(gate, fact, turn=turn)
    return answered(_shown(gate.view.tables, deployment_of(fact)), "")


def _checked(gate: Gate, tables: Tables, account: str, fields: DeploymentFields) -> str:
    """The base model's name in the catalogue, of fields that may be."""
    check_fields(fields, account)
    base_model = base_model_name(fields.base_model)
    if base_model not in gate.settings.base_models:
        there = ", ".join(sorted(gate.settings.base_models)) or "none"
        raise ProblemError(400, f"baseModel: {fields.base_model!r} is not in the catalogue; there are {there}")
    if fields.hot_load_trainer_job:
        job = find_job(tables, account, id_in(account, "rlorTrainerJobs", fields.hot_load_trainer_job, "hotLoadTrainerJob"))
        if job.fields.hot_load_deployment_id:
            raise ProblemError(
                400,
                f"hotLoadTrainerJob: {job.name} writes its snapshots for deployment {job.fields.hot_load_deployment_id} "
                "(hotLoadDeploymentId): either the job names the deployment, or the deployment the job",
            )
    return base_model


def _normal(fields: DeploymentFields) -> dict[str, object]:
    return fields.model_dump(mode="json", by_alias=True, exclude_defaults=True)


def _shown(tables: Tables, found: Deployment) -> DeploymentObject:
    fact, fields = found.fact, found.fields
    ready = sum(replica.serving is not None for replica in replicas_of(tables, fact.id))
    wanted = fields.max_replica_count if fields.max_replica_count is not None else 1
    status = Status()
    if not ready and wanted:
        said = f"no engine yet: start some with `headrace engine --base-model {fact.base_model} --deployment {fact.id}`"
        status = Status(code="UNAVAILABLE", message=said)
    return DeploymentObject(
        **fields.model_dump(exclude={"direct_route_api_keys"}),
        name=found.name,
        state="READY" if ready or not wanted else "CREATING",
        status=status,
        create_time=fact.created_at,
        update_time=fact.updated_at,
        created_by=fact.owner,
        replica_count=ready,
        desired_replica_count=max(fields.min_replica_count or 0, min(wanted, 1)),
        replica_stats=ReplicaStats(ready_replica_count=ready),
    )


def _taken(tables: Tables, account: str, deployment: str) -> ProblemError | None:
    if deployment_key(account, deployment) in tables.facts:
        return ProblemError(409, f"{name_of(account, 'deployments', deployment)} exists: delete it first, or take another deploymentId")
    if is_of_another(tables, account, deployment):
        return ProblemError(409, f"deploymentId {deployment!r} is taken: engines know deployments by their ids alone, so take another")
    return None


def _turn_of(deployment: str) -> str:
    """An id is one account's: those of all accounts take turns."""
    return f"deployments/{deployment}"


async def _remove(gate: Gate, keys: list[str], turn: Turn | None = None) -> None:
    topic = gate.settings.topic_names.gateway
    gone = [Sealed(topic=topic, key=key, value=None) for key in keys]
    await gate.writer.commit(gone, is_in=lambda: not any(key in gate.view.tables.facts for key in keys), turn=turn)
