"""The door: what a group must be before anything of it is sent.

Guarantees: a group that passes has a model, a `group_id` (written into the caller's own object, so that sending it again is a
duplicate which the lane can drop), at least one trajectory, a finite reward of each, and arrays of equal lengths. An `InvalidGroupError`
says where and what. Limitations: whether anything can be trained on it; that depends on the model and is the lane's to say.
"""

import math
import re
import uuid

from headrace.producers.errors import InvalidGroupError
from headrace.schemas.chat import Choice
from headrace.schemas.codec import JSON_TYPE, SAFETENSORS_TYPE, SampledGroup, encode_json, encode_safetensors, sampled
from headrace.schemas.reasons import CodecError
from headrace.schemas.trajectory import NO_REWARD, TrajectoryGroup

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_MAX_ID = 256


def admit(
    group: TrajectoryGroup | SampledGroup, *, traceparent: str | None = None, in_job: bool = False, examples: bool = False
) -> TrajectoryGroup:
    """Check what is cheap to check, and name the group.

    Args:
        group: As the caller built it.
        traceparent: W3C trace context.
        in_job: A job is about to take it.
        examples: A job of kind `sft` is: its trajectories need no reward.

    Returns:
        The group itself (of a `SampledGroup`: its `group`), with a `group_id`.

    Raises:
        InvalidGroupError: with the path of the field.
    """
    inner = group.group if isinstance(group, SampledGroup) else group
    if not isinstance(inner, TrajectoryGroup):
        raise InvalidGroupError("", f"a TrajectoryGroup or SampledGroup is needed, not {type(inner).__name__}")
    if not inner.trajectories:
        raise InvalidGroupError("trajectories", "there are none: rewards are compared within a group, so it needs at least one")
    if inner.purpose == "sft" and inner.job_id is None and not in_job:
        raise InvalidGroupError("purpose", "examples train in a job, never in the stream: use submit_job(groups, kind='sft')")
    for i in () if examples else inner.without_reward():
        raise InvalidGroupError(f"trajectories[{i}].reward", NO_REWARD)
    for i, trajectory in enumerate(inner.trajectories):
        if not math.isfinite(trajectory.reward):
            raise InvalidGroupError(f"trajectories[{i}].reward", f"{trajectory.reward} is not a finite number")
    if traceparent is not None and not _TRACEPARENT.fullmatch(traceparent):
        raise InvalidGroupError("traceparent", "the W3C form is needed: 00-<32 hex digits>-<16 hex digits>-<2 hex digits>")
    if inner.group_id is None:
        inner.group_id = str(uuid.uuid4())
    check_id("group_id", inner.group_id)
    return inner


def check_id(name: str, value: str | None) -> str:
    """A model, group or job id.

    Raises:
        InvalidGroupError: missing, too long, not Unicode, or a model id that would be taken for a lane's key.
    """
    if not value:
        raise InvalidGroupError(name, "missing: give it to the call or to the producer" if name == "model_id" else "empty")
    if len(value) > _MAX_ID:
        raise InvalidGroupError(name, f"{len(value)} characters, at most {_MAX_ID} are allowed")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidGroupError(name, "holds a lone surrogate, which is no Unicode text") from None
    if name == "model_id" and value.startswith("lane:"):
        raise InvalidGroupError(name, "starts with 'lane:', which is reserved for the keys of lanes")
    return value


def encode(group: TrajectoryGroup | SampledGroup, encoding: str) -> tuple[bytes, str]:
    """A group as (body, content type); blocks for the time that its size takes.

    Raises:
        InvalidGroupError: the codec refuses it.
    """
    try:
        lifted = group if isinstance(group, SampledGroup) else sampled(group)
        if encoding == "json":
            return encode_json(lifted), JSON_TYPE
        return encode_safetensors(lifted), SAFETENSORS_TYPE
    except CodecError as error:
        raise InvalidGroupError(error.path, error.detail) from None


def weigh(group: TrajectoryGroup | SampledGroup) -> int:
    """About how many bytes the encoded group will have, without encoding it: what the buffer reserves first.

    For prepared arrays by tokens alone, which are most of it; the buffer is told the size as soon as it is known.
    """
    if isinstance(group, SampledGroup):
        return 4096 + sum(12 * len(turn) for turn in group.turns if turn is not None)
    weight = 512
    for trajectory in group.trajectories:
        weight += 512 + sum(map(len, trajectory.logs))
        for items, _tools in trajectory.histories():
            for item in items:
                weight += 256 + _text_of(item.message.content if isinstance(item, Choice) else item.content)
                if isinstance(item, Choice):
                    entries = item.logprobs and (item.logprobs.content or item.logprobs.refusal)
                    weight += 12 * len(item.token_ids or entries or ())
    return weight


def _text_of(content: object) -> int:
    if isinstance(content, str):
        return len(content)
    return sum(len(str(part.get("text", ""))) + 64 for part in content) if isinstance(content, list) else 0
