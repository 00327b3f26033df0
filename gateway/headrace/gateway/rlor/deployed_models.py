"""Models on deployments (LoRA load and unload): what the deployment's engines are asked to have, and whether they have it.

Guarantees: DEPLOYED is what an engine of the deployment said of this very version, or that it has gone on to a later one of the same model
and so serves this one by its name. Gives up: merging adapters into the base model; `replaceMergedAddon` takes the others away.
"""

import hashlib
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse
from pydantic import Field

from headrace.gateway.facts import fact_record, write_fact
from headrace.gateway.gate import OpenGate
from headrace.gateway.log_writer import Sealed
from headrace.gateway.problems import ProblemError
from headrace.gateway.rlor.deployed_facts import Deployed, DeployedState, deployed, deployed_of
from headrace.gateway.rlor.deployment_facts import find_deployment
from headrace.gateway.rlor.lists import Asked, listed
from headrace.gateway.rlor.masks import ReadMask, answered
from headrace.gateway.rlor.model_facts import find_model
from headrace.gateway.rlor.names import OwnAccount, id_in, name_of
from headrace.gateway.rlor.wire import Empty, Status, Timestamp, Wire
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


class DeployedModelList(Wire):
    """A page of them."""

    deployed_models: list[DeployedModelObject]
    next_page_token: str | None = None
    total_size: int


@router.post("", response_model_exclude_none=True)
async def load_model(
    *,
    account: str,
    body: DeployModel,
    caller: OwnAccount,
    gate: OpenGate,
    replace_merged_addon: Annotated[bool, Query(alias="replaceMergedAddon")] = False,
) -> DeployedModelObject:
    """Ask a deployment's engines to load a model. Asking again makes it what they should serve, once more."""
    if body.serverless:
        raise ProblemError(400, "serverless: a model is loaded on a deployment")
    tables = await gate.view.fresh()
    model = find_model(tables, account, id_in(account, "models", body.model, "model"))
    on = find_deployment(tables, account, id_in(account, "deployments", body.deployment, "deployment"))
    version = model.version()
    if version.base_model != on.fact.base_model:
        raise ProblemError(400, f"model: {model.name} is of base model {version.base_model}, {on.name} of {on.fact.base_model}")
    if on.fields.enable_hot_reload_latest_addon and not replace_merged_addon:
        raise ProblemError(400, f"replaceMergedAddon: {on.name} has one addon at a time (enableHotReloadLatestAddon): must be true")
    fact = DeployedModel(
        account=account,
        id=_id_of(model.alias.id, on.fact.id),
        deployment=on.fact.id,
        model=model.alias.id,
        owner=caller.owner,
        published=version,
        display_name=body.display_name,
        description=body.description,
        default=body.default,
        public=body.public,
    )
    topic, key = gate.settings.topic_names.gateway, deployed_model_key(account, fact.id)
    others = [other.fact for other in deployed_of(tables, account, deployment=on.fact.id) if other.fact.id != fact.id]
    records = [fact_record(gate, fact)]
    if replace_merged_addon:
        records += [Sealed(topic=topic, key=deployed_model_key(account, other.id), value=None) for other in others]
    await gate.writer.commit(records, is_in=lambda: gate.view.tables.facts.get(key) == fact)
    return _shown(_found(gate.view.tables, account, fact.id))


@router.get("", response_model=DeployedModelList)
async def list_deployed_models(account: str, caller: OwnAccount, gate: OpenGate, asked: Asked) -> JSONResponse:  # noqa: ARG001 - checks
    """Models on deployments of the account."""
    tables = await gate.view.fresh()
    rows = [_shown(one) for one in deployed_of(tables, account)]
    return JSONResponse(listed(rows, DeployedModelObject, asked, key="deployedModels", account=account))


@router.get("/{deployed_model}", response_model=DeployedModelObject)
async def get_deployed_model(
    account: str,
    deployed_model: str,
    caller: OwnAccount,  # noqa: ARG001 - checks
    gate: OpenGate,
    read_mask: ReadMask = "",
) -> JSONResponse:
    """One model on a deployment."""
    return answered(_shown(_found(await gate.view.fresh(), account, deployed_model)), read_mask)


@router.delete("/{deployed_model}")
async def unload_model(account: str, deployed_model: str, caller: OwnAccount, gate: OpenGate) -> Empty:  # noqa: ARG001 - checks
    """Ask the engines to have it no longer: UNDEPLOYING until they have said so, then gone."""
    found = _found(await gate.view.fresh(), account, deployed_model)
    if found.fact.removed_at is None:
        await write_fact(gate, found.fact.model_copy(update={"removed_at": utc_now()}))
    return Empty()


def _id_of(model: str, deployment: str) -> str:
    return f"{model}-{hashlib.sha256(deployment.encode()).hexdigest()[:8]}"


def _found(tables: Tables, account: str, deployed_model: str) -> Deployed:
    fact = tables.facts.get(deployed_model_key(account, deployed_model))
    found = deployed(tables, fact) if isinstance(fact, DeployedModel) else None
    if found is None:
        raise ProblemError(404, f"{name_of(account, 'deployedModels', deployed_model)[:300]} does not exist")
    return found


def _shown(found: Deployed) -> DeployedModelObject:
    fact = found.fact
    return DeployedModelObject(
        name=found.name,
        display_name=fact.display_name,
        description=fact.description,
        model=name_of(fact.account, "models", fact.model),
        deployment=found.deployment,
        state=found.state,
        status=Status() if found.fault is None else Status(code="INTERNAL", message=found.fault),
        default=fact.default,
        public=fact.public,
        create_time=fact.created_at,
        update_time=fact.removed_at or fact.requested_at,
    )
