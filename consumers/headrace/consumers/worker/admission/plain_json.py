"""A plain group in the safetensors form, read into just the fields that admission looks at, and checked while it is read.

msgspec's typed decoder does both in one pass: what it takes, pydantic takes too, and what it does not take is left to the long way. It is
stricter where the two differ: no text for a number, no unknown keys (but those that the usual clients write and no one reads).

Guarantees: a group that is read here is one that `TrajectoryGroup` accepts, with the same values. What has any keys and values (metadata,
tool calls, tools, exceptions) is cut out as it stands and judged by those that the long way asks, unless it is empty or what was judged
just before. Limitations: errors that say anything; see `plain_groups.py`.
"""

import struct
import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import orjson
from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field
from pydantic import TypeAdapter

from headrace.schemas.chat import Tool, ToolCall
from headrace.schemas.surrogates import holds_stand_in
from headrace.schemas.trajectory import RolloutException

_NO_NUMBERS = Raw(b"[]")

# 64 bits: a longer integer is a float to orjson, or none at all.
Integer = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Version = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Number = Integer | float | bool
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Role = Literal["developer", "system", "user", "assistant", "tool", "function"]
Finished = Literal["stop", "length", "tool_calls", "content_filter", "function_call", "abort"]


class PlainMessage(Struct, gc=False, forbid_unknown_fields=True):
    """What the model said in a choice."""

    role: Literal["assistant"] = "assistant"
    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Raw] | None = None
    # What clients add, mostly empty.
    annotations: list[None] | None = None
    audio: None = None
    function_call: None = None


class PlainItem(Struct, gc=False, forbid_unknown_fields=True):
    """A context message or a choice: one struct with the keys of both, since a key of the one is an unknown key of the other."""

    role: Role | UnsetType = UNSET
    content: str | None = None
    name: str | None = None
    tool_calls: list[Raw] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    finish_reason: Finished | UnsetType | None = UNSET
    index: Integer = 0
    message: PlainMessage | UnsetType = UNSET
    logprobs: None = None
    token_ids: None = None
    token_logprobs: None = None
    policy_versions: None = None
    prompt_token_ids: Raw = _NO_NUMBERS
    token_span: tuple[int, int] | UnsetType = UNSET
    stop_reason: Integer | str | None = None
    """vLLM's."""


class PlainHistory(Struct, gc=False, forbid_unknown_fields=True):
    """One more history of a trajectory."""

    messages_and_choices: list[PlainItem]
    tools: list[Raw] | None = None


class PlainTrajectory(Struct, gc=False, forbid_unknown_fields=True):
    """One rollout."""

    messages_and_choices: list[PlainItem] = []
    tools: list[Raw] | None = None
    additional_histories: list[PlainHistory] = []
    reward: float | UnsetType = UNSET
    initial_policy_version: Version | None = None
    final_policy_version: Version | None = None
    metrics: dict[str, Number] = {}
    metadata: dict[str, Number | str | None] = {}
    logs: list[str] = []
    start_time: None = None
    exchanges: None = None
    unread: None = None


class PlainGroup(Struct, gc=False, forbid_unknown_fields=True):
    """A group of the stream or of a job, with the options of its model."""

    trajectories: list[PlainTrajectory]
    exceptions: list[Raw] = []
    metadata: dict[str, Raw] = {}
    metrics: dict[str, Number] = {}
    logs: list[str] = []
    group_id: Name | None = None
    job_id: Name | None = None
    purpose: Literal["rl"] | None = None
    allow_training_without_logprobs: None = None


class PlainTensor(Struct, gc=False, forbid_unknown_fields=True):
    """A flat array, as the header describes it."""

    dtype: str
    shape: tuple[int]
    data_offsets: tuple[int, int]


class PlainText(Struct, gc=False, forbid_unknown_fields=True):
    """The header's metadata."""

    group: str


class PlainHeader(Struct, gc=False, forbid_unknown_fields=True):
    """Of the safetensors form."""

    metadata: PlainText = field(name="__metadata__")
    token_ids: PlainTensor
    logprobs: PlainTensor
    policy_versions: PlainTensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """A group in the safetensors form, taken apart."""

    group: PlainGroup
    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32] | None


def read_plain(body: bytes | memoryview) -> Plain:
    """Read a group; the arrays are views, and no one has looked at their values.

    Whatever it raises, the long way has to look at it.
    """
    (size,) = _SIZE.unpack_from(body)
    at = _SIZE.size + size
    header = _decode_header(memoryview(body)[_SIZE.size : at])
    n = header.token_ids.shape[0]
    tensors = [(header.token_ids, "I32"), (header.logprobs, "F32")]
    if header.policy_versions is not None:
        tensors.append((header.policy_versions, "I32"))
    for i, (tensor, dtype) in enumerate(tensors):
        # One behind the other, as our own producers write them: what others may do is left to the long way.
        if tensor.dtype != dtype or tensor.shape != (n,) or tensor.data_offsets != (4 * n * i, 4 * n * (i + 1)):
            raise ValueError
    if len(body) != at + 4 * n * len(tensors) or sys.byteorder != "little":
        raise ValueError
    if holds_stand_in(text := header.metadata.group.encode()):
        raise ValueError
    return Plain(
        group=_decode_group(text),
        ids=np.frombuffer(body, np.int32, n, at),
        logprobs=np.frombuffer(body, np.float32, n, at + 4 * n),
        versions=None if header.policy_versions is None else np.frombuffer(body, np.int32, n, at + 8 * n),
    )


_SIZE = struct.Struct("<Q")
_decode_header: Final = msgspec.json.Decoder(PlainHeader).decode
_decode_group: Final = msgspec.json.Decoder(PlainGroup).decode


class Judge:
    """Judges the parts of one group that were cut out, and reads its prompts: members mostly have the same ones.

    Its methods raise whatever they raise where the long way has to look.
    """

    def __init__(self) -> None:
        self._tools: list[Raw] = []
        self._prompts: dict[bytes, npt.NDArray[np.int32]] = {}

    def group(self, group: PlainGroup) -> int:
        """The parts of the group itself; how many rollouts failed."""
        _parsed(group.metadata.values())
        return len(_EXCEPTIONS.validate_python(_parsed(group.exceptions))) if group.exceptions else 0

    def tools(self, tools: list[Raw]) -> None:
        """Of a history."""
        if tools != self._tools:
            _TOOLS.validate_python(_parsed(tools))
            self._tools = tools

    def calls(self, calls: list[Raw]) -> None:
        """The tool calls of a message."""
        _TOOL_CALLS.validate_python(_parsed(calls))

    def prompt(self, raw: Raw) -> npt.NDArray[np.int32]:
        """Token ids of a prompt: at least one, each of 32 bits."""
        text = bytes(raw)
        if (known := self._prompts.get(text)) is not None:
            return known
        ids = orjson.loads(text)
        if type(ids) is not list or {*map(type, ids)} != {int}:
            raise TypeError
        self._prompts[text] = made = np.frombuffer(array("i", ids), np.int32)
        return made


def _parsed(parts: Iterable[Raw]) -> list[Any]:
    """By the parser of the long way: the decoder looks into nothing that it cuts out."""
    return [orjson.loads(bytes(part)) for part in parts]


_TOOLS = TypeAdapter(list[Tool])
_TOOL_CALLS = TypeAdapter(list[ToolCall])
_EXCEPTIONS = TypeAdapter(list[RolloutException])
