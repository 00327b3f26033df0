"""Deployments of the RLOR API: create, get, list, change, scale, delete.

A deployment is a name that engines are started with (`headrace engine --deployment ID`); the gateway starts none. It is CREATING until one
of its engines has reported the version that it serves, then READY; with `maxReplicaCount` 0 it is READY without engines. Guarantees: state
of engines is only what they reported themselves. A killed engine counts until `gateway.engine_silence_seconds` without a heartbeat.
Limitations: an engine that never sends heartbeats counts for ever.
"""

import uuid
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse

from headrace.gateway.access import KnownCaller
from headrace.gateway.facts import write_fact
from headrace.gateway.gate import Gate, OpenGate
from headrace.gateway.log_writer import OvertakenError, Turn
from headrace.gateway.problems import FAILED_PRECONDITION, ProblemError
from headrace.gateway.rlor.deployment_state import (
    Deployment,
    DeploymentFields,
    belongs_to_another,
    check_deployment,
    deployment_from_record,
    find_deployed_models,
    find_deployment,
    find_replicas,
    list_account_deployments,
)
from headrace.gateway.rlor.filters import MAX_FIELDS, ReadMask, field_path, resource_response
from headrace.gateway.rlor.job_rules import base_model_name
from headrace.gateway.rlor.job_status import KIND, find_job
from headrace.gateway.rlor.lists import ListParameters, list_page
from headrace.gateway.rlor.resources import (
    Empty,
    ListPage,
    OwnAccount,
    Status,
    Timestamp,
    Wire,
    check_id,
    delete_records,
    parse_as,
    read_object,
    records_under,
    request_body,
    resource_id,
    resource_name,
)
from headrace.gateway.tables import Tables
from headrace.schemas.base import utc_now
from headrace.schemas.deployments import DeployedModel, DeploymentFact, deployed_model_key, deployment_key, hot_load_key

router = APIRouter(prefix="/v1/accounts/{account}/deployments", tags=["RLOR: deployments"])

_BODY = request_body(DeploymentFields)


class ReplicaStats(Wire):
    """Numbers of engines."""

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


class DeploymentList(ListPage):
    """A page of deployments."""

    deployments: list[DeploymentObject]


class Scale(Wire):
    """Body of `:scale`."""

    replica_count: int = 0


@router.post("", response_model=DeploymentObject, openapi_extra=_BODY)
async def create_deployment(
    *,
    account: OwnAccount,
    request: Request,
    caller: KnownCaller,
    gate: OpenGate,
    deployment_id: Annotated[str, Query(alias="deploymentId")] = "",
    validate_only: Annotated[bool, Query(alias="validateOnly")] = False,
) -> JSONResponse:
    """Create a deployment. 409 if it exists."""
    fields = parse_as(DeploymentFields, await read_object(request))
    tables = await gate.view.fresh()
    base_model = _check(gate, tables, account, fields)
    deployment = check_id(deployment_id, "deploymentId") if deployment_id else f"d-{uuid.uuid4().hex[:12]}"
    if (problem := _conflict(tables, account, deployment)) is not None:
        raise problem
    record = DeploymentFact(account=account, id=deployment, owner=caller.owner, base_model=base_model, request=_request(fields))
    if not validate_only:
        try:
            turn = Turn(of=_turn_name(deployment), still=lambda: _conflict(tables, account, deployment) is None)
            await write_fact(gate, record, turn=turn)
        except OvertakenError as error:
            raise (_conflict(tables, account, deployment) or error) from None
    return resource_response(_resource(gate.view.tables, deployment_from_record(record)))


@router.get("", response_model=DeploymentList)
async def list_deployments(account: OwnAccount, gate: OpenGate, parameters: ListParameters) -> JSONResponse:
    """Deployments of the account."""
    tables = await gate.view.fresh()
    rows = [_resource(tables, found) for found in list_account_deployments(tables, account)]
    return JSONResponse(list_page(rows, DeploymentObject, parameters, key="deployments", account=account))


@router.get("/{deployment}", response_model=DeploymentObject)
async def get_deployment(account: OwnAccount, deployment: str, gate: OpenGate, read_mask: ReadMask = "") -> JSONResponse:
    """One deployment."""
    tables = await gate.view.fresh()
    return resource_response(_resource(tables, find_deployment(tables, account, deployment)), read_mask)


@router.patch("/{deployment}:scale", response_model=DeploymentObject)
async def scale_deployment(account: OwnAccount, deployment: str, body: Scale, gate: OpenGate) -> JSONResponse:
    """Set the number of engines that are wanted; operators start and stop them."""
    return await _change(gate, account, deployment, {"minReplicaCount": body.replica_count, "maxReplicaCount": body.replica_count})


@router.patch("/{deployment}", response_model=DeploymentObject, openapi_extra=_BODY)
async def change_deployment(
    account: OwnAccount,
    deployment: str,
    request: Request,
    gate: OpenGate,
    update_mask: Annotated[str, Query(alias="updateMask")] = "",
) -> JSONResponse:
    """Change the fields of `updateMask`, by default those of the body. A field of the mask that the body lacks is unset."""
    changes = parse_as(DeploymentFields, await read_object(request)).model_dump(mode="json", by_alias=True, exclude_unset=True)
    if not update_mask.strip():
        return await _change(gate, account, deployment, changes)
    parts = [part for part in update_mask.split(",") if part.strip()]
    if len(parts) > MAX_FIELDS:
        raise ProblemError(400, f"updateMask: {len(parts)} fields, {MAX_FIELDS} at most are possible")
    names = [field_path(DeploymentFields, part, "updateMask")[0] for part in parts]
    return await _change(gate, account, deployment, {name: changes.get(name) for name in names})


@router.delete("/{deployment}")
async def delete_deployment(
    account: OwnAccount,
    deployment: str,
    gate: OpenGate,
    ignore_checks: Annotated[bool, Query(alias="ignoreChecks")] = False,
    hard: bool = False,  # noqa: ARG001 - it is deleted at once either way
) -> Empty:
    """Delete a deployment; with models loaded on it only with `ignoreChecks`. Its engines run until they are stopped."""
    tables = await gate.view.fresh()
    found = find_deployment(tables, account, deployment)
    loaded = [one.name for one in find_deployed_models(tables, account, deployment=deployment) if one.state != "UNDEPLOYING"]
    if loaded and not ignore_checks:
        message = f"{found.name} has models loaded, {loaded[0]} among them: delete them first, or set ignoreChecks=true"
        raise ProblemError(400, message, code=FAILED_PRECONDITION)
    models = records_under(tables, deployed_model_key(account, ""), DeployedModel)
    model_keys = [deployed_model_key(account, model.id) for model in models if model.deployment == deployment]
    key = deployment_key(account, deployment)
    # In the turn of the changes: a change that was decided before must not bring a deleted deployment back.
    turn = Turn.while_unchanged(_turn_name(deployment), tables.facts, {key: found.record})
    await delete_records(gate, [key, hot_load_key(account, deployment), *model_keys], turn)
    return Empty()


@router.delete("/{deployment}/ledger")
async def delete_ledger(account: OwnAccount, deployment: str, gate: OpenGate) -> Empty:
    """Forget the snapshot that was requested last. Every load is of a full snapshot, so the next one is too."""
    find_deployment(await gate.view.fresh(), account, deployment)
    await delete_records(gate, [hot_load_key(account, deployment)])
    return Empty()


async def _change(gate: Gate, account: str, deployment: str, changes: dict[str, object]) -> JSONResponse:
    tables = await gate.view.fresh()
    found = find_deployment(tables, account, deployment)
    merged = {**found.record.request, **changes}
    fields = parse_as(DeploymentFields, {name: value for name, value in merged.items() if value is not None})
    if _check(gate, tables, account, fields) != found.record.base_model:
        raise ProblemError(400, f"baseModel: that of {found.name} can't be changed: create another deployment")
    record = found.record.model_copy(update={"request": _request(fields), "updated_at": utc_now()})
    turn = Turn.while_unchanged(_turn_name(deployment), tables.facts, {deployment_key(account, deployment): found.record})
    await write_fact(gate, record, turn=turn)
    return resource_response(_resource(gate.view.tables, deployment_from_record(record)))


def _check(gate: Gate, tables: Tables, account: str, fields: DeploymentFields) -> str:
    """The base model's name in the catalogue, if the fields are valid."""
    check_deployment(fields, account)
    base_model = base_model_name(fields.base_model)
    if base_model not in gate.settings.base_models:
        names = ", ".join(sorted(gate.settings.base_models)) or "none"
        raise ProblemError(400, f"baseModel: {fields.base_model!r} is not in the catalogue; there are {names}")
    if fields.hot_load_trainer_job:
        job = find_job(tables, account, resource_id(account, KIND, fields.hot_load_trainer_job, "hotLoadTrainerJob"))
        if job.fields.hot_load_deployment_id:
            raise ProblemError(
                400,
                f"hotLoadTrainerJob: {job.name} writes its snapshots for deployment {job.fields.hot_load_deployment_id} "
                "(hotLoadDeploymentId): either the job names the deployment, or the deployment the job",
            )
    return base_model


def _request(fields: DeploymentFields) -> dict[str, object]:
    return fields.model_dump(mode="json", by_alias=True, exclude_defaults=True)


def _resource(tables: Tables, deployment: Deployment) -> DeploymentObject:
    record, fields = deployment.record, deployment.fields
    ready = sum(replica.serving is not None for replica in find_replicas(tables, record.id))
    wanted = fields.max_replica_count if fields.max_replica_count is not None else 1
    status = Status()
    if not ready and wanted:
        message = f"no engine yet: start some with `headrace engine --base-model {record.base_model} --deployment {record.id}`"
        status = Status(code="UNAVAILABLE", message=message)
    return DeploymentObject(
        **fields.model_dump(exclude={"direct_route_api_keys"}),
        name=deployment.name,
        state="READY" if ready or not wanted else "CREATING",
        status=status,
        create_time=record.created_at,
        update_time=record.updated_at,
        created_by=record.owner,
        replica_count=ready,
        desired_replica_count=max(fields.min_replica_count or 0, min(wanted, 1)),
        replica_stats=ReplicaStats(ready_replica_count=ready),
    )


def _conflict(tables: Tables, account: str, deployment: str) -> ProblemError | None:
    if deployment_key(account, deployment) in tables.facts:
        name = resource_name(account, "deployments", deployment)
        return ProblemError(409, f"{name} exists: delete it first, or take another deploymentId")
    if belongs_to_another(tables, account, deployment):
        return ProblemError(409, f"deploymentId {deployment!r} is taken: engines know deployments by their ids alone, so take another")
    return None


def _turn_name(deployment: str) -> str:
    """One account has each id, so changes of an id take turns over all accounts."""
    return f"deployments/{deployment}"
