"""Weights on their way out: what was published, and what engines did with it."""

from datetime import datetime
from typing import Literal

from pydantic import Field

from headrace.schemas.base import Record, utc_now

FolderKind = Literal["weights", "snapshot", "plots", "report", "logprobs"]


class StoredFile(Record):
    """One file of a manifest: path relative to the manifest's folder, size in bytes, SHA-256 in hex."""

    path: str
    size: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Manifest(Record):
    """Written last, by a conditional put, next to the files it lists: `manifest.json`."""

    kind: FolderKind
    model_id: str
    incarnation: str
    step: int
    attempt: str
    files: tuple[StoredFile, ...]
    digest: str
    """SHA-256 over the sorted `sha256  path` lines: one name for the content of all files."""
    uri: str | None = None
    """Folder of the files; null: the one that the manifest stands in."""


class WeightsRef(Record):
    """Where a manifest is and what it must contain."""

    uri: str
    digest: str


class WeightsPublished(Record):
    """A policy version is there to be served. One record for every version; the topic keeps the latest of each model."""

    model_id: str
    incarnation: str
    policy_version: int
    base_model: str
    format: Literal["full", "lora"]
    uri: str
    """Folder of the files; every path in `files` is relative to it."""
    digest: str
    files: tuple[StoredFile, ...]
    rollout_deployments: tuple[str, ...] = ()
    """Deployments that are asked to load it, of the model's account; an engine that follows the model by itself needs none."""
    account: str | None = None
    """Of the model; null in records of releases that did not say it."""
    published_at: datetime = Field(default_factory=utc_now)


class EngineAlive(Record):
    """An engine says that it lives, again and again; when it ends in order it takes this back. Key `alive:<engine>`."""

    engine_id: str
    """Its name, without a model's."""
    every_seconds: float = Field(gt=0)
    """Its next word comes within this."""
    at: datetime = Field(default_factory=utc_now)


class WeightsApplied(Record):
    """An engine serves this version."""

    engine_id: str
    model_id: str
    incarnation: str
    policy_version: int
    digest: str
    base_url: str | None = None
    deployment: str | None = None
    served_as: str | None = None
    """The name under which the engine takes requests for this version; null: `<model id>@<version>`."""
    reported: str | None = None
    """What the engine itself says it serves: a version or a checksum."""
    seconds: float = Field(ge=0)
    """From the record's arrival to the swap."""
    applied_at: datetime = Field(default_factory=utc_now)


class WeightsFailed(Record):
    """An engine could not take this version and continues with the one it has."""

    engine_id: str
    model_id: str
    incarnation: str
    policy_version: int
    digest: str
    error: str
    serving: int | None = None
    """The version of this model (and incarnation) that it continues with; null: none, or it does not know."""
    base_url: str | None = None
    deployment: str | None = None
    failed_at: datetime = Field(default_factory=utc_now)


def alive_key(engine_id: str) -> str:
    """The key under which an engine says that it lives."""
    return f"alive:{engine_id}"
