"""Commands: requests to the owner of a model's lane. Only the lane's owner changes `models`; whoever else wants a change asks here."""

from datetime import datetime

from pydantic import Field

from headrace.schemas.base import Record, utc_now
from headrace.schemas.training import ModelSettings


class CreateModel(Record):
    """Create a model. Repeating it for a living model changes nothing; after a deletion it makes a new incarnation."""

    model_id: str
    account: str
    project: str
    name: str
    settings: ModelSettings
    worker_group: str
    created_at: datetime = Field(default_factory=utc_now)


class DeleteModel(Record):
    """Delete a model: its state stays and refuses groups."""

    model_id: str
    requested_at: datetime = Field(default_factory=utc_now)


class CancelJob(Record):
    """Cancel a job: its groups are refused, it ends as CANCELLED unless its step is committed already."""

    model_id: str
    job_id: str
    requested_at: datetime = Field(default_factory=utc_now)


Command = CreateModel | DeleteModel | CancelJob
