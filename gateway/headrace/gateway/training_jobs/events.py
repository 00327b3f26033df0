"""`/v1/preview/training-jobs/{id}` and its events, derived from the job's document.

The reference client polls the events until the job has ended, reading behind the last one that it knows. So they only ever grow at their
end, in this order: `warning` (what of the request has no effect), `training_started`, `gradient_step`, a `warning` of rejected groups and
trajectories, `training_ended` or `training_failed`. Guarantees: ids are the same in every gateway and after every start; every value of a
`gradient_step` is a float; the end is only shown when the checkpoint is listed; a client learns here why a group or a trajectory of its
job was rejected: counts by reason, and the first ones with index, reason and sentence. Limitations: a step that runs has no events, since
the number of its sequences is known at its commit; a job on which nothing could be trained has no start, which the client knows to read.

What a caller of the training-jobs API sees: its own models and jobs; everything else is 404.
"""

import uuid
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel

from headrace.core.job_views import JobView, outcome_messages
from headrace.core.model_views import ModelView, incarnation_of
from headrace.gateway.access import Caller, KnownCaller
from headrace.gateway.gate import OpenGate
from headrace.gateway.problems import FaultError, ProblemError, UnprocessableError
from headrace.gateway.tables import Tables, is_model
from headrace.gateway.training_jobs.pages import DEFAULT_LIMIT, After, Limit, Listed, Page, page
from headrace.schemas.gateway import GatewayJob, checkpoint_key, job_key
from headrace.schemas.jobs import JobDocument, JobRejections, JobState


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


router = APIRouter(prefix="/v1/preview/training-jobs/{job_id}", tags=["training-jobs"])


class JobEvent(Listed):
    """One thing that happened."""

    type: Literal["training_started", "gradient_step", "warning", "training_ended", "training_failed"]
    data: dict[str, Any]


class Job(BaseModel):
    """A training job as it stands."""

    id: str
    model_id: str
    status: str
    """`pending`, `running`, `paused`, `completed`, `failed`, `cancelled`, or `cancelling`: asked for, and not answered by a worker yet."""
    created_at: datetime
    training_start: datetime | None
    training_end: datetime | None
    error_message: str | None
    waiting_for: str | None
    """Why it is not begun although all of it is there."""
    kind: Literal["rl", "sft"]
    step: int | None
    """The model's step that it made."""
    num_groups: int
    groups_rejected: int
    rejections: JobRejections
    """Why: groups and trajectories by reason, and the first of them with their indices."""
    num_sequences: int | None
    metrics: dict[str, float]
    warnings: tuple[str, ...]
    """What of the request has no effect, what was rejected, and why a job trained nothing."""


@router.get("")
async def get_job(job_id: str, caller: KnownCaller, gate: OpenGate) -> Job:
    """A job as it stands."""
    view, fact = job_of(await gate.view.fresh(), caller, job_id)
    document = _document(view)
    return Job(
        id=view.job_id,
        model_id=view.model_id,
        status=str(view.state).removeprefix("JOB_STATE_").lower(),
        created_at=document.created_at,
        training_start=document.started_at,
        training_end=document.completed_at,
        error_message=document.error_message,
        waiting_for=document.waiting_for,
        kind=document.kind,
        step=document.step,
        num_groups=document.num_groups,
        groups_rejected=document.groups_rejected,
        rejections=document.rejections,
        num_sequences=document.num_sequences,
        metrics=document.metrics,
        warnings=(*fact.warnings, *outcome_messages(document)),
    )


@router.get("/events")
async def list_events(
    job_id: str, caller: KnownCaller, gate: OpenGate, *, after: After = None, limit: Limit = DEFAULT_LIMIT
) -> Page[JobEvent]:
    """What happened to a job so far, oldest first; none as long as no worker has done anything."""
    tables = await gate.view.fresh()
    view, fact = job_of(tables, caller, job_id)
    return page(events_of(tables, view, fact), after=after, limit=limit)


def events_of(tables: Tables, view: JobView, fact: GatewayJob) -> list[JobEvent]:
    """All events of a job so far."""
    document = _document(view)
    found: list[JobEvent] = []

    def add(kind: Any, data: dict[str, Any], number: int = 0) -> None:  # noqa: ANN401 - the literal of `type`
        found.append(JobEvent(id=str(uuid.uuid5(uuid.UUID(view.job_id), f"{kind}/{number}")), type=kind, data=data))

    def add_rejections() -> None:
        if messages := outcome_messages(document):
            data = {"message": "; ".join(messages), "groups_rejected": document.groups_rejected, "num_groups": document.num_groups}
            add("warning", {**data, "rejections": document.rejections.model_dump(mode="json")}, -1)

    for number, warning in enumerate(fact.warnings):
        add("warning", {"message": warning}, number)
    if view.state is JobState.COMPLETED and _is_listed(tables, document):
        if document.num_sequences:
            add("training_started", {"num_sequences": document.num_sequences})
            add("gradient_step", gradient_step(document))
        add_rejections()
        add("training_ended", {})
    elif view.state in {JobState.FAILED, JobState.CANCELLED}:
        add_rejections()
        add("training_failed", {"error_message": document.error_message or f"the job is {document.state}"})
    return found


def gradient_step(document: JobDocument) -> dict[str, float]:
    """The step's metrics, and those under the names that the reference client knows."""
    metrics = document.metrics
    trained = metrics.get("groups", 0.0) - metrics.get("groups_zero_variance", 0.0)
    named = {
        "num_groups_submitted": document.num_groups,
        "num_groups_trainable": trained,
        "num_trajectories": metrics.get("trajectories"),
        "num_trainable_tokens": metrics.get("trainable_tokens"),
        "num_tokens": metrics.get("tokens"),
        "kl_div": metrics.get("kl_reference"),
    }
    return {**metrics, **{name: float(value) for name, value in named.items() if value is not None}}


def _is_listed(tables: Tables, document: JobDocument) -> bool:
    """Whether who is told of the end finds the checkpoint: documents and ledger come in by several partitions."""
    model = tables.model(document.model_id)
    if model is None or not is_model(model) or model.created_at > document.created_at:
        return True  # deleted, or made again since: there is nothing to wait for
    return tables.history(model).of_job(document.job_id) is not None


def _document(view: JobView) -> JobDocument:
    assert view.document is not None  # noqa: S101 - a job of Headrace has one from its first transaction on
    return view.document
