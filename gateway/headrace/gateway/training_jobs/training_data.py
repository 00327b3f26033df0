"""Where the examples of a supervised job lie: what `training_data_url` means.

It is the URI of an object in our store, the id (or name) of a dataset that was uploaded, or a `wandb-artifact://` that
`gateway.training_data` maps to such a URI. Guarantees: nothing outside of our store is read, nor what is not the caller's (`reach`); what
was allowed is kept as a key, so that nothing else is read later. Limitations: artefacts that are not mapped; the gateway has no key for the
service that keeps them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headrace.core.settings import GatewaySettings
from headrace.core.store import InvalidKeyError, ObjectNotFoundError, ObjectStore
from headrace.gateway.problems import FaultError, ProblemError, UnprocessableError
from headrace.gateway.reach import NotReachableError, Reach
from headrace.gateway.rlor.dataset_files import ready_dataset
from headrace.gateway.rlor.dataset_lines import Line, split_lines
from headrace.gateway.rlor.resources import PROJECT, resource_name

LOC: list[str | int] = ["body", "training_data_url"]
_ARTIFACT = "wandb-artifact://"


@dataclass(frozen=True, slots=True)
class DataObject:
    """One object with lines."""

    key: str
    sha256: str | None = None
    """Where it is known, it is checked."""


def objects_of(url: str, settings: GatewaySettings, reach: Reach) -> list[DataObject]:
    """The objects that a URL means. Whether they are there is seen when they are read.

    Raises:
        UnprocessableError: it means nothing here; says what would.
    """
    if url.startswith(_ARTIFACT):
        mapped = settings.training_data.get(url)
        if mapped is None or not reach.maps(url, mapped):
            raise _refused(
                f"{url[:200]!r} is not mapped: put the JSONL file into the object store and its URI under gateway.training_data, or send "
                "that URI, or the id of a dataset"
            )
        return [DataObject(_key_of(reach.store.resolve, mapped))]
    if "://" in url:
        return [DataObject(_key_of(reach.key, url))]
    account = reach.caller.account
    try:
        if not reach.caller.sees(account, PROJECT):
            raise ProblemError(
                404, f"{resource_name(account, 'datasets', url)[:300]} does not exist, or is of project {PROJECT}, not this key's"
            )
        dataset = ready_dataset(reach.tables, account, url, "training_data_url")
    except ProblemError as problem:
        raise _refused(f"{problem.message} (a URI in the object store, the id of a dataset, or a mapped {_ARTIFACT}… is needed)") from None
    if any(file.format != "CHAT" for file in dataset.files):
        raise _refused(f"{dataset.name} is of format {dataset.files[0].format}: examples need format CHAT, a conversation on each line")
    return [DataObject(_key_of(reach.store.resolve, file.uri), file.sha256) for file in dataset.files]


def read_lines(store: ObjectStore, objects: list[DataObject]) -> Iterator[Line]:
    """All lines that are not empty. Blocks.

    Raises:
        UnprocessableError: an object is not there.
        DatasetFaultError: a line is too long.
        DigestMismatchError: an object is not what was uploaded; at its end only.
        StoreUnavailableError: the store.
    """
    for found in objects:
        try:
            store.head(found.key)
        except ObjectNotFoundError:
            raise _refused(f"{store.uri(found.key)[:200]!r} does not exist") from None
        yield from split_lines(store.get_chunks(found.key, sha256=found.sha256))


def _key_of(resolve: Callable[[str], str], uri: str) -> str:
    try:
        return resolve(uri)
    except (InvalidKeyError, NotReachableError) as error:
        raise _refused(str(error)) from None


def _refused(message: str) -> UnprocessableError:
    return UnprocessableError([FaultError(LOC, message)])
