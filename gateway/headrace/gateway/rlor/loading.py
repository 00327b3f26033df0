"""What a deployment's engines load: models (`deployedModels`) and snapshots (hot load).

A step of a job with `hotLoadDeploymentId`, or of a deployment's trainer, writes the manifest of its version as
`deployments/<folder>/<identity>/manifest.json`; the identity is in the ledger.
Guarantees: an engine has a version when it reported that version itself, or a later one of the same model, which it serves by this one's
name too. Until then its former snapshot is shown, and the requested one as the target.
Limitations: adapters are not merged into the base model; `replaceMergedAddon` removes the others. Every load is of the whole snapshot, even
if the metadata names a delta. The download and the load after it are one stage. `reset_prompt_cache` is stored without an effect: a prompt
cache never outlives a version here.
"""

import hashlib
from typing import Annotated, Literal

from fastapi import APIRouter, Header, Query
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from headrace.gateway.access import KnownCaller
from headrace.gateway.facts import fact_record, write_fact
from headrace.gateway.gate import OpenGate
from headrace.gateway.log_writer import Sealed
from headrace.gateway.problems import FAILED_PRECONDITION, ProblemError
from headrace.gateway.rlor.deployment_state import (
    Ack,
    DeployedState,
    Deployment,
    LoadTarget,
    ModelOnDeployment,
    Replica,
    deployed_model_from_record,
    find_deployed_models,
    find_deployment,
    find_load_target,
    find_replicas,
)
from headrace.gateway.rlor.filters import ReadMask, resource_response
from headrace.gateway.rlor.lists import ListParameters, list_page
from headrace.gateway.rlor.models import find_model, published_version
from headrace.gateway.rlor.resources import (
    PROJECT,
    Empty,
    ListPage,
    OwnAccount,
    Status,
    Timestamp,
    Wire,
    find_record,
    resource_id,
    resource_name,
)
from headrace.gateway.tables import Tables
from headrace.schemas.base import utc_now
from headrace.schemas.deployments import DeployedModel, HotLoad, PromptCacheReset, deployed_model_key
from headrace.schemas.weights import WeightsApplied, WeightsFailed, WeightsPublished

router = APIRouter(prefix="/v1/accounts/{account}/deployedModels", tags=["RLOR: deployments"])
hot_load_router = APIRouter(tags=["RLOR: hot load"])


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
    return _deployed_model_resource(_find_deployed_model(gate.view.tables, account, record.id))


@router.get("", response_model=DeployedModelList)
async def list_deployed_models(account: OwnAccount, gate: OpenGate, parameters: ListParameters) -> JSONResponse:
    """Models on deployments of the account."""
    rows = [_deployed_model_resource(model) for model in find_deployed_models(await gate.view.fresh(), account)]
    return JSONResponse(list_page(rows, DeployedModelObject, parameters, key="deployedModels", account=account))


@router.get("/{deployed_model}", response_model=DeployedModelObject)
async def get_deployed_model(account: OwnAccount, deployed_model: str, gate: OpenGate, read_mask: ReadMask = "") -> JSONResponse:
    """One model on a deployment."""
    return resource_response(_deployed_model_resource(_find_deployed_model(await gate.view.fresh(), account, deployed_model)), read_mask)


@router.delete("/{deployed_model}")
async def unload_model(account: OwnAccount, deployed_model: str, gate: OpenGate) -> Empty:
    """Ask the engines to unload it: UNDEPLOYING until they have reported that, then 404."""
    found = _find_deployed_model(await gate.view.fresh(), account, deployed_model)
    if found.record.removed_at is None:
        await write_fact(gate, found.record.model_copy(update={"removed_at": utc_now()}))
    return Empty()


def _find_deployed_model(tables: Tables, account: str, deployed_model: str) -> ModelOnDeployment:
    name = resource_name(account, "deployedModels", deployed_model)
    found = deployed_model_from_record(tables, find_record(tables, deployed_model_key(account, deployed_model), DeployedModel, name))
    if found is None:
        raise ProblemError(404, f"{name[:300]} does not exist")
    return found


def _deployed_model_resource(model: ModelOnDeployment) -> DeployedModelObject:
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


_PATHS = ("/hot_load/v1/models/hot_load", "/v1/models/hot_load")
DeploymentHeader = Annotated[str, Header(alias="fireworks-deployment")]


class _Strict(BaseModel):
    """This part of the API has snake_case only, and rejects unknown keys."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class DeltaMetadata(_Strict):
    """The base of a delta."""

    previous_snapshot_identity: str
    compression_format: Literal["arc_v1", "arc_v2", "arc_v3", "xor_one_to_one_zlib", "xor_one_to_one_zstd"] = "arc_v2"
    checksum_format: Literal["alder32", "adler32"] = "alder32"


class Validation(_Strict):
    """Strictness of the comparison of configs."""

    extra_fields_ignore: list[str] = Field(default_factory=list)


class HotLoadRequest(_Strict):
    """Body of a load."""

    identity: str = Field(min_length=1, max_length=255, pattern=r"^[^/]+$")
    incremental_snapshot_metadata: DeltaMetadata | None = None
    reset_prompt_cache: bool | PromptCacheReset = True
    validation: Validation | None = None


class LoadingState(BaseModel):
    """What an engine does."""

    stage: Literal["idle", "loading", "completed", "error"]
    target_snapshot_identity: str | None = None


class LoadedAdapter(BaseModel):
    """An adapter that an engine has, or should have."""

    identity: str
    status: Literal["loaded", "loading", "failed"]


class ReplicaStatus(BaseModel):
    """One engine."""

    replica: str
    """The engine's name; not in the hosted API."""
    current_snapshot_identity: str
    readiness: bool
    loading_state: LoadingState
    loaded_adapters: list[LoadedAdapter]
    error: str | None = None
    """Why it could not load its target; not in the hosted API."""
    supports_rdma_weight_sync: bool = False
    rdma_weight_sync_enabled: bool = False


class HotLoadStatus(BaseModel):
    """All engines of a deployment; empty while they start."""

    replicas: list[ReplicaStatus]


async def hot_load(body: HotLoadRequest, caller: KnownCaller, gate: OpenGate, fireworks_deployment: DeploymentHeader = "") -> Empty:
    """Ask the engines of the deployment in the header `fireworks-deployment` to load a snapshot."""
    tables = await gate.view.fresh()
    deployment = _deployment(tables, caller, fireworks_deployment)
    if not deployment.fields.enable_hot_load:
        raise ProblemError(400, f"{deployment.name} was not made with enableHotLoad", code=FAILED_PRECONDITION)
    version = _find_snapshot(tables, deployment, body.identity)
    if version is None:
        raise ProblemError(
            404,
            f"{deployment.name} has no snapshot {body.identity!r}: each committed step of a job with "
            f"hotLoadDeploymentId={deployment.record.id}, or of its hotLoadTrainerJob, writes one",
        )
    if version.base_model != deployment.record.base_model:
        raise ProblemError(400, f"snapshot {body.identity!r} is of base model {version.base_model}, not {deployment.record.base_model}")
    if (later := _later(tables, deployment, version)) is not None:
        raise ProblemError(
            409,
            f"snapshot {body.identity!r} is version {version.policy_version}, {deployment.name} is at {later}: an engine does not go back",
        )
    reset: PromptCacheReset | bool = body.reset_prompt_cache
    if isinstance(reset, bool):
        reset = "all" if reset else "none"
    record = HotLoad(
        account=caller.account, deployment=deployment.record.id, published=version, identity=body.identity, reset_prompt_cache=reset
    )
    await write_fact(gate, record)
    return Empty()


async def hot_load_status(caller: KnownCaller, gate: OpenGate, fireworks_deployment: DeploymentHeader = "") -> HotLoadStatus:
    """The snapshot that each of the deployment's engines serves, and the one that it should serve."""
    tables = await gate.view.fresh()
    deployment = _deployment(tables, caller, fireworks_deployment)
    target = find_load_target(tables, deployment)
    return HotLoadStatus(replicas=[_status(tables, replica, target) for replica in find_replicas(tables, deployment.record.id)])


async def hot_load_hint(caller: KnownCaller, gate: OpenGate, fireworks_deployment: DeploymentHeader = "") -> Empty:
    """Hints about files are accepted without an effect: engines fetch a snapshot as a whole."""
    _deployment(await gate.view.fresh(), caller, fireworks_deployment)
    return Empty()


for _path in _PATHS:
    _main = _path == _PATHS[0]
    hot_load_router.add_api_route(_path, hot_load, methods=["POST"], include_in_schema=_main)
    hot_load_router.add_api_route(_path, hot_load_status, methods=["GET"], response_model_exclude_none=True, include_in_schema=_main)
    hot_load_router.add_api_route(f"{_path}/hint", hot_load_hint, methods=["POST"], include_in_schema=_main)


def _deployment(tables: Tables, caller: KnownCaller, name: str) -> Deployment:
    parts = name.split("/")
    if len(parts) != 4 or parts[0] != "accounts" or parts[2] != "deployments":
        raise ProblemError(400, f"header fireworks-deployment: {name[:200]!r}: accounts/<account>/deployments/<id> is needed")
    if not caller.sees(parts[1], PROJECT):
        raise ProblemError(404, f"{name[:300]} does not exist, or belongs to another account")
    return find_deployment(tables, parts[1], parts[3])


def _find_snapshot(tables: Tables, deployment: Deployment, identity: str) -> WeightsPublished | None:
    """The version of a deployment's snapshot; None: there is no such snapshot."""
    for model_id, history in tables.steps.items():
        entry = history.of_snapshot(identity, (deployment.snapshot_folder,))
        view = None if entry is None else tables.model(model_id)
        if entry is not None and view is not None and view.account == deployment.record.account:
            return published_version(view, entry)
    return None


def _identity(tables: Tables, version: WeightsPublished | Ack) -> str:
    """The name of a version as a snapshot: the identity of its own, else `v<version>`; empty for the base model."""
    history = tables.steps.get(version.model_id)
    entry = history.find(version.policy_version) if history is not None and history.incarnation == version.incarnation else None
    if entry is not None and entry.hot_load_identity is not None:
        return entry.hot_load_identity
    return f"v{version.policy_version}" if version.policy_version else ""


def _later(tables: Tables, deployment: Deployment, version: WeightsPublished) -> int | None:
    """A later version of the same model that an engine serves or should serve."""
    known: list[WeightsApplied | WeightsPublished] = [
        ack for replica in find_replicas(tables, deployment.record.id) for ack in replica.acks if isinstance(ack, WeightsApplied)
    ]
    if (target := find_load_target(tables, deployment)) is not None:
        known.append(target.version)
    of_it = (one.policy_version for one in known if (one.model_id, one.incarnation) == (version.model_id, version.incarnation))
    return max((number for number in of_it if number > version.policy_version), default=None)


def _status(tables: Tables, replica: Replica, target: LoadTarget | None) -> ReplicaStatus:
    serving = replica.serving
    current = "" if serving is None else _identity(tables, serving)
    adapters = [
        LoadedAdapter(identity=identity, status="loaded" if isinstance(ack, WeightsApplied) else "failed")
        for ack in replica.acks
        if (identity := _identity(tables, ack))
    ]
    state, error = LoadingState(stage="idle"), None
    if target is not None:
        wanted = target.identity or _identity(tables, target.version)
        ack = replica.find_ack(target.version)
        if isinstance(ack, WeightsApplied):
            state = LoadingState(stage="completed", target_snapshot_identity=wanted)
            current = _identity(tables, ack) if ack.policy_version > target.version.policy_version else wanted
        elif isinstance(ack, WeightsFailed):
            state, error = LoadingState(stage="error", target_snapshot_identity=wanted), ack.error
        else:
            state = LoadingState(stage="loading", target_snapshot_identity=wanted)
            adapters.append(LoadedAdapter(identity=wanted, status="loading"))
    return ReplicaStatus(
        replica=replica.engine,
        current_snapshot_identity=current,
        readiness=serving is not None,
        loading_state=state,
        loaded_adapters=adapters,
        error=error,
    )
