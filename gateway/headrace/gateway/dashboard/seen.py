"""Models and jobs as rows, and which of them a caller may see.

Guarantees: what is of another account, or of a project that the token does not cover, is not there (404). Limitations: all of them at once;
the latest that changed are listed, and whether there are more.
"""

import asyncio
from collections.abc import Iterable, Mapping

from headrace.core.job_outcome import outcome_messages
from headrace.core.job_views import JobView
from headrace.core.model_views import ModelView
from headrace.gateway.access import Caller
from headrace.gateway.dashboard.answers import EngineRow, JobRow, ModelRow, Overview
from headrace.gateway.problems import ProblemError
from headrace.gateway.tables import Tables, engine_of
from headrace.schemas.gateway import GatewayJob, job_key
from headrace.schemas.jobs import JobDocument
from headrace.schemas.reasons import RejectionReason
from headrace.schemas.weights import WeightsApplied, WeightsFailed

LISTED = 200
_LOOKED_AT = 5000
"""Of all accounts; where another has more than this, what has not changed for long is not found here."""
_TURN = 50


def seen_model(tables: Tables, caller: Caller, model_id: str) -> ModelView:
    """A model that the caller sees.

    Raises:
        ProblemError: 404.
    """
    view = tables.model(model_id)
    if view is None or not caller.sees(view.account, view.project):
        raise ProblemError(404, f"there is no model {model_id} here")
    return view


def sees_job(tables: Tables, caller: Caller, view: JobView) -> bool:
    """Whether a job is there for this caller: by its model, else by who asked for it."""
    model = tables.model(view.model_id)
    if model is not None:
        return caller.sees(model.account, model.project)
    fact = tables.facts.get(job_key(view.job_id))
    return isinstance(fact, GatewayJob) and caller.sees(fact.account) and not caller.projects


async def overview(tables: Tables, caller: Caller) -> Overview:
    """The latest models and jobs; other requests get their turn meanwhile."""
    models: list[ModelRow] = []
    ids = _latest({key: r.timestamp for key, r in tables.states.items() if not key.startswith("lane:")}, tables.commands)
    for number, model_id in enumerate(ids):
        if number % _TURN == 0:
            await asyncio.sleep(0)
        view = tables.model(model_id)
        if view is not None and view.status != "deleted" and caller.sees(view.account, view.project):
            models.append(model_row(tables, view))
        if len(models) > LISTED:
            break
    jobs = await job_rows(tables, caller)
    return Overview(
        account=caller.account,
        models=models[:LISTED],
        more_models=len(models) > LISTED,
        jobs=jobs[:LISTED],
        more_jobs=len(jobs) > LISTED,
    )


async def job_rows(tables: Tables, caller: Caller, model_id: str | None = None, limit: int = LISTED) -> list[JobRow]:
    """The latest jobs, of one model or of all; one more than the limit where there are more."""
    rows: list[JobRow] = []
    # Named in its document's bytes, or not of this model: most need not be read.
    named = (model_id or "").encode()
    stamps = {key: record.timestamp for key, record in tables.documents.items() if named in record.value}
    for number, job_id in enumerate(_latest(stamps)):
        if number % _TURN == 0:
            await asyncio.sleep(0)
        view = tables.job(job_id)
        if view is not None and model_id in {None, view.model_id} and sees_job(tables, caller, view):
            rows.append(job_row(tables, view))
        if len(rows) > limit:
            break
    return sorted(rows, key=lambda row: (row.created_at is None, row.created_at), reverse=True)


def model_row(tables: Tables, view: ModelView) -> ModelRow:
    """A model as a row."""
    state = view.state
    history = tables.history(view)
    last = history.last
    return ModelRow(
        id=view.model_id,
        name=view.name,
        project=view.project,
        base_model=view.settings.base_model,
        adaptation=view.settings.adaptation,
        status=view.status,
        detail=view.status_detail,
        version=0 if state is None else state.policy_version,
        waiting=0 if state is None else len(state.pending),
        trained=0 if state is None else state.groups_trained,
        refusals={} if state is None else _counts(state.refusals),
        trajectory_refusals={} if state is None else _counts(state.trajectory_refusals),
        reward=None if last is None else last.metrics.get("reward_mean"),
        loss=None if last is None else last.metrics.get("loss"),
        created_at=view.created_at,
        updated_at=view.created_at if state is None else state.updated_at,
        shadow_of=view.shadow_of,
        engines=[engine_row(ack) for ack in tables.acks.values() if is_of(ack, view) and not tables.is_silent(ack)],
    )


def engine_row(ack: WeightsApplied | WeightsFailed) -> EngineRow:
    """An ack as a row."""
    return EngineRow(
        engine=engine_of(ack),
        version=ack.policy_version,
        at=ack.failed_at if isinstance(ack, WeightsFailed) else ack.applied_at,
        error=ack.error if isinstance(ack, WeightsFailed) else None,
        deployment=ack.deployment,
    )


def is_of(ack: WeightsApplied | WeightsFailed, view: ModelView) -> bool:
    """Whether an ack is about this incarnation of a model; one of version 0 may have come before there was any."""
    incarnation = None if view.state is None else view.state.incarnation
    return ack.model_id == view.model_id and ack.incarnation in {incarnation, ""}


def job_row(tables: Tables, view: JobView) -> JobRow:
    """A job as a row."""
    document = view.document
    model = tables.model(view.model_id)
    return JobRow(
        id=view.job_id,
        model_id=view.model_id,
        model_name=view.model_id if model is None else model.name,
        state=view.state,
        requested=view.requested,
        can_cancel=not view.final and view.requested != "cancel",
        kind="rl" if document is None else document.kind,
        groups=0 if document is None else document.num_groups,
        groups_rejected=0 if document is None else document.groups_rejected,
        step=None if document is None else document.step,
        message=None if document is None else _message(view, document),
        created_at=None if document is None else document.created_at,
        started_at=None if document is None else document.started_at,
        completed_at=None if document is None else document.completed_at,
    )


def _message(view: JobView, document: JobDocument) -> str | None:
    """Why a job failed or waits; of one that has ended well, what of it did not train."""
    if document.error_message is not None or not view.final:
        return document.error_message or document.waiting_for
    return "; ".join(outcome_messages(document)[:2]) or None


def _counts(values: Mapping[RejectionReason, int]) -> dict[str, int]:
    return {name.value: count for name, count in values.items() if count}


def _latest(stamps: dict[str, int], first: Iterable[str] = ()) -> list[str]:
    """Keys by when their record was written, the latest first; before them those that have none."""
    unwritten = [key for key in first if key not in stamps]
    return [*unwritten, *sorted(stamps, key=lambda key: stamps[key], reverse=True)][:_LOOKED_AT]
