"""A job's document: how it begins, how it changes, and what the job asked for. Pure.

Guarantees: a state changes as `TRANSITIONS` allows, with its time; a job that begins, or ends, waits for nothing any more.
Gives up: nothing.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from headrace.consumers.memory.state_bounds import MESSAGE_LIMIT
from headrace.schemas.base import utc_now
from headrace.schemas.events import JobStateChanged
from headrace.schemas.jobs import (
    LISTED_REJECTIONS,
    TRANSITIONS,
    JobDocument,
    JobOptions,
    JobRejection,
    JobRejections,
    JobState,
    TrainingJob,
)
from headrace.schemas.state import OpenJob

_EVALUATION = "eval/"


def opened(record: TrainingJob, model_id: str, *, rejected: int, rejections: JobRejections) -> JobDocument:
    """The document of a job whose record was read.

    Args:
        record: The job.
        model_id: Its model.
        rejected: Groups of it that were rejected before its record was read.
        rejections: Why.
    """
    return JobDocument(
        job_id=record.job_id,
        model_id=model_id,
        state=JobState.PENDING,
        created_at=record.created_at,
        kind=record.kind,
        config=record.config,
        sft=record.sft,
        options=record.options,
        num_groups=len(record.group_ids),
        groups_rejected=rejected,
        rejections=rejections.placed(record.group_ids),
    )


def moved(document: JobDocument, to: JobState, message: str | None, fields: Mapping[str, Any]) -> JobDocument:
    """The document in another state.

    Raises:
        RuntimeError: the transition is not allowed; always a defect of ours.
    """
    if to not in TRANSITIONS[document.state]:
        raise RuntimeError(f"job {document.job_id} can't go from {document.state} to {to}")
    now = utc_now()
    stamps = {"started_at": now} if to is JobState.RUNNING else {} if TRANSITIONS[to] else {"completed_at": now}
    changes = {
        "state": to,
        "updated_at": now,
        "error_message": message and message[:MESSAGE_LIMIT],
        "moves": document.moves + 1,
        "waiting_for": None,
    }
    return document.model_copy(update={**changes, **stamps, **fields})


def with_rejection(job: OpenJob, rejection: JobRejection) -> OpenJob:
    """The job with one more rejection: in its document, or beside it until its record is read."""
    document = job.document
    if document is None:
        return job.model_copy(update={"rejections": job.rejections.plus(rejection)})
    if len(document.rejections.listed) < LISTED_REJECTIONS and rejection.group_id in job.group_ids:
        rejection = rejection.model_copy(update={"group": job.group_ids.index(rejection.group_id)})
    return job.model_copy(update={"document": document.model_copy(update={"rejections": document.rejections.plus(rejection)})})


def options_of(jobs: Mapping[str, OpenJob], job_id: str | None) -> JobOptions:
    """What a job asked for; of the stream, and of a job without a document, the defaults."""
    job = None if job_id is None else jobs.get(job_id)
    return JobOptions() if job is None or job.document is None else job.document.options


def without_evaluation(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a step itself."""
    return {name: value for name, value in metrics.items() if not name.startswith(_EVALUATION)}


def evaluation_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """What the evaluation set of a step scored, without the prefix of its metrics."""
    return {name.removeprefix(_EVALUATION): value for name, value in metrics.items() if name.startswith(_EVALUATION)}


def change_of(document: JobDocument, *, previous: JobState | None, message: str | None) -> JobStateChanged:
    """What subscribers hear of a document that has changed."""
    return JobStateChanged(
        job_id=document.job_id,
        model_id=document.model_id,
        state=document.state,
        previous=previous,
        message=message,
        num_sequences=document.num_sequences,
        step=document.step,
        moves=document.moves,
    )


def since(timestamp_ms: int) -> datetime:
    """When the log took a record."""
    return utc_now() if timestamp_ms < 0 else datetime.fromtimestamp(timestamp_ms / 1000, UTC)
