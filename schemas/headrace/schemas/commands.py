"""Commands: requests to the owner of a model's lane. Only the lane's owner changes `models`; the process that else wants a change asks
here.
"""

from datetime import datetime

from pydantic import Field

from headrace.schemas.base import Record, utc_now
from headrace.schemas.state import StartFrom
from headrace.schemas.training import ModelSettings
from headrace.schemas.weights import WeightsRef


class CreateModel(Record):
    """Create a model. Repeating it for a living model changes nothing; after a deletion it makes a new incarnation."""

    model_id: str
    account: str
    project: str
    name: str
    settings: ModelSettings
    worker_group: str
    shadow_of: str | None = None
    """Train on the groups of this model, which belongs to another worker group; for workers with `shadow_prefix`."""
    start_from: StartFrom | None = None
    """Null: the base model, or `start_weights`."""
    start_weights: WeightsRef | None = None
    """Warm start: version 0 is this stored adapter, or these full weights, instead of the base model; the optimizer starts again."""
    created_at: datetime = Field(default_factory=utc_now)


class DeleteModel(Record):
    """Delete a model: its state stays and refuses groups."""

    model_id: str
    requested_at: datetime = Field(default_factory=utc_now)


class DeleteCheckpoints(Record):
    """Delete the weights of versions: their files go when nothing needs them; the newest version's stay until there is a newer one.

    A step that is planned after this was read can't have one of them as its KL reference.
    """

    model_id: str
    incarnation: str
    """What was meant; of another one nothing is deleted."""
    steps: tuple[tuple[int, int], ...]
    """As (first, last), both included."""
    requested_at: datetime = Field(default_factory=utc_now)


class CancelJob(Record):
    """Cancel a job: its groups are refused, it ends as CANCELLED unless its step is committed already."""

    model_id: str
    job_id: str = Field(min_length=1, max_length=256)
    requested_at: datetime = Field(default_factory=utc_now)


class PauseJob(Record):
    """Pause a job: in the queue it is not begun, while running its step is dropped and starts again after `ResumeJob`."""

    model_id: str
    job_id: str = Field(min_length=1, max_length=256)
    requested_at: datetime = Field(default_factory=utc_now)


class ResumeJob(Record):
    """Put a paused job back into the queue."""

    model_id: str
    job_id: str = Field(min_length=1, max_length=256)
    requested_at: datetime = Field(default_factory=utc_now)


class ResumeModel(Record):
    """Let a model that is `stopped` or `diverged` continue.

    Diverged: it continues from what could be run again of its steps, as a new version, and the ledger says so (`rebased`). Pending groups
    that were lost are refused as `expired`.
    """

    model_id: str
    requested_at: datetime = Field(default_factory=utc_now)


Command = CreateModel | DeleteModel | CancelJob | PauseJob | ResumeJob | ResumeModel | DeleteCheckpoints
COMMANDS: tuple[type[Command], ...] = (CreateModel, DeleteModel, CancelJob, PauseJob, ResumeJob, ResumeModel, DeleteCheckpoints)
