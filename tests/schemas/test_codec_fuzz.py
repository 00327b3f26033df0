"""Whatever the bytes are, decoding returns a group that can be encoded again, or raises CodecError: nothing else."""

import contextlib
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schemas.group_strategies import groups, json_values

from headrace.schemas.codec import JSON_TYPE, SAFETENSORS_TYPE, SampledGroup, decode_group, encode_json, encode_safetensors
from headrace.schemas.reasons import CodecError

pytestmark = pytest.mark.timeout(180)

content_types = st.sampled_from([JSON_TYPE, SAFETENSORS_TYPE])
WORDS = ["trajectories", "messages_and_choices", "additional_histories", "finish_reason", "role", "message", "logprobs", "content", "token",
         "token_ids", "token_logprobs", "policy_versions", "token_span", "refusal", "reward", "metadata", "tools"]  # fmt: skip
# JSON in the shape of nothing in particular, under the names that the codec looks at.
near_groups = st.recursive(
    json_values | st.sampled_from(["token_id:5", "stop", "user", "token_id:-1", 2**40, -1]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
    max_leaves=20,
)


def decode_or_refuse(body: bytes, content_type: str) -> None:
    with contextlib.suppress(CodecError):
        group = decode_group(body, content_type)
        assert decode_group(encode_json(group)) == decode_group(encode_safetensors(group), SAFETENSORS_TYPE)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), content_types)
def test_random_bytes(body: bytes, content_type: str):
    decode_or_refuse(body, content_type)


@settings(max_examples=300, deadline=None)
@given(near_groups, st.booleans())
def test_json_of_random_shape(value: Any, wrap: bool):
    group = {"trajectories": [{"messages_and_choices": [{"finish_reason": "stop", "message": {}, "logprobs": value, **_fields(value)}]}]}
    decode_or_refuse(orjson.dumps(group if wrap else value), JSON_TYPE)


@settings(max_examples=300, deadline=None)
@given(near_groups, near_groups, st.binary(max_size=24))
def test_safetensors_with_a_random_header(metadata: Any, tensor: Any, data: bytes):
    header = {"__metadata__": {"group": orjson.dumps(metadata).decode()}, "token_ids": tensor, "logprobs": tensor}
    text = orjson.dumps(header)
    decode_or_refuse(len(text).to_bytes(8, "little") + text + data, SAFETENSORS_TYPE)


@settings(max_examples=150, deadline=None)
@given(groups(), st.booleans(), st.data())
def test_valid_messages_with_bytes_changed_cut_or_doubled(group: SampledGroup, flat: bool, data: st.DataObject):
    body = bytearray(encode_safetensors(group) if flat else encode_json(group))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body) - 1)) if body else 0
        match data.draw(st.sampled_from(["change", "cut", "double", "drop"])):
            case "change":
                body[at : at + 1] = data.draw(st.binary(min_size=1, max_size=1))
            case "cut":
                del body[at:]
            case "double":
                body[at:at] = body[at : at + 20]
            case _:
                del body[at : at + 4]
    decode_or_refuse(bytes(body), SAFETENSORS_TYPE if flat else JSON_TYPE)


def _fields(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
