"""What gateways know of RLOR trainer jobs, in the compacted topic `gateway`. The model that is trained is the job itself.

One record a job, written again with each step that is asked for, and whatever is asked of it. What became of a step stands in the documents
of its training jobs; this record is bounded however many steps there were.
"""

from datetime import datetime
from typing import Any

from pydantic import Field

from headrace.schemas.base import Record, utc_now


class RlorStep(Record):
    """One train step that was asked for."""

    dataset: str | None
    """Id of the dataset; null: none is known."""
    output_model: str
    """Id under which the result can be named."""
    training_jobs: tuple[str, ...] = Field(min_length=1)
    """Ids of the training jobs in their order, one an epoch; the output model is what the last one makes."""
    groups: int
    """Groups of each."""
    evaluation_groups: int = 0
    asked_at: datetime = Field(default_factory=utc_now)


class RlorJob(Record):
    """A job. Key `rlor-job/<account>/<id>`."""

    account: str
    id: str
    owner: str
    """Of the token that asked."""
    model_id: str
    nonce: str
    """Tells this job from one of the same id before it, which was deleted."""
    request: dict[str, Any]
    """What was asked for: the API's JSON in normal form (camelCase, defaults filled in), without secrets."""
    secrets: dict[str, str] = Field(default_factory=dict)
    """Encrypted with `gateway.secrets_key`, by the name of the field."""
    without_effect: tuple[str, ...] = ()
    """Fields of the request that are taken and do nothing."""
    step: RlorStep | None = None
    """The last one asked for."""
    steps_before: int = 0
    """Steps asked for before that one; they have ended."""
    seconds_before: dict[str, float] = Field(default_factory=dict)
    """What they took, by accelerator."""
    created_at: datetime = Field(default_factory=utc_now)
    resumed_at: datetime | None = None
    cancelled_at: datetime | None = None
    deleted_at: datetime | None = None


class RlorRun(Record):
    """Where the metrics of a job are to be seen, next to here. Key `rlor-run/<account>/<job id>`."""

    account: str
    job: str
    nonce: str
    """Of the job."""
    url: str
    fault: str | None = None
    """Why its metrics are not there; null: nothing is known to be wrong."""
    noted_at: datetime = Field(default_factory=utc_now)


def rlor_run_key(account: str, job_id: str) -> str:
    """The key of a job's run."""
    return f"rlor-run/{account}/{job_id}"


def rlor_job_key(account: str, job_id: str) -> str:
    """The key of a job's record."""
    return f"rlor-job/{account}/{job_id}"
