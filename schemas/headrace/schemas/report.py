"""The step report: what is too large for the ledger, one JSON file for each step in the object store.

`report.json` in the folder that `StepRecord.report` names. Guarantees: group ids, offsets, rewards and producers of all that was
trained on; what was refused since the step before, with reasons, as far as the worker that ran the step saw it (all of it is in
`training-events`).
"""

from typing import Literal

from headrace.schemas.base import Record
from headrace.schemas.events import GroupRejected, TrajectoryRejected

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
