"""Examples to imitate, one conversation a line, as the field writes them for supervised fine-tuning: `{"messages": […], "tools": […]}`.

Every assistant message of an example trains, but for those with `"weight": 0`. Examples travel as trajectories of groups with purpose
`sft`; a group is only a parcel then, so many examples share one, and each remembers its line (`metadata.line`). A line may also be a whole
group, as in a file for reinforcement learning: its trajectories are the examples.

Guarantees: a bad line is named (number, field, reason) and the next one is read; the same file and prefix give the same group ids, so that
sending it again is a repeat which the lane drops. Limitations: formats other than `messages`.
"""

from collections.abc import Iterable, Iterator
from hashlib import sha256

from headrace.producers.jsonl import GoodLine
from headrace.schemas.base import Open
from headrace.schemas.chat import Message, Tool
from headrace.schemas.codec import SampledGroup, decode_group, sampled
from headrace.schemas.errors import CodecError
from headrace.schemas.parsing import load_json, validate
from headrace.schemas.reasons import DeadLetterReason as Reason
from headrace.schemas.trajectory import Trajectory, TrajectoryGroup

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
