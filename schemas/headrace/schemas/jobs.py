"""Training jobs: the record that asks for a step, the states a job goes through, and the document that GET returns."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from headrace.schemas.base import Record, utc_now
from headrace.schemas.training import SftConfig, TrainConfig


class TrainingJob(Record):
    """Asks for one step on the groups that name this job. Stands after its groups in `trajectory-groups`.

    The kind and its groups' `purpose` must agree, else the job fails. The learning rate of kind `sft` is that of `sft`, not of `config`.
    """

    job_id: str = Field(min_length=1, max_length=256)
    group_ids: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...]
    kind: Literal["rl", "sft"] = "rl"
    config: TrainConfig | None = None
    sft: SftConfig | None = None
    """Of an `sft` job; null: its defaults."""
    created_at: datetime = Field(default_factory=utc_now)

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if self.kind == "rl" and self.sft is not None:
            raise ValueError("sft is given, but kind is 'rl': say kind='sft', or leave sft out")
        return self


class JobState(StrEnum):
    """States of a job, by the hosted API's names."""

    PENDING = "JOB_STATE_PENDING"
    RUNNING = "JOB_STATE_RUNNING"
    PAUSED = "JOB_STATE_PAUSED"
    COMPLETED = "JOB_STATE_COMPLETED"
    FAILED = "JOB_STATE_FAILED"
    CANCELLED = "JOB_STATE_CANCELLED"


TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    JobState.PENDING: frozenset({JobState.RUNNING, JobState.PAUSED, JobState.CANCELLED, JobState.FAILED}),
    JobState.RUNNING: frozenset({JobState.COMPLETED, JobState.PAUSED, JobState.FAILED, JobState.CANCELLED}),
    JobState.PAUSED: frozenset({JobState.PENDING, JobState.CANCELLED, JobState.FAILED}),
    JobState.COMPLETED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}


class JobDocument(Record):
    """The current state of a job, keyed by job id in the compacted `jobs` topic."""

    job_id: str
    model_id: str
    state: JobState
    created_at: datetime
    updated_at: datetime = Field(default_factory=utc_now)
    started_at: datetime | None = None
    completed_at: datetime | None = None
    kind: Literal["rl", "sft"] = "rl"
    config: TrainConfig | None = None
    sft: SftConfig | None = None
    num_groups: int = 0
    groups_rejected: int = 0
    num_sequences: int | None = None
    step: int | None = None
    """The step this job committed; null until then."""
    metrics: dict[str, float] = Field(default_factory=dict)
    error_message: str | None = None
    accelerator_seconds: dict[str, float] = Field(default_factory=dict)
    moves: int = 0
    """State changes so far: tells a second pause from the first."""
    commands_through: int = 0
    """Commands of this lane below this offset are folded in; GET folds later ones over the document."""
