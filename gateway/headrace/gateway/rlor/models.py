"""Models of the RLOR API: what steps of jobs made, by the names that clients gave, and the base models of the catalogue.

Guarantees: a model is not there before its step begins, UPLOADING while it runs, READY once it is committed; a deleted job's models stay.
Gives up: uploading models; deleting weights, of which only the name goes.
"""

from typing import Literal

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from headrace.gateway.access import KnownCaller
from headrace.gateway.gate import OpenGate
from headrace.gateway.log_writer import Sealed
from headrace.gateway.problems import FAILED_PRECONDITION, ProblemError
from headrace.gateway.rlor.deployed_facts import DeployedState, deployed_of
from headrace.gateway.rlor.lists import Asked, listed
from headrace.gateway.rlor.masks import ReadMask, answered
from headrace.gateway.rlor.model_facts import NamedModel, find_alias, find_model, models_of
from headrace.gateway.rlor.names import PROJECT, OwnAccount, name_of
from headrace.gateway.rlor.wire import Empty, Status, Timestamp, Wire
from headrace.gateway.tables import Tables
from headrace.schemas.rlor_resources import model_alias_key

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
    """Where a model is loaded."""

    name: str
    deployment: str
    state: DeployedState
    default: bool
    public: bool


class ModelObject(Wire):
    """A model."""

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
    """Ours: which version of the job's model this is."""
    served_as: str | None = None
    """Ours: the name under which engines serve it; the gateway takes the model's own name, too."""
    hot_load_identity: str | None = None
    """Ours: that of its snapshot, where its job wrote one."""


class ModelList(Wire):
    """A page of models."""

    models: list[ModelObject]
    next_page_token: str | None = None
    total_size: int


@router.get("", response_model=ModelList)
async def list_models(account: str, caller: OwnAccount, gate: OpenGate, asked: Asked) -> JSONResponse:  # noqa: ARG001 - checks
    """Models that steps of the account's jobs made; base models are not among them."""
    tables = await gate.view.fresh()
    rows = [_shown(tables, found) for found in models_of(tables, account)]
    return JSONResponse(listed(rows, ModelObject, asked, key="models", account=account))


@router.get("/{model}", response_model=ModelObject)
async def get_model(account: str, model: str, caller: KnownCaller, gate: OpenGate, read_mask: ReadMask = "") -> JSONResponse:
    """A model of the account, or a base model of the catalogue under any account's name."""
    entry = gate.settings.base_models.get(model)
    if entry is not None:
        base = ModelObject(
            name=name_of(account, "models", model),
            kind="HF_BASE_MODEL",
            state="READY",
            base_model_details=BaseModelDetails(tunable=bool(entry.trainable)),
            supports_lora="lora" in entry.trainable,
            tunable=bool(entry.trainable),
        )
        return answered(base, read_mask)
    if not caller.sees(account, PROJECT):
        raise ProblemError(404, f"{name_of(account, 'models', model)[:300]} does not exist, or belongs to another account")
    tables = await gate.view.fresh()
    return answered(_shown(tables, find_model(tables, account, model)), read_mask)


@router.delete("/{model}")
async def delete_model(account: str, model: str, caller: OwnAccount, gate: OpenGate) -> Empty:  # noqa: ARG001 - checks
    """Take a model's name away; the version stays, as a checkpoint of its job."""
    tables = await gate.view.fresh()
    alias = find_alias(tables, account, model)
    if loaded := [one.name for one in deployed_of(tables, account, model=model) if one.state != "UNDEPLOYING"]:
        raise ProblemError(400, f"{name_of(account, 'models', model)} is loaded: delete {loaded[0]} first", code=FAILED_PRECONDITION)
    key = model_alias_key(account, alias.id)
    gone = Sealed(topic=gate.settings.topic_names.gateway, key=key, value=None)
    await gate.writer.commit([gone], is_in=lambda: key not in gate.view.tables.facts)
    return Empty()


def _shown(tables: Tables, found: NamedModel) -> ModelObject:
    alias, settings = found.alias, found.view.settings
    is_adapter = settings.adaptation == "lora"
    base, targets = name_of(alias.account, "models", settings.base_model), settings.lora.target_modules
    named = ["all-linear"] if isinstance(targets, str) else list(targets)
    refs = [
        DeployedModelRef(name=one.name, deployment=one.deployment, state=one.state, default=one.fact.default, public=one.fact.public)
        for one in deployed_of(tables, alias.account, model=alias.id)
    ]
    return ModelObject(
        name=found.name,
        create_time=alias.created_at,
        update_time=found.ready_at or alias.created_at,
        kind="HF_PEFT_ADDON" if is_adapter else "HF_BASE_MODEL",
        state="READY" if found.ready_at is not None else "UPLOADING",
        base_model_details=None if is_adapter else BaseModelDetails(tunable=False),
        peft_details=PeftDetails(base_model=base, r=settings.lora.r, target_modules=named) if is_adapter else None,
        context_length=settings.max_sequence_tokens,
        fine_tuning_job=name_of(alias.account, "rlorTrainerJobs", alias.job),
        deployed_model_refs=refs or None,
        policy_version=None if found.entry is None else found.entry.step,
        served_as=None if found.entry is None else f"{alias.model_id}@{found.entry.step}",
        hot_load_identity=None if found.entry is None else found.entry.hot_load_identity,
    )
