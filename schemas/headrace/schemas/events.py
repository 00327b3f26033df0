"""Events on `training-events`: what subscribers in any language follow.

Event ids (`ce_id`) derive from (incarnation, step or offset, kind), so that a subscriber can drop a repeat.
"""

from datetime import datetime

from pydantic import Field

from headrace.schemas.base import Record, utc_now
from headrace.schemas.jobs import JobState
from headrace.schemas.reasons import RejectionReason


class StepCompleted(Record):
    """An optimizer step was committed. `metrics` are finite floats by name (`loss`, `grad_norm`, `reward_mean`, …)."""

    model_id: str
    incarnation: str
    step: int
    policy_version: int
    job_id: str | None = None
    groups: int
    trajectories: int
    tokens: int
    metrics: dict[str, float]
    lag_histogram: dict[int, int] = Field(default_factory=dict)
    """Trajectories by lag in policy versions."""
    seconds: float
    """Wall time of the step in the rank process."""
    completed_at: datetime = Field(default_factory=utc_now)


class GroupRejected(Record):
    """A group was read and refused as a whole: nothing of it trains. `detail` says where and what to do about it.

    Exactly one for each refused group. Members that were the cause are named in `detail`, not in events of their own.
    """

    model_id: str
    group_id: str
    job_id: str | None = None
    reason: RejectionReason
    detail: str
    trajectory: int | None = None
    """Index of the trajectory at fault, where one is."""
    partition: int
    offset: int
    rejected_at: datetime = Field(default_factory=utc_now)


class TrajectoryRejected(Record):
    """A trajectory was refused alone: the rest of its group continues, as `batch.incomplete_groups` of the model allows.

    At most one for each trajectory of a group. It is said when the group is admitted, or with the step that trains the rest (`stale`,
    `unknown_policy_version`, `too_long` for the rows of its job). The group may still be refused later, by a `GroupRejected` of its own. It
    counts in `trajectory_refusals`, never in `refusals`, which count groups.
    """

    model_id: str
    group_id: str
    job_id: str | None = None
    reason: RejectionReason
    detail: str
    trajectory: int
    """Index in the group as it was sent."""
    partition: int
    offset: int
    """Of the group's record."""
    rejected_at: datetime = Field(default_factory=utc_now)


class JobStateChanged(Record):
    """A job went from one state to another; `message` is for people and always there for FAILED."""

    job_id: str
    model_id: str
    state: JobState
    previous: JobState | None = None
    message: str | None = None
    num_sequences: int | None = None
    step: int | None = None
    moves: int = 0
    """As in the job's document."""
    changed_at: datetime = Field(default_factory=utc_now)


class ModelStatusChanged(Record):
    """A model was stopped, has diverged, was resumed or deleted; `detail` says why and what to do."""

    model_id: str
    incarnation: str
    status: str
    previous: str
    detail: str | None = None
    policy_version: int
    changes: int
    """Status changes of this incarnation so far."""
    changed_at: datetime = Field(default_factory=utc_now)


class Starved(Record):
    """A model had no step for a while; counts of refusals by reason since the last one say why.

    Said once for each stretch without a step, and again as long as more is refused.
    """

    model_id: str
    policy_version: int = 0
    pending: int = 0
    """Groups that wait for more of their bucket."""
    seconds: float
    """Since the last step, or since this worker took the lane over."""
    refusals: dict[RejectionReason, int]
    noticed_at: datetime = Field(default_factory=utc_now)


TrainingEvent = StepCompleted | GroupRejected | TrajectoryRejected | JobStateChanged | ModelStatusChanged | Starved
