"""What only gateways know, in the compacted topic `gateway`: who asked for a job, and how a repeated request is recognised.

Keys are `<kind>/<id>`. Every gateway reads all of it; a gateway writes a record in the same transaction as what it is about.
"""

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, Field

from headrace.schemas.base import Record, utc_now
from headrace.schemas.deployments import DeployedModel, DeploymentFact, HotLoad
from headrace.schemas.rlor import DatasetFact, DatasetFile, ModelAlias, RlorJob, RlorRun


class GatewayJob(Record):
    """A job that came over HTTP. Key `job/<job id>`."""

    job_id: str
    model_id: str
    account: str
    owner: str
    """Of the token that asked."""
    api: Literal["training-jobs", "rlor"]
    content: str
    """SHA-256 of what was asked: a retry without an idempotency key is recognised by it."""
    idempotency_key: str | None = None
    warnings: tuple[str, ...] = ()
    """What of the request has no effect."""
    created_at: datetime = Field(default_factory=utc_now)


class DeletedCheckpoint(Record):
    """A version that is listed and served no more. Key `checkpoint/<model id>/<incarnation>/<step>`."""

    model_id: str
    incarnation: str
    step: int
    owner: str
    """Of the token that asked."""
    deleted_at: datetime = Field(default_factory=utc_now)


class LoggedGroups(Record):
    """Trajectories that a client kept next to training, as of an evaluation. Key `log/<model id>/<id>`."""

    id: str
    model_id: str
    incarnation: str
    step: int
    """The model's version when they came."""
    split: str
    groups: int
    trajectories: int
    exceptions: int
    reward_mean: float | None
    """Null without trajectories."""
    uri: str
    """In the object store: what was sent, one group's JSON a line, zstd."""
    size: int
    """Bytes stored."""
    owner: str
    created_at: datetime = Field(default_factory=utc_now)


FACTS: tuple[type[BaseModel], ...] = (
    GatewayJob,
    DatasetFact,
    DatasetFile,
    ModelAlias,
    RlorJob,
    RlorRun,
    DeploymentFact,
    DeployedModel,
    HotLoad,
    DeletedCheckpoint,
    LoggedGroups,
)
"""What the topic carries."""


def checkpoint_key(model_id: str, incarnation: str, step: int) -> str:
    """The key of a deleted checkpoint's record."""
    return f"checkpoint/{model_id}/{incarnation}/{step}"


def job_key(job_id: str) -> str:
    """The key of a job's record."""
    return f"job/{job_id}"


def log_key(model_id: str, log_id: str) -> str:
    """The key of what a client logged."""
    return f"log/{model_id}/{log_id}"
