"""Models on deployments (LoRA load and unload): the models that a deployment's engines should have, and whether they have them.

Guarantees: DEPLOYED means that an engine of the deployment reported this very version, or a later one of the same model, which it serves by
this one's name too. Limitations: adapters are not merged into the base model; `replaceMergedAddon` removes the others.
"""

import hashlib
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse
from pydantic import Field

from headrace.gateway.access import KnownCaller
from headrace.gateway.facts import fact_record, write_fact
from headrace.gateway.gate import OpenGate
from headrace.gateway.log_writer import Sealed
from headrace.gateway.problems import ProblemError
from headrace.gateway.rlor.deployment_state import (
    DeployedState,
    ModelOnDeployment,
    deployed_model_from_record,
    find_deployed_models,
    find_deployment,
)
from headrace.gateway.rlor.field_paths import ReadMask, resource_response
from headrace.gateway.rlor.lists import ListParameters, list_page
from headrace.gateway.rlor.models import find_model
from headrace.gateway.rlor.resources import OwnAccount, find_record, resource_id, resource_name
from headrace.gateway.rlor.wire import Empty, ListPage, Status, Timestamp, Wire
from headrace.gateway.tables import Tables
from headrace.schemas.base import utc_now
from headrace.schemas.deployments import DeployedModel, deployed_model_key

router = APIRouter(prefix="/v1/accounts/{account}/deployedModels", tags=["RLOR: deployments"])


class DeployModel(Wire):
    """Body of a load."""

    model: str = Field(min_length=1)
    deployment: str = Field(min_length=1)
    display_name: str = Field(default="", max_length=63)
    description: str = Field(default="", max_length=4096)
    default: bool = False
    public: bool = False
    serverless: bool = False


class DeployedModelObject(Wire):
    """A model on a deployment."""

    name: str
    display_name: str
    description: str
    model: str
    deployment: str
    state: DeployedState
    status: Status
    default: bool
    public: bool
    serverless: bool = False
    create_time: Timestamp
    update_time: Timestamp


class DeployedModelList(ListPage):
    """A page of models on deployments."""

    deployed_models: list[DeployedModelObject]


@router.post("", response_model_exclude_none=True)
async def load_model(
    account: OwnAccount,
    body: DeployModel,
    caller: KnownCaller,
    gate: OpenGate,
    replace_merged_addon: Annotated[bool, Query(alias="replaceMergedAddon")] = False,
) -> DeployedModelObject:
    """Ask a deployment's engines to load a model. A repeat makes it again the version that they should serve."""
    if body.serverless:
        raise ProblemError(400, "serverless: a model is loaded on a deployment")
    tables = await gate.view.fresh()
    model = find_model(tables, account, resource_id(account, "models", body.model, "model"))
    deployment = find_deployment(tables, account, resource_id(account, "deployments", body.deployment, "deployment"))
    version, base_model = model.version(), deployment.record.base_model
    if version.base_model != base_model:
        raise ProblemError(400, f"model: {model.name} is of base model {version.base_model}, {deployment.name} of {base_model}")
    if deployment.fields.enable_hot_reload_latest_addon and not replace_merged_addon:
        raise ProblemError(400, f"replaceMergedAddon: {deployment.name} has one addon at a time (enableHotReloadLatestAddon): must be true")
    record = DeployedModel(
        account=account,
        id=f"{model.alias.id}-{hashlib.sha256(deployment.record.id.encode()).hexdigest()[:8]}",
        deployment=deployment.record.id,
        model=model.alias.id,
        owner=caller.owner,
        published=version,
        display_name=body.display_name,
        description=body.description,
        default=body.default,
        public=body.public,
    )
    topic, key = gate.settings.topic_names.gateway, deployed_model_key(account, record.id)
    records = [fact_record(gate, record)]
    if replace_merged_addon:
        others = [other.record.id for other in find_deployed_models(tables, account, deployment=deployment.record.id)]
        records += [Sealed(topic=topic, key=deployed_model_key(account, other), value=None) for other in others if other != record.id]
    await gate.writer.commit(records, is_in=lambda: gate.view.tables.facts.get(key) == record)
    return _resource(_find(gate.view.tables, account, record.id))


@router.get("", response_model=DeployedModelList)
async def list_deployed_models(account: OwnAccount, gate: OpenGate, parameters: ListParameters) -> JSONResponse:
    """Models on deployments of the account."""
    rows = [_resource(model) for model in find_deployed_models(await gate.view.fresh(), account)]
    return JSONResponse(list_page(rows, DeployedModelObject, parameters, key="deployedModels", account=account))


@router.get("/{deployed_model}", response_model=DeployedModelObject)
async def get_deployed_model(account: OwnAccount, deployed_model: str, gate: OpenGate, read_mask: ReadMask = "") -> JSONResponse:
    """One model on a deployment."""
    return resource_response(_resource(_find(await gate.view.fresh(), account, deployed_model)), read_mask)


@router.delete("/{deployed_model}")
async def unload_model(account: OwnAccount, deployed_model: str, gate: OpenGate) -> Empty:
    """Ask the engines to unload it: UNDEPLOYING until they have reported that, then 404."""
    found = _find(await gate.view.fresh(), account, deployed_model)
    if found.record.removed_at is None:
        await write_fact(gate, found.record.model_copy(update={"removed_at": utc_now()}))
    return Empty()


def _find(tables: Tables, account: str, deployed_model: str) -> ModelOnDeployment:
    name = resource_name(account, "deployedModels", deployed_model)
    found = deployed_model_from_record(tables, find_record(tables, deployed_model_key(account, deployed_model), DeployedModel, name))
    if found is None:
        raise ProblemError(404, f"{name[:300]} does not exist")
    return found


def _resource(model: ModelOnDeployment) -> DeployedModelObject:
    record = model.record
    return DeployedModelObject(
        name=model.name,
        display_name=record.display_name,
        description=record.description,
        model=resource_name(record.account, "models", record.model),
        deployment=model.deployment,
        state=model.state,
        status=Status() if model.fault is None else Status(code="INTERNAL", message=model.fault),
        default=record.default,
        public=record.public,
        create_time=record.created_at,
        update_time=record.removed_at or record.requested_at,
    )
