"""An RLOR job as the API shows it: what was asked, and what came of it.

Guarantees: nothing secret is in it. Ours, beside the hosted API's fields: `evaluation`, `metrics`, `logprobs`, `steps`.
"""

from pydantic import Field

from headrace.core.job_outcome import outcome_messages
from headrace.gateway.rlor.job_facts import Job
from headrace.gateway.rlor.job_fields import JobFields, WandbConfig
from headrace.gateway.rlor.job_state import KEPT_DELETED
from headrace.gateway.rlor.wire import Int64, Status, Timestamp, Wire

_DELETED = f"it was deleted; for {KEPT_DELETED.days} days its checkpoints can be listed and promoted"


class JobProgress(Wire):
    """How far the last step is."""

    percent: int
    epoch: int
    """From 0: the one at work, or the last."""
    total_input_requests: int
    """Groups of the step."""
    total_processed_requests: int
    """Groups of the epochs that have ended, each counted once."""


class StoredLogprobs(Wire):
    """What a job with `forwardOnly` wrote."""

    uri: str
    digest: str


class ShownWandbConfig(WandbConfig):
    """Where metrics go, too."""

    url: str = ""
    """Of the run, once there is one; an offline run has none."""


class RlorTrainerJob(JobFields):
    """A job."""

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
    """Steps that were asked for."""
    evaluation: dict[str, float] | None = None
    """What the evaluation set scored after the last step."""
    metrics: dict[str, float] | None = None
    """Of the last step."""
    logprobs: StoredLogprobs | None = None


def shown(job: Job) -> RlorTrainerJob:
    """A job for an answer."""
    fact, stands, document = job.fact, job.stands, job.stands.document
    idle = f"without effect here: {', '.join(fact.without_effect)}" if fact.without_effect else ""
    warnings = "; ".join(filter(None, (idle, job.run_fault)))
    is_deleted = fact.deleted_at is not None
    logprobs = document.logprobs if document is not None else None
    asked = {name: getattr(job.fields, name) for name in JobFields.model_fields}
    if (said := job.fields.wandb_config) is not None:
        asked["wandb_config"] = ShownWandbConfig(**said.model_dump(), url=job.run_url)
    return RlorTrainerJob(
        **asked,
        name=job.name,
        create_time=fact.created_at,
        completed_time=stands.completed_at,
        # Of a deleted job: fireworks-ai 1.2.30, which validates strictly, knows no other name for it.
        state=f"JOB_STATE_{'DELETING' if is_deleted else stands.state}",
        status=Status(code=stands.code, message=_DELETED if is_deleted else _told(job, warnings)),
        created_by=fact.owner,
        accelerator_seconds={name: round(seconds) for name, seconds in stands.seconds.items()},
        job_progress=_progress(job),
        steps=fact.steps_before + (fact.step is not None),
        evaluation=(document.evaluation or None) if document is not None else None,
        metrics=(document.metrics or None) if document is not None else None,
        logprobs=None if logprobs is None else StoredLogprobs(uri=logprobs.uri, digest=logprobs.digest),
    )


def _told(job: Job, idle: str) -> str:
    """Why the job stands as it does, what of its last step did not train, and deployments that do not exist; else fields without effect."""
    lost = () if job.stands.document is None else outcome_messages(job.stands.document)
    missing = (f"{name} does not exist: no engine loads the job's versions until it is created" for name in job.missing_deployments)
    return "; ".join(filter(None, (job.stands.message, *lost, *missing))) or idle


def _progress(job: Job) -> JobProgress | None:
    step, stands = job.fact.step, job.stands
    if step is None or not stands.epochs:
        return None
    done = stands.epoch / stands.epochs
    return JobProgress(
        percent=int(100 * done),
        epoch=min(stands.epoch, stands.epochs - 1),
        total_input_requests=step.groups,
        total_processed_requests=step.groups if stands.epoch else 0,
    )
