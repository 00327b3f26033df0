"""RLOR jobs: the record of a job, the state that follows from the log, and the resource that the API shows.

A deleted job's record stays for 30 days and is shown as DELETING. `docs/rlor.md` has the table of states. `job_status` decides in this
order: deleted or cancelled, the model cannot be used, the step failed, the step runs, completed, expired, waiting.
Guarantees: every gateway shows the same state at the same time, with or without a worker. No secret is shown. Within one gateway, changes
of one job run one after the other (`lock_job`); across gateways, a change of an outdated record is not written (`steps.write_job`).
Limitations: the hosted API's other states (VALIDATING, CREATING, WRITING_RESULTS, …) are not used: a client could not act on them.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from weakref import WeakValueDictionary

from pydantic import Field

from headrace.core.job_views import CANCELLING, JobView, outcome_messages
from headrace.core.model_views import ModelView
from headrace.gateway.gate import Gate
from headrace.gateway.problems import FAILED_PRECONDITION, ProblemError
from headrace.gateway.rlor.job_fields import JobFields, WandbConfig
from headrace.gateway.rlor.resources import Int64, Status, Timestamp, Wire, find_record, resource_name
from headrace.gateway.tables import Tables
from headrace.schemas.base import utc_now
from headrace.schemas.deployments import deployment_key
from headrace.schemas.jobs import JobDocument, JobState
from headrace.schemas.rlor import RlorJob, RlorRun, rlor_job_key, rlor_run_key

KIND = "rlorTrainerJobs"
FINISHED = frozenset({"COMPLETED", "FAILED", "CANCELLED", "EXPIRED", "DELETED"})
_DELETED_DAYS = 30
_JOBS_A_TURN = 50
_locks: WeakValueDictionary[tuple[int, str, str], asyncio.Lock] = WeakValueDictionary()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """The state of a job. `state` has no prefix `JOB_STATE_`."""

    state: str
    code: str = "OK"
    """Name of a gRPC code."""
    message: str = ""
    completed_at: datetime | None = None
    epoch: int = 0
    """Epochs of the step that have ended."""
    epochs: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """Of accelerators, over all steps."""
    document: JobDocument | None = None
    """Of the training job that runs, or that ended last."""
    busy: bool = False
    """Its step has not ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job: its record, the fields of its request, its state."""

    record: RlorJob
    fields: JobFields
    status: JobStatus
    run_url: str
    """Address of the Weights & Biases run; empty: there is none."""
    run_fault: str | None
    """Why metrics are not in the run."""
    missing_deployments: tuple[str, ...] = ()
    """Names of deployments that the job names and that do not exist."""

    @property
    def name(self) -> str:
        """The resource name."""
        return resource_name(self.record.account, KIND, self.record.id)

    def wrong_state(self, verb: str) -> ProblemError:
        """The error of a call that the job's state does not allow."""
        why = f": {self.status.message}" if self.status.message else ""
        return ProblemError(400, f"cannot {verb} job in state: JOB_STATE_{self.status.state}{why}", code=FAILED_PRECONDITION)


class JobProgress(Wire):
    """Progress of the last step."""

    percent: int
    epoch: int
    """From 0: the one that runs, or the last."""
    total_input_requests: int
    """Groups of the step."""
    total_processed_requests: int
    """Groups of the epochs that have ended, each counted once."""


class StoredLogprobs(Wire):
    """The log-probabilities that a job with `forwardOnly` wrote."""

    uri: str
    digest: str


class ShownWandbConfig(WandbConfig):
    """The run that metrics are also written to."""

    url: str = ""
    """Of the run, once there is one; an offline run has none."""


class RlorTrainerJob(JobFields):
    """A job. `evaluation`, `metrics`, `logprobs` and `steps` are not in the hosted API."""

    wandb_config: ShownWandbConfig | None = None
    name: str = ""
    create_time: Timestamp | None = None
    completed_time: Timestamp | None = None
    state: str = ""
    status: Status = Status()
    created_by: str = ""
    accelerator_seconds: dict[str, Int64] = Field(default_factory=dict)
    job_progress: JobProgress | None = None
    steps: int = 0
    """Steps that were requested."""
    evaluation: dict[str, float] | None = None
    """Scores of the evaluation set after the last step."""
    metrics: dict[str, float] | None = None
    """Of the last step."""
    logprobs: StoredLogprobs | None = None


@asynccontextmanager
async def lock_job(gate: Gate, account: str, job_id: str) -> AsyncIterator[Tables]:
    """Hold the lock of a job in this gateway; gives the current tables."""
    lock = _locks.setdefault((id(gate), account, job_id), asyncio.Lock())
    async with lock:
        yield await gate.view.fresh()


def find_job(tables: Tables, account: str, job_id: str) -> Job:
    """A job by its id; a deleted one too, for 30 days. Raises ProblemError (404)."""
    name = resource_name(account, KIND, job_id)
    record = find_record(tables, rlor_job_key(account, job_id), RlorJob, name)
    if record.deleted_at is not None and utc_now() - record.deleted_at > timedelta(days=_DELETED_DAYS):
        raise ProblemError(404, f"{name[:300]} does not exist")
    return job_from_record(tables, record)


async def each_job(tables: Tables, account: str) -> AsyncIterator[Job]:
    """All jobs of an account that are not deleted, by name. Yields to other tasks between them: there may be thousands."""
    now = utc_now()
    for number, record in enumerate(tables.facts_under(rlor_job_key(account, "")), start=1):
        if isinstance(record, RlorJob) and record.deleted_at is None:
            yield job_from_record(tables, record, now)
        if number % _JOBS_A_TURN == 0:
            await asyncio.sleep(0)


def job_from_record(tables: Tables, record: RlorJob, now: datetime | None = None) -> Job:
    """A job with its state at `now`."""
    fields = JobFields.model_validate(record.request)
    inactivity = None if fields.disable_inactivity_cleanup else fields.inactivity_timeout
    run = tables.facts.get(rlor_run_key(record.account, record.id))
    own_run = run if isinstance(run, RlorRun) and run.nonce == record.nonce else None
    deployments = dict.fromkeys(filter(None, (fields.rollout_deployment_name, fields.hot_load_deployment_id)))
    missing = [deployment for deployment in deployments if deployment_key(record.account, deployment) not in tables.facts]
    return Job(
        record=record,
        fields=fields,
        status=job_status(tables, record, keep_alive=fields.keep_alive, inactivity=inactivity, now=now or utc_now()),
        run_url=own_run.url if own_run else "",
        run_fault=own_run.fault if own_run else None,
        missing_deployments=tuple(resource_name(record.account, "deployments", deployment) for deployment in missing),
    )


def job_status(tables: Tables, job: RlorJob, *, keep_alive: bool, inactivity: float | None, now: datetime) -> JobStatus:
    """The state of a job at `now`; without a step for `inactivity` seconds it expires."""
    views = step_views(tables, job)
    documents = [view.document for view in views if view.document is not None]
    ended = [view for view in views if view.final]
    seconds = Counter(job.seconds_before)
    for document in documents:
        seconds.update(document.accelerator_seconds)
    current = next((view for view in views if not view.final), None)
    shown = current.document if current is not None else documents[-1] if documents else None
    status = JobStatus(
        state="RUNNING", epoch=len(ended), epochs=len(views), seconds=dict(seconds), document=shown, busy=current is not None
    )
    model = tables.model(job.model_id)
    done = bool(views) and all(view.state is JobState.COMPLETED for view in views) and not keep_alive
    completed_at = max((document.completed_at for document in documents if document.completed_at is not None), default=None)
    found = (
        _if_deleted_or_cancelled(status, job, done=done)
        or _if_model_unusable(status, model)
        or _if_step_failed(status, views, completed_at)
    )
    if found is not None:
        return found
    if current is not None:
        return _while_step_runs(status, current, begun=keep_alive or bool(ended))
    if done:
        return replace(status, state="COMPLETED", completed_at=completed_at)
    worked = model.state.updated_at if model is not None and model.state is not None else None
    since = max(moment for moment in (job.created_at, job.resumed_at, completed_at, worked) if moment is not None)
    if inactivity is None or now - since <= timedelta(seconds=inactivity):
        return status
    message = f"no step was requested for {inactivity:g} s (inactivityTimeout): :resume it, or create a new job"
    expired_at = since + timedelta(seconds=inactivity)
    return replace(status, state="EXPIRED", code="DEADLINE_EXCEEDED", message=message, completed_at=expired_at)


def step_views(tables: Tables, job: RlorJob) -> list[JobView]:
    """The training jobs of the last step, in order."""
    ids: Sequence[str] = job.step.training_jobs if job.step is not None else ()
    return [view for job_id in ids if (view := tables.job(job_id)) is not None]


def job_resource(job: Job) -> RlorTrainerJob:
    """A job as the API shows it."""
    record, status, document = job.record, job.status, job.status.document
    logprobs = document.logprobs if document is not None else None
    fields = {name: getattr(job.fields, name) for name in JobFields.model_fields}
    if (wandb := job.fields.wandb_config) is not None:
        fields["wandb_config"] = ShownWandbConfig(**wandb.model_dump(), url=job.run_url)
    return RlorTrainerJob(
        **fields,
        name=job.name,
        create_time=record.created_at,
        completed_time=status.completed_at,
        # A deleted job: fireworks-ai 1.2.30, which validates strictly, has no other name for it.
        state=f"JOB_STATE_{'DELETING' if record.deleted_at is not None else status.state}",
        status=Status(code=status.code, message=_message(job)),
        created_by=record.owner,
        accelerator_seconds={name: round(seconds) for name, seconds in status.seconds.items()},
        job_progress=_progress(job),
        steps=record.steps_before + (record.step is not None),
        evaluation=(document.evaluation or None) if document is not None else None,
        metrics=(document.metrics or None) if document is not None else None,
        logprobs=None if logprobs is None else StoredLogprobs(uri=logprobs.uri, digest=logprobs.digest),
    )


def _if_deleted_or_cancelled(status: JobStatus, job: RlorJob, *, done: bool) -> JobStatus | None:
    if job.deleted_at is not None:
        return replace(status, state="DELETED", completed_at=job.deleted_at)
    if job.cancelled_at is None or done:
        return None
    if status.busy:
        return replace(status, state="CANCELLING", code="CANCELLED", message="cancelled on request; its step has not ended")
    return replace(status, state="CANCELLED", code="CANCELLED", message="cancelled on request", completed_at=job.cancelled_at)


def _if_model_unusable(status: JobStatus, model: ModelView | None) -> JobStatus | None:
    if model is None or model.status in {"creating", "resuming"}:
        detail = None if model is None else model.status_detail
        return replace(status, state="PENDING", message=detail or "no worker has created its model yet")
    if model.status in {"stopped", "diverged"}:
        message = f"its model is {model.status}: {model.status_detail}"
        return replace(status, state="FAILED", code="FAILED_PRECONDITION", message=message)
    if model.status in {"deleting", "deleted"}:
        return replace(status, state="FAILED", code="NOT_FOUND", message="its model was deleted")
    return None


def _if_step_failed(status: JobStatus, views: Sequence[JobView], completed_at: datetime | None) -> JobStatus | None:
    for view in views:
        if view.state is JobState.FAILED and view.document is not None:
            message = view.document.error_message or "the step failed"
            return replace(status, state="FAILED", code="INTERNAL", message=message, completed_at=view.document.completed_at)
        if view.state in {JobState.CANCELLED, CANCELLING}:
            state = "CANCELLED" if view.state is JobState.CANCELLED else "CANCELLING"
            return replace(status, state=state, code="CANCELLED", message="its step was cancelled", completed_at=completed_at)
    return None


def _while_step_runs(status: JobStatus, view: JobView, *, begun: bool) -> JobStatus:
    if view.state is JobState.PAUSED:
        return replace(status, state="PAUSED", message="an operator paused its step")
    waiting = (view.document.waiting_for if view.document is not None else None) or ""
    return replace(status, state="PENDING" if view.state is JobState.PENDING and not begun else "RUNNING", message=waiting)


def _message(job: Job) -> str:
    """The reason of the state, what the last step did not train, and missing deployments; else the fields without effect."""
    if job.record.deleted_at is not None:
        return f"it was deleted; for {_DELETED_DAYS} days its checkpoints can be listed and promoted"
    not_trained = () if job.status.document is None else outcome_messages(job.status.document)
    missing = (f"{name} does not exist: no engine loads the job's versions until it is created" for name in job.missing_deployments)
    no_effect = f"without effect here: {', '.join(job.record.without_effect)}" if job.record.without_effect else ""
    return "; ".join(filter(None, (job.status.message, *not_trained, *missing))) or "; ".join(filter(None, (no_effect, job.run_fault)))


def _progress(job: Job) -> JobProgress | None:
    step, status = job.record.step, job.status
    if step is None or not status.epochs:
        return None
    return JobProgress(
        percent=int(100 * status.epoch / status.epochs),
        epoch=min(status.epoch, status.epochs - 1),
        total_input_requests=step.groups,
        total_processed_requests=step.groups if status.epoch else 0,
    )
