"""Examples to imitate, one conversation a line, as the field writes them for supervised fine-tuning: `{"messages": […], "tools": […]}`.

Every assistant message of an example trains, but for those with `"weight": 0`. Examples travel as trajectories of groups with purpose
`sft`; a group is only a parcel then, so many examples share one, and each remembers its line (`metadata.line`). A line may also be a whole
group, as in a file for reinforcement learning: its trajectories are the examples.

Guarantees: a bad line is named (number, field, reason) and the next one is read; the same file and prefix give the same group ids, so that
sending it again is a repeat which the lane drops. Limitations: formats other than `messages`.

Groups from a file with one JSON group a line, in the hosted API's form or in our compact one.

Guarantees: a bad line is named (number, field, reason) and the next one is read; memory is bounded by the longest line. Blank lines
are skipped. Limitations: a line above `MAX_LINE_BYTES`, which no reader of the log would take.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import BinaryIO

from headrace.core.payloads import MAX_RAW_BYTES
from headrace.schemas.base import Open
from headrace.schemas.chat import Message, Tool
from headrace.schemas.codec import SampledGroup, decode_group, sampled
from headrace.schemas.parsing import load_json, validate
from headrace.schemas.reasons import CodecError
from headrace.schemas.reasons import DeadLetterReason as Reason
from headrace.schemas.trajectory import Trajectory, TrajectoryGroup

MAX_LINE_BYTES = MAX_RAW_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodLine:
    """A line that holds a group."""

    number: int
    """From 1."""
    end: int
    """Bytes of the file up to and with this line."""
    group: SampledGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class BadLine:
    """A line that holds none, and why."""

    number: int
    end: int
    path: str
    detail: str


def read_groups(
    stream: BinaryIO, max_line: int = MAX_LINE_BYTES, decode: Callable[[bytes], SampledGroup] = decode_group
) -> Iterator[GoodLine | BadLine]:
    """Every line that is not blank, in order.

    Args:
        stream: Lines.
        max_line: Bytes.
        decode: What a line is; raises CodecError where it is none.
    """
    number = end = 0
    while line := stream.readline(max_line + 1):
        number += 1
        end += len(line)
        if len(line) > max_line:
            while not line.endswith(b"\n") and (line := stream.readline(max_line)):
                end += len(line)
            yield BadLine(number=number, end=end, path="", detail=f"longer than {max_line} bytes")
        elif line.strip():
            try:
                yield GoodLine(number=number, end=end, group=decode(line))
            except CodecError as error:
                yield BadLine(number=number, end=end, path=error.path, detail=error.detail)


PARCEL_EXAMPLES = 32
"""Examples of one group at most: the lane keeps an offset for each group that waits."""
PARCEL_BYTES = 1 << 20
"""Text of one group, about."""


class Example(Open):
    """One line."""

    messages: list[Message]
    tools: list[Tool] | None = None


def decode_example(line: bytes) -> SampledGroup:
    """A line as a group of purpose `sft`.

    Raises:
        CodecError: with the path of the field.
    """
    value = load_json(line)
    if not isinstance(value, dict):
        raise CodecError(Reason.INVALID_SCHEMA, "", f"an object with `messages` is needed, not {type(value).__name__}")
    if "trajectories" in value:
        group = decode_group(line)
        group.group.purpose = group.group.purpose or "sft"
        group.group.group_id = group.group.group_id or sha256(line).hexdigest()[:32]
        return group
    example = validate(Example, value)
    if not any(message.role == "assistant" for message in example.messages):
        raise CodecError(Reason.INVALID_SCHEMA, "messages", "no message is the assistant's: there is nothing to imitate")
    trajectory = Trajectory(messages_and_choices=[*example.messages], tools=example.tools)
    return sampled(TrajectoryGroup(trajectories=[trajectory], purpose="sft"))


def parcels(lines: Iterable[GoodLine], prefix: str) -> Iterator[SampledGroup]:
    """Examples put together to fewer groups, in order; what was a group stays as it is.

    Args:
        lines: As decoded by `decode_example`.
        prefix: Of the ids of the groups that are made here, `<prefix>-<n>`: the job's id.
    """
    made = 0
    held: list[GoodLine] = []
    held_bytes = last_end = 0
    for line in lines:
        size, last_end = line.end - last_end, line.end
        if line.group.group.group_id is not None:
            yield line.group
            continue
        if held and (len(held) == PARCEL_EXAMPLES or held_bytes + size > PARCEL_BYTES):
            yield _parcel(held, f"{prefix}-{made}")
            made, held, held_bytes = made + 1, [], 0
        held.append(line)
        held_bytes += size
    if held:
        yield _parcel(held, f"{prefix}-{made}")


def _parcel(lines: list[GoodLine], group_id: str) -> SampledGroup:
    trajectories = [line.group.group.trajectories[0] for line in lines]
    for line, trajectory in zip(lines, trajectories, strict=True):
        trajectory.metadata["line"] = line.number
    return sampled(TrajectoryGroup(trajectories=trajectories, purpose="sft", group_id=group_id))
