"""Models by the names that clients gave them, and what became of them."""

from dataclasses import dataclass
from datetime import datetime

from headrace.core.model_views import ModelView
from headrace.gateway.problems import FAILED_PRECONDITION, ProblemError
from headrace.gateway.rlor.names import name_of
from headrace.gateway.step_history import BriefStep
from headrace.gateway.tables import Tables
from headrace.schemas.jobs import JobState
from headrace.schemas.rlor_resources import ModelAlias, model_alias_key
from headrace.schemas.weights import WeightsPublished


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """A name, and the version that it stands for."""

    alias: ModelAlias
    view: ModelView
    """Of the job's model."""
    entry: BriefStep | None
    """The step that made the version; None: it is not committed, or the job was made anew since and its steps are no longer known."""
    ready_at: datetime | None
    """None: its step runs."""

    @property
    def name(self) -> str:
        """The resource name."""
        return name_of(self.alias.account, "models", self.alias.id)

    @property
    def state(self) -> str:
        """UPLOADING or READY."""
        return "UPLOADING" if self.ready_at is None else "READY"

    def version(self) -> WeightsPublished:
        """What engines are to be asked to load.

        Raises:
            ProblemError: 400: it is not committed, or no longer known.
        """
        if self.entry is None:
            why = "its step has not ended" if self.ready_at is None else "its job was deleted and made anew: its weights are not known here"
            raise ProblemError(400, f"{self.name} can't be loaded: {why}", code=FAILED_PRECONDITION)
        return version_of(self.view, self.entry)


def version_of(model: ModelView, entry: BriefStep) -> WeightsPublished:
    """A committed version as `weights` had it, without the list of its files."""
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


def find_alias(tables: Tables, account: str, model: str) -> ModelAlias:
    """A name that was given, whatever became of it.

    Raises:
        ProblemError: 404.
    """
    alias = tables.facts.get(model_alias_key(account, model))
    if not isinstance(alias, ModelAlias):
        raise ProblemError(404, f"{name_of(account, 'models', model)[:300]} does not exist")
    return alias


def find_model(tables: Tables, account: str, model: str) -> NamedModel:
    """A model that is there, or is being made.

    Raises:
        ProblemError: 404: there is none of this name, or its step has not begun, or failed.
    """
    alias = find_alias(tables, account, model)
    found, why = _named(tables, alias)
    if found is None:
        raise ProblemError(404, f"{name_of(account, 'models', model)} does not exist: {why}")
    return found


def models_of(tables: Tables, account: str) -> list[NamedModel]:
    """All models of an account that are there, or are being made."""
    aliases = [fact for fact in tables.facts_under(model_alias_key(account, "")) if isinstance(fact, ModelAlias)]
    return [found for alias in aliases if (found := _named(tables, alias)[0]) is not None]


def step_of(tables: Tables, alias: ModelAlias) -> BriefStep | None:
    """The step that made what a name stands for; None: not committed, or no longer known."""
    history = tables.steps.get(alias.model_id)
    if history is None:
        return None
    if alias.training_job is not None:
        return history.of_job(alias.training_job)
    view = tables.model(alias.model_id)
    if view is None or view.created_at > alias.created_at:
        return None  # the job was made anew since: its versions are others
    return None if alias.version is None else history.find(alias.version)


def _named(tables: Tables, alias: ModelAlias) -> tuple[NamedModel | None, str]:
    view, entry = tables.model(alias.model_id), step_of(tables, alias)
    if view is None:
        return None, f"its job {alias.job} is not known"
    ready_at = entry.committed_at if entry is not None else None
    if entry is None and alias.training_job is not None:
        job = tables.job(alias.training_job)
        if job is None or job.document is None or job.state in {JobState.PENDING, JobState.PAUSED}:
            return None, f"its step of job {alias.job} has not begun"
        if job.state in {JobState.FAILED, JobState.CANCELLED}:
            return None, f"its step of job {alias.job} is {job.state}: {job.document.error_message or 'no reason was given'}"
        if job.state is JobState.COMPLETED:
            ready_at = job.document.completed_at or job.document.updated_at
    elif entry is None:
        ready_at = alias.created_at
    return NamedModel(alias=alias, view=view, entry=entry, ready_at=ready_at), ""
