"""Datasets as the gateway knows them: their fact and the facts of their files, put together."""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.gateway.problems import FAILED_PRECONDITION, ProblemError
from headrace.gateway.rlor.names import id_in, name_of
from headrace.gateway.tables import Tables
from headrace.schemas.rlor_resources import DatasetFact, DatasetFile, dataset_files_prefix, dataset_key


@dataclass(frozen=True, slots=True)
class Dataset:
    """A dataset with the files that were taken."""

    fact: DatasetFact
    files: Sequence[DatasetFile]
    """In the order of their names."""

    @property
    def name(self) -> str:
        """The resource name."""
        return name_of(self.fact.account, "datasets", self.fact.dataset)

    @property
    def examples(self) -> int:
        """Of all files."""
        return sum(file.examples for file in self.files)

    def disagreement(self) -> str | None:
        """Why the files can't be one dataset; None: they can."""
        first = self.files[0] if self.files else None
        for file in self.files[1:]:
            if first is not None and (file.format, file.samples) != (first.format, first.samples):
                return (
                    f"{file.name} has format {file.format} with {file.samples} samples a line, {first.name} has {first.format} with "
                    f"{first.samples}: all files of a dataset need the same"
                )
        return None


def find_dataset(tables: Tables, account: str, dataset: str) -> Dataset:
    """A dataset by its id.

    Raises:
        ProblemError: 404.
    """
    fact = tables.facts.get(dataset_key(account, dataset))
    if not isinstance(fact, DatasetFact):
        raise ProblemError(404, f"{name_of(account, 'datasets', dataset)} does not exist")
    return with_files(tables, fact)


def with_files(tables: Tables, fact: DatasetFact) -> Dataset:
    """A dataset with its files."""
    found = tables.facts_under(dataset_files_prefix(fact.account, fact.dataset, fact.incarnation))
    return Dataset(fact, [file for file in found if isinstance(file, DatasetFile)])


def ready_dataset(tables: Tables, account: str, name: str, field: str) -> Dataset:
    """A dataset that a job is to read.

    Args:
        tables: Of now.
        account: The caller's.
        name: `accounts/<account>/datasets/<id>`, or the id.
        field: Which field of the request names it, for the message.

    Raises:
        ProblemError: 404: there is none; 400: it is not READY.
    """
    found = find_dataset(tables, account, id_in(account, "datasets", name, field))
    if found.fact.state != "READY":
        why = found.fact.fault or "its files are not uploaded yet: upload them, then call :validateUpload"
        raise ProblemError(400, f"{field}: {found.name} is {found.fact.state}: {why}", code=FAILED_PRECONDITION)
    return found
