"""What gateways know of RLOR trainer jobs, in the compacted topic `gateway`. The model that is trained is the job itself.

One record a job, written again with each step that is asked for, and whatever is asked of it. What became of a step stands in the documents
of its training jobs; this record is bounded however many steps there were.

What gateways keep of the RLOR API's resources next to its jobs: datasets, models by name. In the compacted topic `gateway`.

Guarantees: a resource that is deleted and made again has another incarnation, and so have its parts; what was meant for the one before
does not become part of it. A file of a dataset is a record of its own, so that two gateways that take in two files do not overwrite each
other; of two that make the same resource in the same moment one does (`log_writer.Turn`).
"""

from datetime import datetime
from typing import Any, Literal

from pydantic import Field

from headrace.schemas.base import Record, utc_now


class RlorStep(Record):
    """One train step that was asked for."""

    dataset: str | None
    """Id of the dataset; null: none is known."""
    output_model: str
    """Id under which the result can be named."""
    training_jobs: tuple[str, ...] = Field(min_length=1)
    """Ids of the training jobs in their order, one an epoch; the output model is what the last one makes."""
    groups: int
    """Groups of each."""
    evaluation_groups: int = 0
    asked_at: datetime = Field(default_factory=utc_now)


class RlorJob(Record):
    """A job. Key `rlor-job/<account>/<id>`."""

    account: str
    id: str
    owner: str
    """Of the token that asked."""
    model_id: str
    nonce: str
    """Tells this job from one of the same id before it, which was deleted."""
    request: dict[str, Any]
    """What was asked for: the API's JSON in normal form (camelCase, defaults filled in), without secrets."""
    secrets: dict[str, str] = Field(default_factory=dict)
    """Encrypted with `gateway.secrets_key`, by the name of the field."""
    without_effect: tuple[str, ...] = ()
    """Fields of the request that are taken and do nothing."""
    step: RlorStep | None = None
    """The last one asked for."""
    steps_before: int = 0
    """Steps asked for before that one; they have ended."""
    seconds_before: dict[str, float] = Field(default_factory=dict)
    """What they took, by accelerator."""
    created_at: datetime = Field(default_factory=utc_now)
    resumed_at: datetime | None = None
    cancelled_at: datetime | None = None
    deleted_at: datetime | None = None


class RlorRun(Record):
    """Where the metrics of a job are to be seen, next to here. Key `rlor-run/<account>/<job id>`."""

    account: str
    job: str
    nonce: str
    """Of the job."""
    url: str
    fault: str | None = None
    """Why its metrics are not there; null: nothing is known to be wrong."""
    noted_at: datetime = Field(default_factory=utc_now)


def rlor_run_key(account: str, job_id: str) -> str:
    """The key of a job's run."""
    return f"rlor-run/{account}/{job_id}"


def rlor_job_key(account: str, job_id: str) -> str:
    """The key of a job's record."""
    return f"rlor-job/{account}/{job_id}"


DatasetFormat = Literal["RL", "CHAT", "COMPLETION"]


class DatasetFile(Record):
    """A file of a dataset, whole and valid. Key `dataset-file/<account>/<dataset>/<incarnation>/<name>`."""

    account: str
    dataset: str
    incarnation: str
    name: str
    uri: str
    """Of the object: the file's bytes as they came."""
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    size: int = Field(ge=1)
    format: DatasetFormat
    """Of its lines."""
    examples: int = Field(ge=1)
    """Lines that are not empty."""
    samples: int | None = None
    """On each line of format RL."""
    stored_at: datetime = Field(default_factory=utc_now)


class DatasetFact(Record):
    """A dataset. Key `dataset/<account>/<dataset>`."""

    account: str
    dataset: str
    incarnation: str
    owner: str
    display_name: str = ""
    format: DatasetFormat | None = None
    """As declared; null: as its files have it."""
    state: Literal["UPLOADING", "READY"] = "UPLOADING"
    fault: str | None = None
    """What was wrong with the last file that was refused; null after one that was taken."""
    declared_examples: int | None = None
    expected: tuple[str, ...] = ()
    """Names of the files that upload addresses were asked for."""
    external_url: str | None = None
    """`s3://…`: its files are fetched by a job that brings the credentials."""
    created_at: datetime = Field(default_factory=utc_now)
    updated_at: datetime = Field(default_factory=utc_now)


class ModelAlias(Record):
    """A version of an RLOR job's model by the name that a client gave it. Key `rlor-model/<account>/<id>`."""

    account: str
    id: str
    job: str
    """Id of the RLOR job."""
    model_id: str
    training_job: str | None = None
    """The version is what this job commits."""
    version: int | None = None
    """The version, where it is there already: of a promoted checkpoint."""
    owner: str
    created_at: datetime = Field(default_factory=utc_now)


def dataset_key(account: str, dataset: str) -> str:
    """The key of a dataset."""
    return f"dataset/{account}/{dataset}"


def dataset_file_key(file: DatasetFile) -> str:
    """The key of a dataset's file."""
    return dataset_files_prefix(file.account, file.dataset, file.incarnation) + file.name


def dataset_files_prefix(account: str, dataset: str, incarnation: str) -> str:
    """What the keys of all files of a dataset begin with."""
    return f"{account_files_prefix(account)}{dataset}/{incarnation}/"


def account_files_prefix(account: str) -> str:
    """What the keys of all files of an account's datasets begin with."""
    return f"dataset-file/{account}/"


def model_alias_key(account: str, model: str) -> str:
    """The key of a model's name."""
    return f"rlor-model/{account}/{model}"
