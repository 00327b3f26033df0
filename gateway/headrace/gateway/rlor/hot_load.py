"""Hot load: a client asks a deployment's engines to load a snapshot, and watches each of them until they have.

A step of a job with `hotLoadDeploymentId`, or of a deployment's trainer, writes the manifest of its version as
`deployments/<folder>/<identity>/manifest.json`; the identity is in the ledger. Guarantees: an engine has a snapshot when it reported that
itself; until then its former one is shown, and the requested one as the target. Limitations: no deltas: every load is of the whole
snapshot, even if the metadata names a delta. The download and the load after it are one stage. A prompt cache never outlives a version
here, so `reset_prompt_cache` is stored without an effect.
"""

from typing import Annotated, Literal

from fastapi import APIRouter, Header
from pydantic import BaseModel, ConfigDict, Field

from headrace.gateway.access import KnownCaller
from headrace.gateway.facts import write_fact
from headrace.gateway.gate import OpenGate
from headrace.gateway.problems import FAILED_PRECONDITION, ProblemError
from headrace.gateway.rlor.deployment_state import Ack, Deployment, LoadTarget, Replica, find_deployment, find_load_target, find_replicas
from headrace.gateway.rlor.models import published_version
from headrace.gateway.rlor.resources import PROJECT
from headrace.gateway.rlor.wire import Empty
from headrace.gateway.tables import Tables
from headrace.schemas.deployments import HotLoad, PromptCacheReset
from headrace.schemas.weights import WeightsApplied, WeightsFailed, WeightsPublished

router = APIRouter(tags=["RLOR: hot load"])

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
    router.add_api_route(_path, hot_load, methods=["POST"], include_in_schema=_main)
    router.add_api_route(_path, hot_load_status, methods=["GET"], response_model_exclude_none=True, include_in_schema=_main)
    router.add_api_route(f"{_path}/hint", hot_load_hint, methods=["POST"], include_in_schema=_main)


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
