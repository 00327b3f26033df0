"""A job on its lane: how its document begins and changes, and how many open jobs a model's state may list.

A state that is larger than a record can never be committed (the bounded-records invariant). A record takes 1 MiB unless a topic says
otherwise. Of that, at most: open jobs 350 kB, pending groups 360 kB (5,000, with UUIDs for job ids; fewer with longer ids), the duplicate
window's ids since the snapshot 213 kB, ids of jobs that ended or were cancelled early 64 kB, an intent 55 kB.

Guarantees: a document changes its state only as `TRANSITIONS` allows. Sizes are those of the JSON that is committed, without a document's
times and counts. Limitations: all bounds together, each at its limit, are more than a record.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import orjson

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

OPEN_JOBS_BYTES = 350_000
"""JSON of the open jobs of one model."""
CLOSED_JOBS = 256
_CLOSED_JOBS_BYTES = 32_000
MESSAGE_LIMIT = 4000
"""Characters of a message about a model or a job."""
_EVALUATION = "eval/"


def new_document(record: TrainingJob, model_id: str, *, rejected: int, rejections: JobRejections) -> JobDocument:
    """The document of a job whose record was read."""
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


def moved_document(document: JobDocument, to: JobState, message: str | None, fields: Mapping[str, Any]) -> JobDocument:
    """The document in another state.

    Raises:
        RuntimeError: the transition is not allowed; always a defect of Headrace.
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
    """The job with one more rejection: in its document, or in the job itself until its record is read."""
    document = job.document
    if document is None:
        return job.model_copy(update={"rejections": job.rejections.plus(rejection)})
    if len(document.rejections.listed) < LISTED_REJECTIONS and rejection.group_id in job.group_ids:
        rejection = rejection.model_copy(update={"group": job.group_ids.index(rejection.group_id)})
    return job.model_copy(update={"document": document.model_copy(update={"rejections": document.rejections.plus(rejection)})})


def options_of(jobs: Mapping[str, OpenJob], job_id: str | None) -> JobOptions:
    """The options of a job; the defaults for the stream, and for a job without a document."""
    job = None if job_id is None else jobs.get(job_id)
    return JobOptions() if job is None or job.document is None else job.document.options


def without_evaluation(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a step itself."""
    return {name: value for name, value in metrics.items() if not name.startswith(_EVALUATION)}


def evaluation_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a step's evaluation set, without their prefix."""
    return {name.removeprefix(_EVALUATION): value for name, value in metrics.items() if name.startswith(_EVALUATION)}


def state_event(document: JobDocument, *, previous: JobState | None, message: str | None) -> JobStateChanged:
    """The event for a document that has changed."""
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


def log_time(timestamp_ms: int) -> datetime:
    """When the log took a record; now, if that is not known."""
    return utc_now() if timestamp_ms < 0 else datetime.fromtimestamp(timestamp_ms / 1000, UTC)


class JobSizes:
    """The JSON sizes of a model's open jobs, measured as they grow."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[OpenJob, int]] = {}
        self._total = 0

    def fit(self, jobs: Mapping[str, OpenJob], grown: str) -> bool:
        """Whether a state has room for these jobs. If not, the job `grown`, which was added or has grown, must end."""
        measured = self._known.get(grown, (None, 0))[1]
        if len(jobs) == len(self._known) + (grown not in self._known):
            self._known[grown] = (jobs[grown], self._size(jobs[grown]))
            self._total += self._known[grown][1] - measured
        else:
            # Other jobs have ended meanwhile.
            self._known = {name: (job, self._size(job)) for name, job in jobs.items()}
            self._total = sum(size for _, size in self._known.values())
        if self._total <= OPEN_JOBS_BYTES:
            return True
        self._total -= self._known.pop(grown)[1]
        return False

    def _size(self, job: OpenJob) -> int:
        before, size = self._known.get(job.job_id, (None, 0))
        if before is job:
            return size
        if before is not None and before.group_ids is job.group_ids and (before.document is None) == (job.document is None):
            # A waiting job only gains rejections. It may have thousands, and each one comes here.
            refused = sum(len(orjson.dumps(group_id)) + 1 for group_id in job.refused[len(before.refused) :])
            return size + refused + _rejections_size(job) - _rejections_size(before)
        return len(job.model_dump_json().encode())


def _rejections_size(job: OpenJob) -> int:
    return len((job.rejections if job.document is None else job.document.rejections).model_dump_json())


def latest_ids(job_ids: Sequence[str]) -> tuple[str, ...]:
    """The last of these ids, as many as a state has room for."""
    kept: list[str] = []
    size = 0
    for job_id in reversed(job_ids[-CLOSED_JOBS:]):
        size += len(job_id.encode(errors="surrogatepass"))
        if size > _CLOSED_JOBS_BYTES:
            break
        kept.append(job_id)
    return tuple(kept[::-1])
