"""How an RLOR job stands: from its record, its model and the documents of its training jobs. Pure.

| state | when |
|---|---|
| DELETED | it was deleted; its record stays for 30 days; shown as DELETING |
| CANCELLED, CANCELLING | it was cancelled, and its step has ended, or not yet |
| PENDING | no worker has created its model; or a job of one step waits for its turn |
| FAILED | its model is stopped or has diverged, or its last step failed |
| RUNNING | its step runs; with `keepAlive` also while it waits for the next one |
| PAUSED, CANCELLED, COMPLETED | so is its step (an operator can pause or cancel it); with `keepAlive` COMPLETED is RUNNING |
| EXPIRED | with `keepAlive`: nothing happened for `inactivityTimeout` |

Guarantees: every gateway shows the same at the same time, with or without a worker; the states that are said here are the only ones. Gives
up: VALIDATING, CREATING, WRITING_RESULTS and the others; nothing of a job happens there that a client could act on.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from headrace.core.job_views import CANCELLING, JobView
from headrace.core.model_views import ModelView
from headrace.gateway.tables import Tables
from headrace.schemas.jobs import JobDocument, JobState
from headrace.schemas.rlor import RlorJob

KEPT_DELETED = timedelta(days=30)
OVER = frozenset({"COMPLETED", "FAILED", "CANCELLED", "EXPIRED", "DELETED"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A job as it stands. `state` without its prefix `JOB_STATE_`."""

    state: str
    code: str = "OK"
    """Name of a gRPC code."""
    message: str = ""
    completed_at: datetime | None = None
    epoch: int = 0
    """Epochs of the step that have ended."""
    epochs: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """Of accelerators, all steps together."""
    document: JobDocument | None = None
    """Of the training job that ended last, or that is at work."""
    busy: bool = False
    """A step of it has not ended."""


def standing(tables: Tables, job: RlorJob, *, keep_alive: bool, inactivity: float | None, now: datetime) -> Standing:
    """Judge a job.

    Args:
        tables: As of now.
        job: Its record.
        keep_alive: It takes more steps.
        inactivity: Seconds without a step after which it expires; None: never.
        now: The time that expiry is judged by.
    """
    views = step_views(tables, job)
    documents = [view.document for view in views if view.document is not None]
    ended = [view for view in views if view.final]
    seconds = Counter(job.seconds_before)
    for document in documents:
        seconds.update(document.accelerator_seconds)
    at_work = next((view for view in views if not view.final), None)
    told = at_work.document if at_work is not None else documents[-1] if documents else None

    bare = Standing(state="RUNNING", epoch=len(ended), epochs=len(views), seconds=dict(seconds), document=told, busy=at_work is not None)
    model = tables.model(job.model_id)
    done = bool(views) and all(view.state is JobState.COMPLETED for view in views) and not keep_alive
    completed_at = max((document.completed_at for document in documents if document.completed_at is not None), default=None)
    found = _asked_to_end(bare, job, done=done) or _unready(bare, model) or _given_up(bare, views, completed_at)
    if found is not None:
        return found
    if at_work is not None:
        return _at_work(bare, at_work, begun=keep_alive or bool(ended))
    if done:
        return replace(bare, state="COMPLETED", completed_at=completed_at)
    worked = model.state.updated_at if model is not None and model.state is not None else None
    since = max(moment for moment in (job.created_at, job.resumed_at, completed_at, worked) if moment is not None)
    return _waiting(bare, since, inactivity, now)


def step_views(tables: Tables, job: RlorJob) -> list[JobView]:
    """The training jobs of the last step, in order."""
    ids: Sequence[str] = job.step.training_jobs if job.step is not None else ()
    return [view for job_id in ids if (view := tables.job(job_id)) is not None]


def is_gone(job: RlorJob, now: datetime) -> bool:
    """Whether a deleted job's record is past its time."""
    return job.deleted_at is not None and now - job.deleted_at > KEPT_DELETED


def _asked_to_end(bare: Standing, job: RlorJob, *, done: bool) -> Standing | None:
    if job.deleted_at is not None:
        return replace(bare, state="DELETED", completed_at=job.deleted_at)
    if job.cancelled_at is None or done:
        return None
    if bare.busy:
        return replace(bare, state="CANCELLING", code="CANCELLED", message="cancelled on request; its step has not ended")
    return replace(bare, state="CANCELLED", code="CANCELLED", message="cancelled on request", completed_at=job.cancelled_at)


def _unready(bare: Standing, model: ModelView | None) -> Standing | None:
    if model is None or model.status in {"creating", "resuming"}:
        detail = None if model is None else model.status_detail
        return replace(bare, state="PENDING", message=detail or "no worker has created its model yet")
    if model.status in {"stopped", "diverged"}:
        said = f"its model is {model.status}: {model.status_detail}"
        return replace(bare, state="FAILED", code="FAILED_PRECONDITION", message=said)
    if model.status in {"deleting", "deleted"}:
        return replace(bare, state="FAILED", code="NOT_FOUND", message="its model was deleted")
    return None


def _given_up(bare: Standing, views: Sequence[JobView], completed_at: datetime | None) -> Standing | None:
    for view in views:
        if view.state is JobState.FAILED and view.document is not None:
            said = view.document.error_message or "the step failed"
            return replace(bare, state="FAILED", code="INTERNAL", message=said, completed_at=view.document.completed_at)
        if view.state in {JobState.CANCELLED, CANCELLING}:
            state = "CANCELLED" if view.state is JobState.CANCELLED else "CANCELLING"
            return replace(bare, state=state, code="CANCELLED", message="its step was cancelled", completed_at=completed_at)
    return None


def _at_work(bare: Standing, view: JobView, *, begun: bool) -> Standing:
    if view.state is JobState.PAUSED:
        return replace(bare, state="PAUSED", message="an operator paused its step")
    waiting = (view.document.waiting_for if view.document is not None else None) or ""
    return replace(bare, state="PENDING" if view.state is JobState.PENDING and not begun else "RUNNING", message=waiting)


def _waiting(bare: Standing, since: datetime, inactivity: float | None, now: datetime) -> Standing:
    if inactivity is None or now - since <= timedelta(seconds=inactivity):
        return bare
    said = f"nothing was asked of it for {inactivity:g} s (inactivityTimeout): :resume it, or make a new job"
    expired_at = since + timedelta(seconds=inactivity)
    return replace(bare, state="EXPIRED", code="DEADLINE_EXCEEDED", message=said, completed_at=expired_at)
