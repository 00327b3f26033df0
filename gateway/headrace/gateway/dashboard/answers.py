"""What the dashboard's pages receive, as JSON. Theirs alone: it changes with them, and no client should rest on it.

Times are ISO 8601 in UTC. A token's numbers stand in columns, null where it has none.
"""

from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True, protected_namespaces=())


class EngineRow(_Answer):
    """What an engine last said of a model."""

    engine: str
    version: int
    at: datetime
    error: str | None = None
    deployment: str | None = None


class ModelRow(_Answer):
    """A model as it stands."""

    id: str
    name: str
    project: str
    base_model: str
    adaptation: str
    status: str
    detail: str | None
    version: int
    waiting: int
    """Groups that wait for more of their bucket."""
    trained: int
    """Groups trained on."""
    refusals: dict[str, int]
    trajectory_refusals: dict[str, int]
    reward: float | None
    """Mean of the last step."""
    loss: float | None
    created_at: datetime
    updated_at: datetime
    shadow_of: str | None
    engines: list[EngineRow]


class JobRow(_Answer):
    """A job as it stands."""

    id: str
    model_id: str
    model_name: str
    state: str
    requested: str | None
    """What was asked of it and no worker has read yet."""
    can_cancel: bool
    kind: str
    groups: int
    groups_rejected: int
    step: int | None
    message: str | None
    created_at: datetime | None
    started_at: datetime | None
    completed_at: datetime | None


class Overview(_Answer):
    """The first page."""

    account: str
    models: list[ModelRow]
    more_models: bool
    jobs: list[JobRow]
    more_jobs: bool


class Bucket(_Answer):
    """A stretch of steps of one curve."""

    first: int
    last: int
    at: datetime
    """Of the last."""
    mean: float
    low: float
    high: float


class Curve(_Answer):
    """A metric over the steps."""

    metric: str
    points: list[Bucket]


class VersionAt(_Answer):
    """When a version came to be."""

    version: int
    at: datetime


class Timeline(_Answer):
    """Versions, and what engines made of them."""

    versions: list[VersionAt]
    acks: list[EngineRow]


class LagBar(_Answer):
    """Tokens of one lag."""

    lag: str
    tokens: float
    ratio: float | None
    ess: float | None


class Lags(_Answer):
    """Tokens by lag over the latest steps."""

    steps: int
    bars: list[LagBar]


class Refused(_Answer):
    """A group that was refused."""

    group_id: str
    reason: str
    detail: str
    at: datetime


class StepRow(_Answer):
    """A committed step."""

    step: int
    at: datetime
    cut: str
    job_id: str | None
    groups: int
    updates: int
    reward: float | None
    loss: float | None
    refused: int


class ModelPage(_Answer):
    """One model."""

    model: ModelRow
    metrics: list[str]
    """Names, of the latest steps."""
    timeline: Timeline
    lags: Lags
    refused: list[Refused]
    jobs: list[JobRow]


class StepList(_Answer):
    """Steps, newest first."""

    steps: list[StepRow]
    more: bool


class TrajectoryRow(_Answer):
    """A trajectory that a step trained on."""

    index: int
    reward: float | None
    advantage: float | None
    tokens: int | None
    trainable_tokens: int | None
    versions: tuple[int | None, int | None]


class GroupRow(_Answer):
    """A group that a step trained on."""

    group_id: str
    producer: str | None
    trajectories: list[TrajectoryRow]


class StepPage(_Answer):
    """One step."""

    model: ModelRow
    step: StepRow
    metrics: dict[str, float]
    timings: dict[str, float]
    groups: list[GroupRow]
    more_groups: int
    rows: str
    """What is kept of the packed rows: none, sample or all."""
    problem: str | None
    """Why there is no report."""
    first: int
    last: int
    """Steps there are."""


class Span(_Answer):
    """Where the tokens of a message stand."""

    sequence: int
    start: int
    stop: int


class Call(_Answer):
    """A tool call."""

    id: str | None
    name: str
    arguments: str


class MessageRow(_Answer):
    """A message, or a sampled turn."""

    role: str
    sampled: bool
    name: str | None
    text: str
    reasoning: str | None
    calls: list[Call]
    call_id: str | None
    finish_reason: str | None
    span: Span | None


class HistoryRow(_Answer):
    """One token history of a trajectory."""

    messages: list[MessageRow]
    tools: str | None
    """As JSON text."""


class Tokens(_Answer):
    """One token sequence as it was trained."""

    update: int
    row: int
    part: int
    ids: list[int]
    texts: list[str] | None
    trained: list[bool]
    advantages: list[float | None]
    ratios: list[float | None]
    weights: list[float | None]
    behaviour: list[float | None]
    old: list[float | None]
    new: list[float | None]
    lags: list[int | None]


class TrajectoryPage(_Answer):
    """One trajectory."""

    model: ModelRow
    step: int
    group_id: str
    offset: int
    producer: str | None
    index: int
    siblings: list[TrajectoryRow]
    histories: list[HistoryRow]
    metrics: dict[str, Any]
    metadata: dict[str, Any]
    logs: list[str]
    sequences: list[Tokens]
    updates: list[int]
    """Of which tokens are kept."""
    update: int | None
    """The one that is shown."""
    notes: list[str]
    """What is not shown, why, and what to do about it."""
