"""The short way reads a group as the long way does, or leaves it to the long way."""

import copy
import struct
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.consumers.worker.admission.admit import admit, limits_of
from headrace.consumers.worker.admission.messages import AdmissionRequest, Admitted, Unreadable
from headrace.consumers.worker.admission.plain_groups import MAX_JSON_BYTES, admit_plain, plain_size
from headrace.schemas.codec import SAFETENSORS_TYPE
from headrace.schemas.training import BatchPolicy, ModelSettings, TrainConfig
from headrace.trainer.groups import TokenizedGroup
from headrace.trainer.plan import BaseSource

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CALLS = [{"id": "1", "type": "function", "function": {"name": "look", "arguments": {"at": 1}}}]


def choice(start: int, stop: int, prompt: list[int], **message: object) -> dict[str, Any]:
    said = {"role": "assistant", "content": "a", "refusal": None, "tool_calls": None, **message}
    return {"finish_reason": "stop", "index": 0, "message": said, "token_span": [start, stop], "prompt_token_ids": prompt}


def raw_group() -> dict[str, Any]:
    """One turn; two turns of which the second continues, with tools; a second history, whose second turn starts again. 15 tokens."""
    user: dict[str, Any] = {"role": "user", "content": "a b"}
    one = {"messages_and_choices": [user, choice(0, 3, [2, 7, 3])], "reward": 1.0, "initial_policy_version": 0, "final_policy_version": 1}
    two = {
        "messages_and_choices": [
            user,
            choice(3, 5, [2, 7, 3], content=None, tool_calls=CALLS),
            {"role": "tool", "content": "c", "tool_call_id": "1"},
            choice(5, 8, [2, 7, 3, 12, 13, 9, 3]),
        ],
        "tools": TOOLS,
        "reward": 0,
        "metrics": {"right": True, "steps": 2},
        "metadata": {"scenario": "s", "n": None},
        "logs": ["l"],
    }
    three = {
        "messages_and_choices": [user, choice(8, 10, [2, 8, 3])],
        "additional_histories": [{"messages_and_choices": [user, choice(10, 12, [2, 3]), choice(12, 15, [4, 3])], "tools": TOOLS}],
        "reward": -0.5,
    }
    return {"trajectories": [one, two, three], "group_id": "g", "job_id": "j", "exceptions": [{"type": "E"}], "metadata": {"a": [1]}}


def packed(raw: object, *, ids: list[int] | None = None, logprobs: list[float] | None = None, versions: list[int] | None = None) -> bytes:
    """The safetensors form, written by hand: the codec would not write what is wrong."""
    arrays = {"token_ids": ("I32", array("i", ids or list(range(10, 25)))), "logprobs": ("F32", array("f", logprobs or [-0.5] * 15))}
    if versions is not None:
        arrays["policy_versions"] = ("I32", array("i", versions))
    text = raw if isinstance(raw, bytes) else orjson.dumps(raw)
    header: dict[str, Any] = {}
    at = 0
    for name, (dtype, values) in arrays.items():
        header[name] = {"dtype": dtype, "shape": [len(values)], "data_offsets": [at, at + 4 * len(values)]}
        at += 4 * len(values)
    # Escaped by hand: bytes that no JSON text may have are to stand in it, too.
    metadata = b'{"__metadata__":{"group":"' + text.replace(b"\\", b"\\\\").replace(b'"', b'\\"') + b'"},'
    head = metadata + orjson.dumps(header)[1:]
    return struct.pack("<Q", len(head)) + head + b"".join(values.tobytes() for _, values in arrays.values())


def request(base: Path, body: bytes | None, *, settings: ModelSettings | None = None, **headers: str) -> AdmissionRequest:
    return AdmissionRequest(
        value=body,
        headers={"content-type": SAFETENSORS_TYPE, "ce_type": "headrace.trajectory-group.v1"} | headers,
        fallback_id="0-7",
        base=BaseSource(path=str(base)),
        settings=settings or ModelSettings(base_model="tiny"),
    )


def content(group: TokenizedGroup) -> list[object]:
    """Everything in a group, comparable."""
    members = [
        [
            [
                (
                    s.token_ids.tolist(),
                    s.trainable.tolist(),
                    s.logprobs.tobytes(),
                    s.policy_versions is not None and s.policy_versions.tolist(),
                )
            ]
            for s in trajectory.sequences
        ]
        + [
            [
                trajectory.reward,
                trajectory.initial_policy_version,
                trajectory.final_policy_version,
                trajectory.truncated,
                trajectory.metrics,
            ]
        ]
        for trajectory in group.trajectories
    ]
    return [group.group_id, group.rejected, group.exceptions, group.sft, members]


def both_ways(asked: AdmissionRequest) -> tuple[Admitted | None, object]:
    assert plain_size(asked)
    assert asked.base is not None
    return admit_plain(asked, limits_of(asked.base)), admit(asked)


@pytest.mark.parametrize("versions", [None, list(range(15))])
def test_a_plain_group_is_the_same_by_the_short_way(tiny_model: Path, versions: list[int] | None) -> None:
    short, long = both_ways(request(tiny_model, packed(raw_group(), versions=versions)))
    assert isinstance(long, Admitted)
    assert short is not None
    assert content(short.group) == content(long.group)
    assert (short.job_id, len(short.group.trajectories), len(short.group.trajectories[2].sequences)) == ("j", 3, 3)


@pytest.mark.parametrize("empty", [0, "", {}, False, None])
def test_exceptions_that_are_no_list_do_not_go_the_short_way_though_they_are_empty(tiny_model: Path, empty: object) -> None:
    short, long = both_ways(request(tiny_model, packed(raw_group() | {"exceptions": empty})))
    assert short is None
    assert isinstance(long, Unreadable)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container inside a value with each of its keys."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(pairs):
        yield value, key
        yield from places(inner)


ODD: list[Any] = [
    None,
    True,
    0,
    1,
    -1,
    2.0,
    2**40,
    31,
    32,
    "5",
    "",
    "assistant",
    [],
    [[]],
    {},
    {"a": "b"},
    [True],
    [2**33],
    [2.0],
    "x" * 300,
]
NAMES = [
    "tool_calls",
    "exceptions",
    "annotations",
    "stop_reason",
    "index",
    "reward",
    "metrics",
    "role",
    "purpose",
    "token_ids",
    "logprobs",
    "start_time",
    "tools",
    "allow_training_without_logprobs",
    "content",
    "name",
    "x_own",
]


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_what_the_short_way_admits_the_long_way_admits_alike(tiny_model: Path, data: st.DataObject) -> None:
    raw = copy.deepcopy(raw_group())
    for _ in range(data.draw(st.integers(1, 2))):
        found = list(places(raw))
        where, key = data.draw(st.sampled_from(found)) if found else (raw, "trajectories")
        action = data.draw(st.sampled_from(["replace", "remove", "add"]))
        if action == "remove":
            del where[key]
        elif action == "add" and isinstance(where, dict):
            where[data.draw(st.sampled_from(NAMES))] = copy.deepcopy(data.draw(st.sampled_from([*ODD, "sft", "rl"])))
        else:
            where[key] = copy.deepcopy(data.draw(st.sampled_from(ODD)))  # the next change may be inside it
    logprobs = data.draw(st.sampled_from([None, *([first, *[-1.0] * 14] for first in (float("nan"), float("inf"), -9999.0, 0.7))]))
    ids = data.draw(st.sampled_from([None, [31] * 15, [32] * 15, [-1] * 15, list(range(14))]))
    versions = data.draw(st.sampled_from([None, [3] * 15, [-1] * 15, [-1, *[3] * 14]]))
    train = data.draw(st.sampled_from([{}, {"allow_training_without_logprobs": True}, {"packed_sequence_length": 9}]))
    batch = data.draw(st.sampled_from([{}, {"zero_variance": "refuse"}, {"incomplete_groups": "complete"}]))
    model = ModelSettings(base_model="tiny", train=TrainConfig.model_validate(train), batch=BatchPolicy.model_validate(batch))
    short, long = both_ways(request(tiny_model, packed(raw, ids=ids, logprobs=logprobs, versions=versions), settings=model))
    if short is not None:
        assert isinstance(long, Admitted), long
        assert (content(short.group), short.job_id) == (content(long.group), long.job_id)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"reward":1.0', b'"reward":1e999'),
        (b'"reward":1.0', b'"reward":NaN'),
        (b'"reward":1.0', b'"reward":1' + b"0" * 400),
        (b'"reward":1.0', b'"reward":01'),
        (b'"metadata":{"a":[1]}', b'"metadata":{"a":[1' + b"0" * 400 + b"]}"),
        (b'"metadata":{"a":[1]}', b'"metadata":{"a":["\\ud800"]}'),
        (b'"metadata":{"a":[1]}', b'"metadata":{"a":[01]}'),
        (b'"metadata":{"a":[1]}', b'"metadata":{"a":["\xff"]}'),
        (b'"content":"a b"', b'"content":"\\udc00"'),
        (b'"content":"a b"', b'"content":"\xff"'),
        (b'"arguments":{"at":1}', b'"arguments":{"at":1e999}'),
        (b'"arguments":{"at":1}', b'"arguments":{"at":"\xed\xa0\x80"}'),
        (b"[2,7,3]", b"[2,7,3.0]"),
        (b"[2,7,3]", b"[2,true,3]"),
        (b"[2,7,3]", b"[2,7,3,]"),
        (b"[2,7,3]", b"[2,7,5000000000]"),
    ],
)
def test_what_the_long_way_refuses_or_takes_for_something_else_does_not_go_the_short_way(tiny_model: Path, old: bytes, new: bytes) -> None:
    text = orjson.dumps(raw_group())
    assert old in text
    short, long = both_ways(request(tiny_model, packed(text.replace(old, new))))
    assert short is None
    assert (isinstance(long, Admitted) and not long.group.rejected) == (
        new in {b"[2,7,3.0]", b"[2,true,3]", b'"metadata":{"a":["\\ud800"]}'}
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"data_offsets":[0,60]', b'"data_offsets":[0,56]'),
        (b'"data_offsets":[0,60]', b'"data_offsets":[0,120]'),
        (b'"shape":[15]', b'"shape":[14]'),
        (b'"shape":[15]', b'"shape":[15,1]'),
        (b'"shape":[15]', b'"shape":[-15]'),
        (b'"dtype":"I32"', b'"dtype":"U32"'),
    ],
)
def test_arrays_that_do_not_fit_their_header_do_not_go_the_short_way(tiny_model: Path, old: bytes, new: bytes) -> None:
    body = packed(raw_group())
    (size,) = struct.unpack_from("<Q", body)
    assert old in body
    header = body[8 : 8 + size].replace(old, new, 1)
    short, long = both_ways(request(tiny_model, struct.pack("<Q", len(header)) + header + body[8 + size :]))
    assert short is None
    assert isinstance(long, Unreadable)


def test_only_small_safetensors_groups_of_a_model_that_trains_go_the_short_way(tiny_model: Path) -> None:
    body = packed(raw_group())
    assert plain_size(request(tiny_model, body))
    assert not plain_size(request(tiny_model, None))
    assert not plain_size(request(tiny_model, b"{}"))
    assert not plain_size(request(tiny_model, body, ce_type="headrace.group-claim.v1"))
    assert not plain_size(request(tiny_model, body, **{"content-type": "application/json"}))
    assert not plain_size(request(tiny_model, packed(raw_group() | {"x": "y" * MAX_JSON_BYTES})))


@pytest.mark.parametrize("unit", [b"[", b"[],", b'{"a":', b"1e9,", b"[[[[", b"9", b'"\\u0041",'])
def test_the_worst_that_fits_into_the_bound_is_left_to_the_long_way(tiny_model: Path, unit: bytes) -> None:
    """Whatever it is made of: what holds the loop is bounded by its size."""
    text = b'{"trajectories":[' + unit * ((MAX_JSON_BYTES - 1000) // (2 * len(unit)))
    header = orjson.dumps({"__metadata__": {"group": text.decode()}})
    asked = request(tiny_model, struct.pack("<Q", len(header)) + header)
    assert plain_size(asked)
    assert asked.base is not None
    limits = limits_of(asked.base)
    assert admit_plain(asked, limits) is None
