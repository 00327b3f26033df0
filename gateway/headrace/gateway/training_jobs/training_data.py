"""Where the examples of a supervised job lie: what `training_data_url` means.

It is the URI of an object in our store, the id (or name) of a dataset that was uploaded, or a `wandb-artifact://` that
`gateway.training_data` maps to such a URI. Guarantees: nothing outside of our store is read, nor what is not the caller's (`reach`); what
was allowed is kept as a key, so that nothing else is read later. Limitations: artefacts that are not mapped; the gateway has no key for the
service that keeps them.

Lines of conversations as groups to imitate.

Guarantees: one group of at most `_MOST_EXAMPLES` examples and about `_MOST_BYTES` is in memory; every line that is no example is told by
its number. Limitations: judging whether an example fits the model; the lane refuses those that don't, each alone, and the job continues.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, model_validator

from headrace.core.settings import GatewaySettings
from headrace.core.store import DigestMismatchError, InvalidKeyError, ObjectNotFoundError, ObjectStore
from headrace.gateway.problems import FaultError, ProblemError, UnprocessableError
from headrace.gateway.reach import NotReachableError, Reach
from headrace.gateway.rlor.dataset_files import DatasetFaultError, Line, ready_dataset, split_lines
from headrace.gateway.rlor.resources import PROJECT, resource_name
from headrace.gateway.training_jobs.config import Faults, parts_of
from headrace.gateway.training_jobs.staging import Loc, Read
from headrace.schemas.base import Open
from headrace.schemas.chat import Message, Tool
from headrace.schemas.codec import SampledGroup
from headrace.schemas.parsing import load_json, validate
from headrace.schemas.reasons import CodecError
from headrace.schemas.trajectory import Trajectory, TrajectoryGroup

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


_MOST_EXAMPLES = 64
_MOST_BYTES = 1024 * 1024


class ExampleLine(Open):
    """A conversation with at least one answer."""

    messages: list[Message] = Field(min_length=1)
    tools: list[Tool] | None = None

    @model_validator(mode="after")
    def _has_an_answer(self) -> "ExampleLine":
        if all(message.role != "assistant" for message in self.messages):
            raise ValueError("messages: none is of role assistant, so there is nothing to imitate")
        return self


def grouped(
    lines: Iterable[Line], faults: Faults, most_groups: int, assistant_turns: Literal["all", "last"] = "all"
) -> Iterator[tuple[Loc, Read]]:
    """Groups of the examples, in order, as `stage` takes them.

    Args:
        lines: That are not empty.
        faults: Takes what is wrong, line by line.
        most_groups: Of a job.
        assistant_turns: Which of an example's assistant messages train.
    """
    found: list[Trajectory] = []
    size = count = 0
    try:
        for line in lines:
            if faults.full:
                return
            if (example := _read(line, faults, assistant_turns)) is None:
                continue
            found.append(example)
            size += len(line.text)
            if len(found) >= _MOST_EXAMPLES or size >= _MOST_BYTES:
                count += 1
                if count > most_groups:
                    faults.add(
                        LOC, f"it has more than {most_groups} groups of up to {_MOST_EXAMPLES} examples (gateway.max_groups)", "too_long"
                    )
                    return
                yield _group(found)
                found, size = [], 0
    except (DatasetFaultError, DigestMismatchError) as error:
        faults.add(LOC, str(error))
        return
    if found:
        yield _group(found)
    elif not count and not faults:
        faults.add(LOC, "it has no line: an example a line is needed", "too_short")


def _read(line: Line, faults: Faults, assistant_turns: str) -> Trajectory | None:
    try:
        example = validate(ExampleLine, load_json(line.text))
    except CodecError as error:
        faults.add([*LOC, line.number, *parts_of(error.path)], f"line {line.number}: {error.detail}", str(error.reason))
        return None
    trajectory = Trajectory(messages_and_choices=list(example.messages), tools=example.tools)
    if assistant_turns == "last":
        try:
            trajectory.keep_last_turn()
        except ValueError as error:
            faults.add([*LOC, line.number, "messages"], f"line {line.number}: {error}", "wrong_last_turn")
            return None
    return trajectory


def _group(examples: list[Trajectory]) -> tuple[Loc, Read]:
    group = SampledGroup(group=TrajectoryGroup(trajectories=examples), turns=())
    return LOC, lambda _faults: group
