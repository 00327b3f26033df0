"""What a job begins with that goes on from an output model: the stored weights of that version, and the settings that made it.

Guarantees: the weights are those that the name stands for, by digest. Gives up: output models of a job that was deleted and made anew
under the same id, and has trained since: the ledger of the one before is no longer known here.
"""

from dataclasses import dataclass

from headrace.gateway.problems import FAILED_PRECONDITION, ProblemError
from headrace.gateway.rlor.job_fields import JobFields
from headrace.gateway.rlor.model_facts import step_of
from headrace.gateway.rlor.names import id_in, name_of
from headrace.gateway.tables import Tables
from headrace.schemas.rlor import RlorJob, rlor_job_key
from headrace.schemas.rlor_resources import ModelAlias, model_alias_key
from headrace.schemas.weights import WeightsRef

_FIELD = "trainingConfig.warmStartFrom"


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart:
    """Where to begin."""

    weights: WeightsRef
    base_model: str
    """Name in the catalogue."""
    original: JobFields


def warm_start(tables: Tables, account: str, name: str) -> WarmStart:
    """The start that a model's name stands for.

    Raises:
        ProblemError: 404: there is no such model; 400: it is not committed yet, no adapter, or its weights are no longer known.
    """
    model = name_of(account, "models", id_in(account, "models", name, _FIELD))
    alias = tables.facts.get(model_alias_key(account, model.rpartition("/")[2]))
    if not isinstance(alias, ModelAlias):
        raise ProblemError(404, f"{_FIELD}: {model} does not exist: name the output model of a job; a base model is a baseModel")
    fact = tables.facts.get(rlor_job_key(account, alias.job))
    entry = step_of(tables, alias)
    if entry is None:
        view = tables.job(alias.training_job) if alias.training_job else None
        if view is not None and not view.final:
            raise ProblemError(400, f"{_FIELD}: {model} is not READY: its step is {view.state}", code=FAILED_PRECONDITION)
        raise ProblemError(400, f"{_FIELD}: the weights of {model} are not there: its step was not committed", code=FAILED_PRECONDITION)
    view_of_model = tables.model(alias.model_id)
    if not isinstance(fact, RlorJob) or fact.created_at > alias.created_at or view_of_model is None:
        raise ProblemError(400, f"{_FIELD}: the job that made {model} was made anew since: it is not known how it was trained", code=9)
    original = JobFields.model_validate(fact.request)
    if not original.training_config.lora_rank:
        raise ProblemError(400, f"{_FIELD}: {model} has no adapter (loraRank is 0): a warm start goes on from an adapter")
    return WarmStart(weights=entry.weights, base_model=view_of_model.settings.base_model, original=original)
