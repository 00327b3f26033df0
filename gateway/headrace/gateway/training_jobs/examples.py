"""Lines of conversations as groups to imitate.

Guarantees: one group of at most `_MOST_EXAMPLES` examples and about `_MOST_BYTES` is in memory; every line that is no example is told by
its number. Limitations: judging whether an example fits the model; the lane refuses those that don't, each alone, and the job continues.
"""

from collections.abc import Iterable, Iterator
from typing import Literal

from pydantic import Field, model_validator

from headrace.core.store import DigestMismatchError
from headrace.gateway.rlor.dataset_lines import DatasetFaultError, Line
from headrace.gateway.training_jobs.faults import Faults, parts_of
from headrace.gateway.training_jobs.staging import Loc, Read
from headrace.gateway.training_jobs.training_data import LOC
from headrace.schemas.base import Open
from headrace.schemas.chat import Message, Tool
from headrace.schemas.codec import SampledGroup
from headrace.schemas.errors import CodecError
from headrace.schemas.parsing import load_json, validate
from headrace.schemas.trajectory import Trajectory, TrajectoryGroup

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
