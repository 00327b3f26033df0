"""Models of the RLOR API: names that clients gave to versions, and base models.

In inference, a model's name is its version, and a deployment's name is the version that its engines should serve, or its base model.
Guarantees: a model does not exist before its step begins, is UPLOADING while it runs and READY once it is committed. Models of a deleted
job stay.
Limitations: models cannot be uploaded. A deletion removes the name, not the weights. Inference does not choose the engines of one
deployment: any engine that serves the version may answer.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from headrace.core.model_views import ModelView
from headrace.gateway.access import Caller, KnownCaller
from headrace.gateway.gate import Gate, OpenGate
from headrace.gateway.problems import FAILED_PRECONDITION, ProblemError
from headrace.gateway.rlor.deployment_state import DeployedState, find_deployed_models, find_deployment, find_load_target
from headrace.gateway.rlor.filters import ReadMask, resource_response
from headrace.gateway.rlor.lists import ListParameters, list_page
from headrace.gateway.rlor.resources import (
    PROJECT,
    Empty,
    ListPage,
    OwnAccount,
    Status,
    Timestamp,
    Wire,
    check_id,
    delete_records,
    find_record,
    records_under,
    resource_id,
    resource_name,
)
from headrace.gateway.step_history import BriefStep
from headrace.gateway.tables import Tables
from headrace.schemas.base import utc_now
from headrace.schemas.jobs import JobState
from headrace.schemas.rlor import ModelAlias, model_alias_key
from headrace.schemas.training import ModelSettings
from headrace.schemas.weights import WeightsPublished

router = APIRouter(prefix="/v1/accounts/{account}/models", tags=["RLOR: models"])


class PeftDetails(Wire):
    """Of an adapter."""

    base_model: str
    r: int
    target_modules: list[str]


class BaseModelDetails(Wire):
    """Of full weights."""

    checkpoint_format: Literal["HUGGINGFACE"] = "HUGGINGFACE"
    tunable: bool


class DeployedModelRef(Wire):
    """A deployment that a model is loaded on."""

    name: str
    deployment: str
    state: DeployedState
    default: bool
    public: bool


class ModelObject(Wire):
    """A model. `policyVersion`, `servedAs` and `hotLoadIdentity` are not in the hosted API."""

    name: str
    display_name: str | None = None
    create_time: Timestamp | None = None
    update_time: Timestamp | None = None
    kind: Literal["HF_BASE_MODEL", "HF_PEFT_ADDON"]
    state: Literal["UPLOADING", "READY"]
    status: Status = Status()
    base_model_details: BaseModelDetails | None = None
    peft_details: PeftDetails | None = None
    context_length: int | None = None
    fine_tuning_job: str | None = None
    deployed_model_refs: list[DeployedModelRef] | None = None
    public: bool = False
    supports_lora: bool | None = None
    tunable: bool | None = None
    policy_version: int | None = None
    """The version of the job's model."""
    served_as: str | None = None
    """The name under which engines serve it; the gateway also accepts the model's own name."""
    hot_load_identity: str | None = None
    """Of its snapshot, if its job wrote one."""


class ModelList(ListPage):
    """A page of models."""

    models: list[ModelObject]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """A name, and the version that it stands for."""

    alias: ModelAlias
    view: ModelView
    """Of the job's model."""
    entry: BriefStep | None
    """The step that made the version; None: it is not committed, or the job was created again and its former steps are no longer known."""
    ready_at: datetime | None
    """None: its step runs."""

    @property
    def name(self) -> str:
        """The resource name."""
        return resource_name(self.alias.account, "models", self.alias.id)

    def version(self) -> WeightsPublished:
        """The version, for engines to load. Raises ProblemError (400: it is not committed, or no longer known)."""
        if self.entry is None:
            lost = "its job was deleted and created again: its weights are not known here"
            why = "its step has not ended" if self.ready_at is None else lost
            raise ProblemError(400, f"{self.name} can't be loaded: {why}", code=FAILED_PRECONDITION)
        return published_version(self.view, self.entry)


@dataclass(frozen=True, slots=True)
class NamedVersion:
    """The version that a name stands for in inference."""

    view: ModelView
    version: int


def published_version(model: ModelView, entry: BriefStep) -> WeightsPublished:
    """A committed version as topic `weights` has it, without the list of its files."""
    return WeightsPublished(
        model_id=model.model_id,
        incarnation=entry.incarnation,
        policy_version=entry.step,
        base_model=model.settings.base_model,
        format=model.settings.adaptation,
        uri=entry.weights.uri,
        digest=entry.weights.digest,
        files=(),
        published_at=entry.committed_at,
    )


def find_model(tables: Tables, account: str, model: str) -> NamedModel:
    """A model. Raises ProblemError (404: the name does not exist, or its step has not begun, or failed)."""
    found = _resolve(tables, _find_alias(tables, account, model))
    if isinstance(found, str):
        raise ProblemError(404, f"{resource_name(account, 'models', model)} does not exist: {found}")
    return found


def check_output_model(tables: Tables, gate: Gate, account: str, name: str, field: str) -> str:
    """The id of a model that does not exist yet. Raises ProblemError (400: not an id; 409: the model exists)."""
    found = check_id(resource_id(account, "models", name, field), field)
    if model_alias_key(account, found) in tables.facts or found in gate.settings.base_models:
        raise ProblemError(409, f"{field}: {resource_name(account, 'models', found)} exists: delete it first, or take another id")
    return found


def find_step(tables: Tables, alias: ModelAlias) -> BriefStep | None:
    """The step that made the version of a name; None: not committed, or no longer known."""
    history = tables.steps.get(alias.model_id)
    if history is None:
        return None
    if alias.training_job is not None:
        return history.of_job(alias.training_job)
    view = tables.model(alias.model_id)
    if view is None or view.created_at > alias.created_at:
        return None  # the job was deleted and created again: its versions are others
    return None if alias.version is None else history.find(alias.version)


def named_version(tables: Tables, caller: Caller, name: str, base_models: frozenset[str]) -> NamedVersion:
    """The version that `accounts/a/models/m` or `accounts/a/deployments/d` stands for; `#…` after it is ignored.

    A base model of the catalogue exists under every account's name. Raises ProblemError (404: it does not exist; 400: it is not READY).
    """
    parts = name.partition("#")[0].split("/")
    if len(parts) != 4 or parts[2] not in {"models", "deployments"}:
        raise ProblemError(404, f"model {name[:200]!r} is no name: accounts/<account>/models/<id> or accounts/<account>/deployments/<id>")
    _, account, kind, id = parts  # noqa: A001 - the API's word
    if kind == "models" and id in base_models:
        return _base_model(id, caller)
    if not caller.sees(account, PROJECT):
        raise ProblemError(404, f"{name[:200]} does not exist, or belongs to another account")
    if kind == "models":
        model = find_model(tables, account, id)
        return NamedVersion(model.view, model.version().policy_version)
    deployment = find_deployment(tables, account, id)
    target = find_load_target(tables, deployment)
    view = None if target is None else tables.model(target.version.model_id)
    if target is None or view is None:
        return _base_model(deployment.record.base_model, caller)
    return NamedVersion(view, target.version.policy_version)


@router.get("", response_model=ModelList)
async def list_models(account: OwnAccount, gate: OpenGate, parameters: ListParameters) -> JSONResponse:
    """Models that steps of the account's jobs made; base models are not among them."""
    tables = await gate.view.fresh()
    found = [_resolve(tables, alias) for alias in records_under(tables, model_alias_key(account, ""), ModelAlias)]
    rows = [_resource(tables, model) for model in found if isinstance(model, NamedModel)]
    return JSONResponse(list_page(rows, ModelObject, parameters, key="models", account=account))


@router.get("/{model}", response_model=ModelObject)
async def get_model(account: str, model: str, caller: KnownCaller, gate: OpenGate, read_mask: ReadMask = "") -> JSONResponse:
    """A model of the account, or a base model of the catalogue under any account's name."""
    entry = gate.settings.base_models.get(model)
    if entry is not None:
        base = ModelObject(
            name=resource_name(account, "models", model),
            kind="HF_BASE_MODEL",
            state="READY",
            base_model_details=BaseModelDetails(tunable=bool(entry.trainable)),
            supports_lora="lora" in entry.trainable,
            tunable=bool(entry.trainable),
        )
        return resource_response(base, read_mask)
    if not caller.sees(account, PROJECT):
        raise ProblemError(404, f"{resource_name(account, 'models', model)[:300]} does not exist, or belongs to another account")
    tables = await gate.view.fresh()
    return resource_response(_resource(tables, find_model(tables, account, model)), read_mask)


@router.delete("/{model}")
async def delete_model(account: OwnAccount, model: str, gate: OpenGate) -> Empty:
    """Delete a model's name; the version stays, as a checkpoint of its job."""
    tables = await gate.view.fresh()
    alias = _find_alias(tables, account, model)
    if loaded := [one.name for one in find_deployed_models(tables, account, model=model) if one.state != "UNDEPLOYING"]:
        name = resource_name(account, "models", model)
        raise ProblemError(400, f"{name} is loaded: delete {loaded[0]} first", code=FAILED_PRECONDITION)
    await delete_records(gate, [model_alias_key(account, alias.id)])
    return Empty()


def _find_alias(tables: Tables, account: str, model: str) -> ModelAlias:
    return find_record(tables, model_alias_key(account, model), ModelAlias, resource_name(account, "models", model))


def _resolve(tables: Tables, alias: ModelAlias) -> NamedModel | str:
    """The model of a name, or the reason why there is none."""
    view, entry = tables.model(alias.model_id), find_step(tables, alias)
    if view is None:
        return f"its job {alias.job} is not known"
    ready_at = entry.committed_at if entry is not None else None
    if entry is None and alias.training_job is not None:
        job = tables.job(alias.training_job)
        if job is None or job.document is None or job.state in {JobState.PENDING, JobState.PAUSED}:
            return f"its step of job {alias.job} has not begun"
        if job.state in {JobState.FAILED, JobState.CANCELLED}:
            return f"its step of job {alias.job} is {job.state}: {job.document.error_message or 'no reason was given'}"
        if job.state is JobState.COMPLETED:
            ready_at = job.document.completed_at or job.document.updated_at
    elif entry is None:
        ready_at = alias.created_at
    return NamedModel(alias=alias, view=view, entry=entry, ready_at=ready_at)


def _base_model(name: str, caller: Caller) -> NamedVersion:
    """A base model as engines name it: version 0 of a model with its own name."""
    view = ModelView(
        model_id=name,
        account=caller.account,
        project=PROJECT,
        name=name,
        status="active",
        status_detail=None,
        settings=ModelSettings(base_model=name),
        worker_group="",
        created_at=utc_now(),
        state=None,
    )
    return NamedVersion(view, 0)


def _resource(tables: Tables, model: NamedModel) -> ModelObject:
    alias, settings, entry = model.alias, model.view.settings, model.entry
    is_adapter = settings.adaptation == "lora"
    targets = settings.lora.target_modules
    peft_details = PeftDetails(
        base_model=resource_name(alias.account, "models", settings.base_model),
        r=settings.lora.r,
        target_modules=["all-linear"] if isinstance(targets, str) else list(targets),
    )
    refs = [
        DeployedModelRef(name=one.name, deployment=one.deployment, state=one.state, default=one.record.default, public=one.record.public)
        for one in find_deployed_models(tables, alias.account, model=alias.id)
    ]
    return ModelObject(
        name=model.name,
        create_time=alias.created_at,
        update_time=model.ready_at or alias.created_at,
        kind="HF_PEFT_ADDON" if is_adapter else "HF_BASE_MODEL",
        state="UPLOADING" if model.ready_at is None else "READY",
        base_model_details=None if is_adapter else BaseModelDetails(tunable=False),
        peft_details=peft_details if is_adapter else None,
        context_length=settings.max_sequence_tokens,
        fine_tuning_job=resource_name(alias.account, "rlorTrainerJobs", alias.job),
        deployed_model_refs=refs or None,
        policy_version=None if entry is None else entry.step,
        served_as=None if entry is None else f"{alias.model_id}@{entry.step}",
        hot_load_identity=None if entry is None else entry.hot_load_identity,
    )
