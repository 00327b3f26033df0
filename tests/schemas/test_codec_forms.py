"""Both encodings of a group mean the same, and the safetensors form is one that the safetensors library reads and writes."""

import math

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from safetensors.numpy import load, save
from tests.schemas.group_strategies import groups

from headrace.schemas.codec import JSON_TYPE, SAFETENSORS_TYPE, SampledGroup, decode_group, encode_json, encode_safetensors, sampled
from headrace.schemas.trajectory import TrajectoryGroup

pytestmark = pytest.mark.timeout(180)

TURN = {"finish_reason": "stop", "message": {"content": "yes"}}


def group_of(*choices: dict[str, object], **fields: object) -> dict[str, object]:
    return {"trajectories": [{"messages_and_choices": [*choices], "reward": 1.0}], **fields}


def decoded(*choices: dict[str, object], **fields: object) -> SampledGroup:
    return decode_group(orjson.dumps(group_of(*choices, **fields)))


def again(group: SampledGroup) -> list[SampledGroup]:
    """The group after one trip through each form."""
    return [decode_group(encode_json(group)), decode_group(encode_safetensors(group), SAFETENSORS_TYPE)]


@settings(max_examples=150, deadline=None)
@given(groups())
def test_both_forms_decode_to_the_group_that_was_encoded(group: SampledGroup):
    as_json, as_safetensors = again(group)
    assert as_json.group.model_dump(mode="json") == group.group.model_dump(mode="json")
    assert as_json == as_safetensors
    assert as_json.turns == group.turns


@settings(max_examples=60, deadline=None)
@given(groups())
def test_the_safetensors_library_reads_the_same_arrays(group: SampledGroup):
    arrays = load(encode_safetensors(group))
    turns = [turn for turn in group.turns if turn is not None]
    np.testing.assert_array_equal(arrays["token_ids"], [i for turn in turns for i in turn.token_ids])
    np.testing.assert_array_equal(arrays["logprobs"], np.array([p for turn in turns for p in turn.logprobs], np.float32))
    assert arrays["token_ids"].dtype == np.int32
    assert arrays["logprobs"].dtype == np.float32
    if "policy_versions" in arrays:
        expected = [v for turn in turns for v in (turn.policy_versions or [-1] * len(turn))]
        np.testing.assert_array_equal(arrays["policy_versions"], expected)


def test_a_file_that_the_safetensors_library_wrote_is_read():
    spans = group_of({**TURN, "token_span": [0, 2]}, TURN, {**TURN, "token_span": [2, 3]})
    arrays = {
        "token_ids": np.array([5, 6, 7], np.int32),
        "logprobs": np.array([-0.5, math.nan, -1.5], np.float32),
        "policy_versions": np.array([-1, -1, 4], np.int32),
    }
    group = decode_group(save(arrays, metadata={"group": orjson.dumps(spans).decode()}), SAFETENSORS_TYPE)
    first, text_only, last = group.turns
    assert first is not None
    assert last is not None
    assert first.token_ids.tolist() == [5, 6]
    assert math.isnan(first.logprobs[1])
    assert first.policy_versions is None
    assert text_only is None
    assert last.policy_versions is not None
    assert last.policy_versions.tolist() == [4]


def test_arrays_of_a_safetensors_message_are_views_into_it():
    body = encode_safetensors(decoded({**TURN, "token_ids": [1, 2, 3], "token_logprobs": [-1.0, -2.0, -3.0]}))
    turn = decode_group(body, SAFETENSORS_TYPE).turns[0]
    assert turn is not None
    assert turn.token_ids.obj is body
    assert turn.logprobs.obj is body


def test_a_missing_logprob_is_null_in_json_and_nan_in_memory():
    group = decoded({**TURN, "token_ids": [1, 2], "token_logprobs": [None, -1.0]})
    assert group.turns[0] is not None
    assert math.isnan(group.turns[0].logprobs[0])
    choice = orjson.loads(encode_json(group))["trajectories"][0]["messages_and_choices"][0]
    assert choice["token_logprobs"] == [None, -1.0]


def test_hosted_entries_become_arrays_and_what_they_alone_say_is_kept():
    entries = [
        {"token": "token_id:7", "logprob": -0.25, "bytes": [1], "top_logprobs": [{"token": "a", "logprob": -2.0}]},
        {"token": "token_id:8", "logprob": None, "bytes": [], "top_logprobs": [], "extra_logprobs": {"judge": -0.5}},
    ]
    group = decoded({**TURN, "logprobs": {"content": entries, "refusal": None, "custom": 1}})
    turn = group.turns[0]
    assert turn is not None
    assert turn.token_ids.tolist() == [7, 8]
    assert turn.logprobs[0] == -0.25
    kept = next(group.group.choices()).logprobs
    assert kept is not None
    assert kept.model_extra == {
        "custom": 1,
        "entry_extras": {
            "0": {"top_logprobs": [{"token": "a", "logprob": -2.0}]},
            "1": {"extra_logprobs": {"judge": -0.5}},
        },
    }
    assert again(group) == [group, group]


def test_entries_without_ids_stay_as_they_are_and_give_no_tokens():
    logprobs = {"content": [{"token": "a:5", "logprob": -0.25, "bytes": [97], "top_logprobs": []}], "refusal": None}
    group = decoded({**TURN, "logprobs": logprobs})
    assert group.turns == (None,)
    for copy in [group, *again(group)]:
        assert copy.turns == (None,)
        kept = next(copy.group.choices()).logprobs
        assert kept is not None
        assert kept.model_dump(exclude_unset=True) == logprobs


def test_refusal_entries_are_sampled_tokens_too():
    group = decoded({**TURN, "logprobs": {"content": None, "refusal": [{"token": "token_id:3", "logprob": -1.0}]}})
    assert group.turns[0] is not None
    assert group.turns[0].token_ids.tolist() == [3]
    assert again(group) == [group, group]


def test_token_ids_win_over_entries_whose_tokens_are_text():
    group = decoded({**TURN, "token_ids": [9], "logprobs": {"content": [{"token": "hi", "logprob": -1.0}]}})
    assert group.turns[0] is not None
    assert group.turns[0].token_ids.tolist() == [9]
    assert group.turns[0].logprobs.tolist() == [-1.0]
    assert again(group) == [group, group]


def test_a_group_that_a_user_built_is_lifted_without_being_changed():
    group = TrajectoryGroup.model_validate(group_of({**TURN, "token_ids": [1], "token_logprobs": [-1.0]}))
    before = group.model_dump()
    lifted = sampled(group)
    assert group.model_dump() == before
    assert lifted.turns[0] is not None
    assert next(lifted.group.choices()).token_ids is None


@pytest.mark.parametrize(
    "content_type", [JSON_TYPE, "", "application/json; charset=utf-8", "Application/JSON", "application/cloudevents+json"]
)
def test_json_content_types_are_read_as_json(content_type: str):
    assert decode_group(orjson.dumps(group_of(TURN)), content_type).turns == (None,)


def test_a_body_may_be_a_view_at_any_alignment():
    group = decoded({**TURN, "token_ids": [1, 2], "token_logprobs": [-1.0, -2.0]})
    body = encode_safetensors(group)
    for shift in range(4):
        view = memoryview(b"x" * shift + body)[shift:]
        assert decode_group(view, SAFETENSORS_TYPE) == group
