"""A job's document: how it begins, how it changes, and what the job asked for. Pure.

Guarantees: a state changes as `TRANSITIONS` allows, with its time; a job that begins, or ends, waits for nothing any more.
Gives up: nothing.
"""

from collections.abc import Mapping
from typing import Any

from headrace.consumers.memory.state_bounds import MESSAGE_LIMIT
from headrace.schemas.base import utc_now
from headrace.schemas.jobs import TRANSITIONS, JobDocument, JobOptions, JobState, TrainingJob
from headrace.schemas.state import OpenJob

_EVALUATION = "eval/"


def opened(record: TrainingJob, model_id: str, *, refused: int) -> JobDocument:
    """The document of a job whose record was read.

    Args:
        record: The job.
        model_id: Its model.
        refused: Groups of it that were refused already.
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
        groups_rejected=refused,
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
