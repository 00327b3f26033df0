"""What the lane's owner keeps in `models` and `steps`: the state of each model and of the lane, and the ledger.

A model's `scanned` means: every record of this model below that offset is used, refused and reported, or listed in `pending`.
The lane's `mark` is the lowest offset that any of its models still needs (exactly-once rules 7 and 8).

The step report: what is too large for the ledger, one JSON file for each step in the object store.

`report.json` in the folder that `StepRecord.report` names. Guarantees: group ids, offsets, rewards and producers of all that was
trained on; what was refused since the step before, with reasons, as far as the worker that ran the step saw it (all of it is in
`training-events`).
"""

from collections.abc import Iterable
from datetime import datetime
from typing import Literal

from pydantic import Field

from headrace.schemas.base import Record, utc_now
from headrace.schemas.events import GroupRejected, TrajectoryRejected
from headrace.schemas.jobs import JobDocument, JobOptions, JobRejections
from headrace.schemas.reasons import RejectionReason
from headrace.schemas.training import ModelSettings, SftConfig, TrainConfig
from headrace.schemas.weights import WeightsRef


class Pending(Record):
    """A group that waits in its bucket: the offset, and the job it belongs to (null: the stream)."""

    offset: int
    job_id: str | None = None


class OpenJob(Record):
    """A job that has not ended. It is complete when its record was read and each of its groups is pending or refused."""

    job_id: str
    record_offset: int | None = None
    """Offset of its `TrainingJob` record; null while only groups of it were seen."""
    group_ids: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    """Ids of its groups that were refused: they are no longer waited for."""
    rejections: JobRejections = JobRejections()
    """Of its groups, until the record is read; the document has them from then on."""
    document: JobDocument | None = None
    """As last written; null until the record was read."""
    since: datetime | None = None
    """When the log took the first record of it: its time-out counts from there."""


class Intent(Record):
    """A cut that is not a pure function of the log, or a step about to run: committed before the step (rules 9, 10)."""

    step: int
    offsets: tuple[int, ...]
    reason: str
    """`linger`: a clock made the cut; `job`: a job's step is about to run; `attempt`: the owner before did not end cleanly."""
    job_id: str | None = None
    cut: str = "job"
    """What made the cut, as the ledger will say it."""
    attempts: int = 1
    """How often a worker has begun this step since it was noted."""


class RewardTrend(Record):
    """Sums over steps of (x = step, y = its reward deviation): what a straight line through them needs."""

    n: int = 0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    last_x: float = 0.0


class TrainingScalars(Record):
    """What of a model's training state is numbers: a step's plan starts from them."""

    updates: int = 0
    """Optimizer updates since creation: where warm-up and schedules stand."""
    reward_trend: RewardTrend = RewardTrend()


class StartFrom(Record):
    """The state that a new model begins with: what a replay left in the object store, copied by the model's owner."""

    snapshot: WeightsRef
    scalars: TrainingScalars
    forked_from: str
    """The model that the fork is of: with the next three, the identity that the snapshot itself says."""
    incarnation: str
    step: int
    """The last of its steps that the fork has run."""
    attempt: str


class DoomedWeights(Record):
    """Versions whose weights go as soon as no step that may have to be run again could read them."""

    steps: tuple[tuple[int, int], ...]
    """As (first, last), both included."""
    after: int
    """The last step that may have read them: they go when a snapshot covers it."""


class ModelState(Record):
    """The current state of a model; only the owner of its lane writes it."""

    model_id: str
    incarnation: str
    status: Literal["active", "deleted", "diverged", "stopped"] = "active"
    """`stopped`: its settings can't be trained here; `status_detail` says why. Only an active model trains."""
    status_detail: str | None = None
    status_changes: int = 0
    waiting_for: str | None = None
    """What an active model waits for: its base model can't be used on its worker. The worker tries again by itself; null: for nothing."""
    account: str
    project: str
    name: str
    worker_group: str
    settings: ModelSettings
    policy_version: int = 0
    scanned: int
    pending: tuple[Pending, ...] = ()
    held_from: int | None = None
    """Pending groups from this offset on came while the model did not train, and are not admitted yet; null: there are none."""
    open_jobs: tuple[OpenJob, ...] = ()
    closed_jobs: tuple[str, ...] = ()
    """Ids of the latest jobs that ended: a repeated record or a late group of one of them is dropped or refused."""
    intent: Intent | None = None
    last_attempt: str | None = None
    """Attempt id of the last committed step: how an unclear commit is resolved (rule 3)."""
    snapshot: WeightsRef | None = None
    snapshot_step: int = 0
    """The step that the snapshot is of; 0: there is none, the base model is the state."""
    weights: WeightsRef | None = None
    steps_since: tuple[int, ...] = ()
    """For each step after the snapshot, in order, an offset in `steps`: its record is the first of this model at or after it."""
    scalars: TrainingScalars = TrainingScalars()
    """After the last committed step."""
    refusals: dict[RejectionReason, int] = Field(default_factory=dict)
    """Groups refused since creation, by reason."""
    trajectory_refusals: dict[RejectionReason, int] = Field(default_factory=dict)
    """Trajectories refused alone since creation, by reason; the rest of their groups continued."""
    needed_from: int | None = None
    """The lowest offset that the steps after the snapshot trained on: a re-run reads from there."""
    window_since: str = ""
    """Ids admitted since the snapshot, oldest first: 64-bit hashes, little-endian, base64. With the snapshot's: the duplicate window."""
    rebasing: str | None = None
    """Why the model had diverged, from its resumption until the step that says so in the ledger is committed."""
    start_from: StartFrom | None = None
    """What version 1 is copied from; null once it is, or for a model that begins with the base model."""
    start_weights: WeightsRef | None = None
    """What version 0 is; null: the base model."""
    refusals_before: dict[RejectionReason, int] = Field(default_factory=dict)
    """`refusals` as they was at the last step: the difference is what was refused since."""
    trajectory_refusals_before: dict[RejectionReason, int] = Field(default_factory=dict)
    doomed: tuple[DoomedWeights, ...] = ()
    """Weights that a client deleted and that are not deleted yet, oldest command first."""
    cancelled_early: tuple[str, ...] = ()
    """Jobs whose cancellation was read before their record."""
    shadow_of: str | None = None
    """The model of another worker group whose groups this one trains on."""
    unknown_versions: tuple[str, ...] = ()
    """Weights in the store of versions that were published and that this ledger does not know, since Kafka has lost its end: their URIs."""
    groups_trained: int = 0
    created_at: datetime = Field(default_factory=utc_now)
    updated_at: datetime = Field(default_factory=utc_now)


class LaneState(Record):
    """The state of a lane, key `lane:<p>`."""

    lane: int
    mark: int = 0
    """Recovery reads `trajectory-groups` from here."""
    scanned: int = 0
    """Records below that belong to no model were dead-lettered."""
    commands_through: int = 0
    partitions: int
    """Partition count when the lane was first claimed; a change is refused (rule 6)."""
    groups_topic: str | None = None
    """The topic that all offsets here and in the lane's models are of: a shadow's is under another prefix. A change is refused."""
    nodes: int = 1
    """Machines that the owner's world has."""
    clean: bool = True
    """The last owner gave the lane up in order: no batch is suspected of having ended it."""
    updated_at: datetime = Field(default_factory=utc_now)


class OffsetRange(Record):
    """Offsets `first` to `last`, both included."""

    first: int
    last: int


class Fingerprint(Record):
    """The environment whose change can change bits."""

    headrace: str
    torch: str
    transformers: str
    deepspeed: str
    python: str
    device: str
    world_size: int
    threads: int
    zero_stage: int = 0


class Rebased(Record):
    """A model that could not be run again to the bits of its ledger was resumed by an operator."""

    step: int
    """The step whose re-run differed, or could not be done."""
    reason: str
    expected_digest: str
    """Of the weights that the ledger has for the version before."""
    found_digest: str
    """Of the weights that training continues with."""
    resumed_from: int | None = None
    """The last step whose training is in those weights; the versions after it are not."""


class StepRecord(Record):
    """The ledger: one record for every committed step."""

    model_id: str
    incarnation: str
    step: int
    attempt: str
    attempt_before: str | None = None
    """That made the state which the step started from; null at step 1."""
    policy_version_before: int
    policy_version_after: int
    job_id: str | None = None
    lane: int
    offsets: tuple[OffsetRange, ...]
    """Groups trained on, as ranges of offsets in the lane."""
    groups: int
    refusals: dict[RejectionReason, int] = Field(default_factory=dict)
    """Groups refused since the step before, by reason."""
    trajectory_refusals: dict[RejectionReason, int] = Field(default_factory=dict)
    """Trajectories refused alone since the step before, by reason."""
    cut: str
    """What made the cut: `groups_per_step`, `max_tokens_per_step`, `linger` or `job`; `rebased` and `forked` train nothing."""
    sft: SftConfig | None = None
    """Of a supervised step."""
    options: JobOptions = JobOptions()
    """Of the step's job."""
    logprobs: WeightsRef | None = None
    """Of a step that computed log-probabilities instead of training."""
    hot_load_identity: str | None = None
    """As in the job's document."""
    rebased: Rebased | None = None
    forked: StartFrom | None = None
    """Of a `forked` record: what it begins with."""
    config: TrainConfig
    config_digest: str
    plan_digest: str
    seed: int
    updates: int
    """Optimizer updates inside the step: 0 when nothing could be trained."""
    loss: float | None
    grad_norm: float | None
    metrics: dict[str, float] = Field(default_factory=dict)
    weights: WeightsRef
    snapshot: WeightsRef | None = None
    plots: WeightsRef | None = None
    """PNG heat maps of the packed tensors, where `plot_tensors` asked for them."""
    report: WeightsRef | None = None
    """Folder with `report.json` (a `StepReport`) and, by option, `rows.safetensors`."""
    scalars_before: TrainingScalars = TrainingScalars()
    scalars: TrainingScalars = TrainingScalars()
    """After this step."""
    fingerprint: Fingerprint
    committed_at: datetime = Field(default_factory=utc_now)


def offset_ranges(offsets: Iterable[int]) -> tuple[OffsetRange, ...]:
    """Sorted offsets as the fewest ranges: [1, 2, 3, 7] gives 1-3 and 7-7. Keeps a ledger record small (rule 15)."""
    ranges: list[tuple[int, int]] = []
    for offset in sorted(offsets):
        if ranges and offset == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], offset)
        else:
            ranges.append((offset, offset))
    return tuple(OffsetRange(first=first, last=last) for first, last in ranges)


REPORT_FILE = "report.json"
ROWS_FILE = "rows.safetensors"

RowsKept = Literal["none", "sample", "all"]


class ReportedTrajectory(Record):
    """A trajectory that the step trained on."""

    index: int
    """In the group as it was sent."""
    reward: float
    advantage: float | None = None
    """Null where it has none of its own (supervised steps)."""
    tokens: int
    """Context included."""
    trainable_tokens: int
    initial_policy_version: int | None = None
    final_policy_version: int | None = None


class ReportedGroup(Record):
    """A group that the step trained on."""

    group_id: str
    offset: int
    """In `trajectory-groups`, on the model's lane."""
    producer: str | None = None
    """`ce_source` of its record."""
    trajectories: tuple[ReportedTrajectory, ...]


class StepReport(Record):
    """Everything about one step that the ledger has no room for."""

    model_id: str
    incarnation: str
    step: int
    attempt: str
    lane: int
    job_id: str | None = None
    groups: tuple[ReportedGroup, ...]
    refused: tuple[GroupRejected, ...] = ()
    refused_trajectories: tuple[TrajectoryRejected, ...] = ()
    refused_unlisted: int = 0
    """Refusals beyond those listed."""
    timings: dict[str, float]
    """Seconds by phase."""
    rows: RowsKept = "none"
    """How many of the packed rows are in `rows.safetensors`."""
