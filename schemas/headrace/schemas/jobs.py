"""Training jobs: the record that asks for a step, the states a job goes through, and the document that GET returns."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from headrace.schemas.base import Record, utc_now
from headrace.schemas.reasons import RejectionReason
from headrace.schemas.training import SftConfig, TrainConfig
from headrace.schemas.weights import WeightsRef


class GroupSet(Record):
    """Groups in the object store that belong to no lane: one JSON `TrajectoryGroup` a line, the whole compressed with zstd."""

    uri: str = Field(min_length=1)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Of the stored (compressed) bytes."""
    size: int = Field(ge=1)
    """Bytes stored."""
    raw_size: int = Field(ge=1)
    """Bytes after decompression: a bound that is checked while decompressing."""
    groups: int = Field(ge=1)


class JobOptions(Record):
    """What a job asks for next to its step's config."""

    evaluation: GroupSet | None = None
    """Scored with the weights of the new version, without training on it."""
    forward_only: bool = False
    """Compute the log-probabilities of the groups and train nothing: the new version has the weights of the one before."""
    rollout_deployments: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...] = Field(default=(), max_length=64)
    """Deployments that are to load the new version; none: no deployment loads it by request."""
    hot_load_deployment: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
    """Deployment under whose prefix in the store the new version's manifest is written, too."""
    node_count: int = Field(default=1, ge=1)
    """Machines that the step needs: the job waits for a worker that has as many."""


class TrainingJob(JobOptions):
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
        if self.kind == "sft" and (self.forward_only or self.evaluation is not None):
            raise ValueError("forward_only and evaluation are of kind 'rl': a supervised job has neither")
        return self

    @property
    def options(self) -> JobOptions:
        """Without the rest of the record."""
        return JobOptions(**{name: getattr(self, name) for name in JobOptions.model_fields})


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


class JobRejection(Record):
    """A group that a job lost, or one trajectory of a group that the job trained without."""

    group_id: str
    group: int | None = None
    """Index of the group in the job; null until the job's record is read."""
    trajectory: int | None = None
    """Index of the trajectory in its group; null: the group as a whole, where no single trajectory is at fault."""
    whole_group: bool = True
    """Whether the whole group was rejected; false: only the trajectory."""
    reason: RejectionReason
    detail: str
    """What is wrong, where, and what to do."""


class JobRejections(Record):
    """What of a job does not train: counted by reason, and the first of each listed."""

    groups: dict[RejectionReason, int] = Field(default_factory=dict)
    """Groups rejected as a whole, by reason."""
    trajectories: dict[RejectionReason, int] = Field(default_factory=dict)
    """Trajectories rejected alone, by reason."""
    listed: tuple[JobRejection, ...] = ()
    """The first `LISTED_REJECTIONS` of them."""

    def plus(self, rejection: JobRejection) -> "JobRejections":
        """With one more; its detail is cut at `REJECTION_DETAIL_LIMIT` characters."""
        name = "groups" if rejection.whole_group else "trajectories"
        counts = dict(getattr(self, name))
        counts[rejection.reason] = counts.get(rejection.reason, 0) + 1
        cut = rejection.model_copy(update={"detail": rejection.detail[:REJECTION_DETAIL_LIMIT]})
        return self.model_copy(update={name: counts, "listed": (*self.listed, cut)[:LISTED_REJECTIONS]})

    def placed(self, group_ids: tuple[str, ...]) -> "JobRejections":
        """With the index of each listed group, once the job's record names its groups."""
        index = {group_id: at for at, group_id in enumerate(group_ids)}
        listed = tuple(entry.model_copy(update={"group": index.get(entry.group_id)}) for entry in self.listed)
        return self.model_copy(update={"listed": listed})


LISTED_REJECTIONS = 20
REJECTION_DETAIL_LIMIT = 300


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
    options: JobOptions = JobOptions()
    num_groups: int = 0
    groups_rejected: int = 0
    rejections: JobRejections = JobRejections()
    """Why groups and trajectories of it were rejected."""
    num_sequences: int | None = None
    step: int | None = None
    """The step this job committed; null until then."""
    metrics: dict[str, float] = Field(default_factory=dict)
    evaluation: dict[str, float] = Field(default_factory=dict)
    """What the evaluation set scored with the new version: the `eval/…` metrics of its step, without that prefix."""
    logprobs: WeightsRef | None = None
    """Folder with `logprobs.safetensors`, which a `forward_only` job wrote."""
    hot_load_identity: str | None = None
    """The manifest is `deployments/<hot_load_deployment>/<this>/manifest.json` in the store; null without a deployment or a version."""
    waiting_for: str | None = None
    """Why the job is not begun although all of it is there; null once it is."""
    error_message: str | None = None
    accelerator_seconds: dict[str, float] = Field(default_factory=dict)
    moves: int = 0
    """State changes so far: tells a second pause from the first."""
    commands_through: int = 0
    """Commands of this lane below this offset are folded in; GET folds later ones over the document."""
