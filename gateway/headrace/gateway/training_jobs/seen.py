"""What a caller of the training-jobs API sees: its own models and jobs; everything else is 404."""

import uuid
from collections.abc import Sequence

from headrace.core.job_views import JobView
from headrace.core.model_views import ModelView, incarnation_of
from headrace.gateway.access import Caller
from headrace.gateway.problems import FaultError, ProblemError, UnprocessableError
from headrace.gateway.tables import Tables, is_model
from headrace.schemas.gateway import GatewayJob, checkpoint_key, job_key


def model_of(tables: Tables, caller: Caller, model_id: str, loc: Sequence[str | int] = ("path", "model_id")) -> ModelView:
    """A model that lives, or is about to.

    Args:
        tables: As of now.
        caller: Who asks.
        model_id: Its id.
        loc: Where the request says it.

    Raises:
        UnprocessableError: The id is no UUID.
        ProblemError: 404: the caller sees no such model.
    """
    try:
        uuid.UUID(model_id)
    except ValueError as error:
        raise UnprocessableError([FaultError(loc, f"Input should be a valid UUID: {error}", "uuid_parsing")]) from None
    view = tables.model(model_id)
    if view is None or not is_model(view) or not caller.sees(view.account, view.project):
        raise ProblemError(404, f"there is no model {model_id[:80]!r}: create it with POST /v1/preview/models")
    return view


def job_of(tables: Tables, caller: Caller, job_id: str) -> tuple[JobView, GatewayJob]:
    """A job that came by this API, with what the gateway noted of it.

    Raises:
        ProblemError: 404.
    """
    fact, view = tables.facts.get(job_key(job_id)), tables.job(job_id)
    if isinstance(fact, GatewayJob) and view is not None and fact.api == "training-jobs":
        model = tables.model(fact.model_id)
        if caller.sees(fact.account, None if model is None else model.project):
            return view, fact
    raise ProblemError(404, f"there is no training job {job_id[:80]!r}: its id is what POST /v1/preview/training-jobs answered")


def incarnation(model: ModelView) -> str:
    """Of a model that lives; also of one that no worker has created yet."""
    if model.status == "creating" and model.command is not None:
        return incarnation_of(model.model_id, model.command[1])
    assert model.state is not None  # noqa: S101 - only a model that is being created has none
    return model.state.incarnation


def version_of(model: ModelView) -> int:
    """The newest policy version of a model that lives."""
    return 0 if model.status == "creating" or model.state is None else model.state.policy_version


def is_deleted(tables: Tables, model: ModelView, step: int) -> bool:
    """Whether a version of a model was deleted: it is neither listed nor served."""
    return checkpoint_key(model.model_id, incarnation(model), step) in tables.facts
