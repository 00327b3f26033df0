"""What gateways keep of the RLOR API's resources next to its jobs: datasets, models by name. In the compacted topic `gateway`.

Guarantees: a resource that is deleted and made again has another incarnation, and so have its parts; what was meant for the one before
does not become part of it. A file of a dataset is a record of its own, so that two gateways that take in two files do not overwrite each
other; of two that make the same resource in the same moment one does (`log_writer.Turn`).
"""

from datetime import datetime
from typing import Literal

from pydantic import Field

from headrace.schemas.base import Record, utc_now

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
