"""Names of the RLOR API where inference asks for a model: `accounts/a/models/m`, `accounts/a/deployments/d`, or `<model>#<deployment>`.

A model's name is the version that it stands for; a deployment's is what its engines were asked to serve last, or its base model. A base
model is there under any account's name. Guarantees: whoever asks gets that version, or an error that says why not. Gives up: asking the
engines of one deployment only; any engine that serves the version may answer.
"""

from dataclasses import dataclass

from headrace.core.model_views import ModelView
from headrace.gateway.access import Caller
from headrace.gateway.problems import ProblemError
from headrace.gateway.rlor.deployment_facts import find_deployment, load_target
from headrace.gateway.rlor.model_facts import find_model
from headrace.gateway.rlor.names import PROJECT
from headrace.gateway.tables import Tables
from headrace.schemas.base import utc_now
from headrace.schemas.training import ModelSettings


@dataclass(frozen=True, slots=True)
class NamedVersion:
    """What a name means."""

    view: ModelView
    version: int


def named_version(tables: Tables, caller: Caller, name: str, base_models: frozenset[str]) -> NamedVersion:
    """The version that a name means.

    Args:
        tables: As of now.
        caller: Who asks.
        name: Begins with `accounts/`.
        base_models: Names in the catalogue.

    Raises:
        ProblemError: 404: there is no such thing; 400: the model is not there yet.
    """
    parts = name.partition("#")[0].split("/")
    if len(parts) != 4 or parts[2] not in {"models", "deployments"}:
        raise ProblemError(404, f"model {name[:200]!r} is no name: accounts/<account>/models/<id> or accounts/<account>/deployments/<id>")
    _, account, kind, id = parts  # noqa: A001 - the API's word
    if kind == "models" and id in base_models:
        return _base(id, caller)
    if not caller.sees(account, PROJECT):
        raise ProblemError(404, f"{name[:200]} does not exist, or belongs to another account")
    if kind == "models":
        model = find_model(tables, account, id)
        return NamedVersion(model.view, model.version().policy_version)
    deployment = find_deployment(tables, account, id)
    target = load_target(tables, deployment)
    view = None if target is None else tables.model(target.version.model_id)
    if target is None or view is None:
        return _base(deployment.fact.base_model, caller)
    return NamedVersion(view, target.version.policy_version)


def _base(name: str, caller: Caller) -> NamedVersion:
    """A base model as engines speak of it: a model of its own name, of which there is version 0."""
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
