"""What can't be read fails with its own reason and the path of the field; the codec never fails in another way."""

import math
import struct
from typing import Any

import orjson
import pytest

from headrace.producers.examples import decode_example
from headrace.schemas.chat import Choice, ChoiceMessage
from headrace.schemas.codec import JSON_TYPE, SAFETENSORS_TYPE, SampledGroup, decode_group, encode_json, encode_safetensors, sampled
from headrace.schemas.reasons import CodecError
from headrace.schemas.reasons import DeadLetterReason as Reason
from headrace.schemas.trajectory import Trajectory, TrajectoryGroup
from headrace.schemas.turns import SampledTokens

CHOICE = "trajectories[0].messages_and_choices[0]"


def group_of(**choice: Any) -> dict[str, Any]:
    return {"trajectories": [{"messages_and_choices": [{"finish_reason": "stop", "message": {"content": "a"}, **choice}], "reward": 1.0}]}


def refused(body: bytes | dict[str, Any], content_type: str = JSON_TYPE) -> tuple[Reason, str]:
    with pytest.raises(CodecError) as caught:
        decode_group(body if isinstance(body, bytes) else orjson.dumps(body), content_type)
    assert caught.value.detail
    assert len(str(caught.value)) < 1000, "an error becomes a Kafka header: it must stay small"
    str(caught.value).encode()
    return caught.value.reason, caught.value.path


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"\x00\x01", b'"\\ud800', b"[" * 100_000, b'{"a":1}{'])
def test_a_body_that_is_not_json_is_not_json(body: bytes):
    assert refused(body) == (Reason.NOT_JSON, "")


@pytest.mark.parametrize("body", [b"1", b"null", b'"text"', b"[]", b"[1]", b'"\\ud800"'])
def test_json_that_is_no_object_has_the_wrong_type(body: bytes):
    assert refused(body)[0] is Reason.INVALID_SCHEMA


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 400])
@pytest.mark.parametrize(
    ("template", "path"),
    [
        ('{"trajectories": [{"reward": 1}, {"reward": %s}]}', "trajectories[1].reward"),
        ('{"trajectories": [], "metadata": {"a": [1, {"b": %s}]}}', "metadata.a[1].b"),
        ('{"trajectories": [], "x": %s}', "x"),
        (
            '{"trajectories": [{"messages_and_choices": [{"finish_reason": "stop", "token_logprobs": [%s]}]}]}',
            f"{CHOICE}.token_logprobs[0]",
        ),
    ],
)
def test_nan_and_infinity_are_refused_with_the_path_of_the_field(number: str, template: str, path: str):
    assert refused((template % number).encode()) == (Reason.NOT_FINITE, path)


@pytest.mark.parametrize(
    ("group", "path"),
    [
        ({}, "trajectories"),
        ({"trajectories": {}}, "trajectories"),
        ({"trajectories": [1]}, "trajectories[0]"),
        ({"trajectories": [{"reward": "much"}]}, "trajectories[0].reward"),
        ({"trajectories": [{"reward": None}]}, "trajectories[0].reward"),
        ({"trajectories": [{"initial_policy_version": -1}]}, "trajectories[0].initial_policy_version"),
        ({"trajectories": [{"final_policy_version": "new"}]}, "trajectories[0].final_policy_version"),
        ({"trajectories": [{"metrics": {"float": "x"}}]}, "trajectories[0].metrics.float"),
        ({"trajectories": [{"metadata": [1]}]}, "trajectories[0].metadata"),
        ({"trajectories": [{"messages_and_choices": [{"role": "king"}]}]}, f"{CHOICE}.role"),
        ({"trajectories": [{"messages_and_choices": [{"role": "user", "content": 5}]}]}, f"{CHOICE}.content"),
        ({"trajectories": [{"messages_and_choices": [[]]}]}, CHOICE),
        ({"trajectories": [{"messages_and_choices": {"0": {}}}]}, "trajectories[0].messages_and_choices"),
        ({"trajectories": [{"additional_histories": [{}]}]}, "trajectories[0].additional_histories[0].messages_and_choices"),
        ({"trajectories": [{"start_time": "yesterday"}]}, "trajectories[0].start_time"),
        ({"trajectories": [{"logs": ["a", 1]}]}, "trajectories[0].logs[1]"),
        ({"trajectories": [], "group_id": ""}, "group_id"),
        ({"trajectories": [], "group_id": "x" * 300}, "group_id"),
        (group_of(finish_reason="tired"), f"{CHOICE}.finish_reason"),
        (group_of(message="a"), f"{CHOICE}.message"),
        (group_of(message={"role": "user"}), f"{CHOICE}.message.role"),
        (group_of(message={"content": [1]}), f"{CHOICE}.message.content"),
        (group_of(logprobs=[]), f"{CHOICE}.logprobs"),
        (group_of(logprobs={"content": [5]}), f"{CHOICE}.logprobs.content[0]"),
        (group_of(logprobs={"content": [{"token": 5}]}), f"{CHOICE}.logprobs.content[0].token"),
        (group_of(logprobs={"content": [{"token": "token_id:1", "logprob": "low"}]}), f"{CHOICE}.logprobs.content[0].logprob"),
        (group_of(logprobs={"content": [{"token": "token_id:99999999999"}]}), f"{CHOICE}.logprobs.content[0].token"),
        (group_of(logprobs={"content": [{"token": "token_id:" + "9" * 5000}]}), f"{CHOICE}.logprobs.content[0].token"),
        (group_of(logprobs={"content": [{"token": "token_id:1"}], "refusal": [{"token": "token_id:2"}]}), f"{CHOICE}.logprobs"),
        (group_of(logprobs={"content": [{"token": "token_id:1"}]}, token_logprobs=[-1.0]), f"{CHOICE}.token_logprobs"),
        (group_of(logprobs={"content": [{"token": "token_id:1"}]}, token_ids=[2]), f"{CHOICE}.logprobs.content[0].token"),
        (group_of(token_ids={"a": 1}), f"{CHOICE}.token_ids"),
        (group_of(token_ids=[1, "2"]), f"{CHOICE}.token_ids[1]"),
        (group_of(token_ids=[5, 1.5]), f"{CHOICE}.token_ids[1]"),
        (group_of(token_ids=[5, None]), f"{CHOICE}.token_ids[1]"),
        (group_of(token_ids=[5, True]), f"{CHOICE}.token_ids[1]"),
        (group_of(token_ids=[5, -2]), f"{CHOICE}.token_ids[1]"),
        (group_of(token_ids=[2**31]), f"{CHOICE}.token_ids[0]"),
        (group_of(token_ids=[5], token_logprobs=["-1"]), f"{CHOICE}.token_logprobs[0]"),
        (group_of(token_ids=[5], token_logprobs=[False]), f"{CHOICE}.token_logprobs[0]"),
        (group_of(token_ids=[5, 5], token_logprobs=[None, True]), f"{CHOICE}.token_logprobs[1]"),
        (group_of(token_ids=[5], token_logprobs=[[[[]]]]), f"{CHOICE}.token_logprobs[0]"),
        (group_of(token_ids=[5, 6], policy_versions=[0, -1]), f"{CHOICE}.policy_versions[1]"),
        (group_of(token_ids=[5], policy_versions=["a"]), f"{CHOICE}.policy_versions[0]"),
        (group_of(prompt_token_ids=["a"]), f"{CHOICE}.prompt_token_ids[0]"),
    ],
)
def test_a_field_of_the_wrong_type_is_named(group: dict[str, Any], path: str):
    assert refused(group) == (Reason.INVALID_SCHEMA, path)


def test_a_value_nested_too_deep_to_print_is_refused_all_the_same():
    deep = b"[" * 900 + b"]" * 900
    body = orjson.dumps(group_of(token_ids=["DEEP"])).replace(b'"DEEP"', deep)
    assert refused(body) == (Reason.INVALID_SCHEMA, f"{CHOICE}.token_ids[0]")


def test_a_logprob_beyond_float32_is_not_finite():
    assert refused(group_of(token_ids=[5], token_logprobs=[-1e39])) == (Reason.NOT_FINITE, f"{CHOICE}.token_logprobs[0]")
    assert refused(group_of(token_ids=[5, 6], token_logprobs=[None, -1e39])) == (Reason.NOT_FINITE, f"{CHOICE}.token_logprobs[1]")


@pytest.mark.parametrize(
    ("choice", "path"),
    [
        ({"token_ids": [1, 2], "token_logprobs": [-1.0]}, CHOICE),
        ({"token_ids": [], "token_logprobs": [-1.0]}, CHOICE),
        ({"token_ids": [1, 2], "policy_versions": [0]}, CHOICE),
        ({"token_ids": [1, 2], "logprobs": {"content": [{"token": "a", "logprob": -1.0}]}}, CHOICE),
        ({"token_logprobs": [-1.0]}, f"{CHOICE}.token_logprobs"),
        ({"policy_versions": [1]}, f"{CHOICE}.policy_versions"),
    ],
)
def test_arrays_of_another_length_than_the_tokens_are_a_length_mismatch(choice: dict[str, Any], path: str):
    assert refused(group_of(**choice)) == (Reason.LENGTH_MISMATCH, path)


def test_a_span_outside_the_safetensors_form_is_refused():
    assert refused(group_of(token_span=[0, 0])) == (Reason.SPAN_MISMATCH, f"{CHOICE}.token_span")


def test_another_content_type_is_an_unknown_type():
    assert refused(b"", "text/plain") == (Reason.UNKNOWN_TYPE, "content-type")


def safetensors(
    group: Any = None,
    ids: tuple[int, ...] = (1, 2),
    logprobs: tuple[float, ...] = (-1.0, -2.0),
    versions: tuple[int, ...] | None = None,
    **header: Any,
) -> bytes:
    """A safetensors message by hand; `header` replaces what would be right."""
    data = struct.pack(f"<{len(ids)}i", *ids) + struct.pack(f"<{len(logprobs)}f", *logprobs)
    fields: dict[str, Any] = {
        "__metadata__": {"group": orjson.dumps(group_of(token_span=[0, 2]) if group is None else group).decode()},
        "token_ids": {"dtype": "I32", "shape": [len(ids)], "data_offsets": [0, 4 * len(ids)]},
        "logprobs": {"dtype": "F32", "shape": [len(logprobs)], "data_offsets": [4 * len(ids), len(data)]},
    }
    if versions is not None:
        fields["policy_versions"] = {
            "dtype": "I32",
            "shape": [len(versions)],
            "data_offsets": [len(data), len(data) + 4 * len(versions)],
        }
        data += struct.pack(f"<{len(versions)}i", *versions)
    text = orjson.dumps({name: value for name, value in {**fields, **header}.items() if value is not None})
    return struct.pack("<Q", len(text)) + text + data


def test_the_handmade_message_is_right_before_it_is_broken():
    turn = decode_group(safetensors(versions=(3, 4)), SAFETENSORS_TYPE).turns[0]
    assert turn == SampledTokens.of([1, 2], [-1.0, -2.0], [3, 4])


@pytest.mark.parametrize(
    ("body", "reason", "path"),
    [
        (b"", Reason.NOT_JSON, ""),
        (b"1234567", Reason.NOT_JSON, ""),
        (struct.pack("<Q", 2**63), Reason.NOT_JSON, ""),
        (struct.pack("<Q", 50) + b"{}", Reason.NOT_JSON, ""),
        (struct.pack("<Q", 2) + b"[]", Reason.NOT_JSON, ""),
        (struct.pack("<Q", 2) + b"{}", Reason.NOT_JSON, "__metadata__.group"),
        (safetensors(__metadata__={"group": {}}), Reason.NOT_JSON, "__metadata__.group"),
        (safetensors(__metadata__={"group": "{"}), Reason.NOT_JSON, ""),
        (safetensors(__metadata__={"group": '{"trajectories": NaN}'}), Reason.NOT_FINITE, "trajectories"),
        (safetensors([]), Reason.SPAN_MISMATCH, "token_ids"),
        (safetensors(token_ids=None), Reason.SPAN_MISMATCH, "token_ids"),
        (safetensors(token_ids={"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}), Reason.SPAN_MISMATCH, "token_ids"),
        (safetensors(token_ids={"dtype": "I32", "shape": [1, 2], "data_offsets": [0, 8]}), Reason.SPAN_MISMATCH, "token_ids"),
        (safetensors(token_ids={"dtype": "I32", "shape": [2], "data_offsets": [8, 0]}), Reason.SPAN_MISMATCH, "token_ids"),
        (safetensors(token_ids={"dtype": "I32", "shape": [-2], "data_offsets": [8, 0]}), Reason.SPAN_MISMATCH, "token_ids"),
        (safetensors(token_ids={"dtype": "I32", "shape": [500], "data_offsets": [0, 2000]}), Reason.SPAN_MISMATCH, "token_ids"),
        (safetensors(logprobs=(-1.0,)), Reason.LENGTH_MISMATCH, "logprobs"),
        (safetensors(versions=(1,)), Reason.LENGTH_MISMATCH, "policy_versions"),
        (safetensors(ids=(1, -2)), Reason.INVALID_SCHEMA, "token_ids[1]"),
        (safetensors(logprobs=(-1.0, -math.inf)), Reason.NOT_FINITE, "logprobs[1]"),
        (safetensors(logprobs=(math.inf, -1.0)), Reason.NOT_FINITE, "logprobs[0]"),
        (safetensors(versions=(-1, -2)), Reason.INVALID_SCHEMA, "policy_versions[1]"),
        (safetensors(versions=(-2, -2)), Reason.INVALID_SCHEMA, "policy_versions[0]"),
        (safetensors(group_of(token_span=[1, 2])), Reason.SPAN_MISMATCH, f"{CHOICE}.token_span"),
        (safetensors(group_of(token_span=[0, 3])), Reason.SPAN_MISMATCH, f"{CHOICE}.token_span"),
        (safetensors(group_of(token_span=[0, -1])), Reason.SPAN_MISMATCH, f"{CHOICE}.token_span"),
        (safetensors(group_of(token_span={"start": 0})), Reason.SPAN_MISMATCH, f"{CHOICE}.token_span"),
        (safetensors(group_of(token_span=[0, 1])), Reason.SPAN_MISMATCH, "token_ids"),
        (safetensors(group_of()), Reason.SPAN_MISMATCH, "token_ids"),
        (safetensors(group_of(token_span=[0, 2], token_ids=[1, 2])), Reason.INVALID_SCHEMA, f"{CHOICE}.token_ids"),
        (safetensors(group_of(token_span=[0, 2], logprobs={"content": [{"token": "a"}]})), Reason.INVALID_SCHEMA, f"{CHOICE}.logprobs"),
        (safetensors() + b"tail", Reason.SPAN_MISMATCH, ""),
        (safetensors()[:-1], Reason.SPAN_MISMATCH, "logprobs"),
    ],
)
def test_a_broken_safetensors_message_is_refused_where_it_is_broken(body: bytes, reason: Reason, path: str):
    assert refused(body, SAFETENSORS_TYPE) == (reason, path)


def built(**fields: Any) -> TrajectoryGroup:
    return TrajectoryGroup(trajectories=[Trajectory(reward=1.0)], **fields)


@pytest.mark.parametrize(
    ("metadata", "reason", "path"),
    [
        ({"a": {"b": math.nan}}, Reason.NOT_FINITE, "metadata.a.b"),
        ({"a": [0, math.inf]}, Reason.NOT_FINITE, "metadata.a[1]"),
        ({"a": "\ud800"}, Reason.INVALID_SCHEMA, "metadata.a"),
        ({"a": {"\ud800": 1}}, Reason.INVALID_SCHEMA, ""),
        ({"a": 2**64}, Reason.INVALID_SCHEMA, "metadata.a"),
        ({"a": -(10**5000)}, Reason.INVALID_SCHEMA, "metadata.a"),
        ({"a": object()}, Reason.INVALID_SCHEMA, ""),
    ],
)
def test_what_a_user_built_and_json_can_not_hold_is_refused_by_both_encoders(metadata: dict[str, Any], reason: Reason, path: str):
    for encode in (encode_json, encode_safetensors):
        with pytest.raises(CodecError) as caught:
            encode(SampledGroup(group=built(metadata=metadata), turns=()))
        assert (caught.value.reason, caught.value.path) == (reason, path)
        str(caught.value).encode()


def test_a_value_nested_deeper_than_json_writers_go_is_refused_by_both_encoders():
    deep: list[Any] = []
    for _ in range(300):
        deep = [deep]
    for encode in (encode_json, encode_safetensors):
        with pytest.raises(CodecError):
            encode(SampledGroup(group=built(metadata={"a": deep}), turns=()))


def test_a_users_group_with_nan_in_its_tokens_is_refused():
    choice = Choice(finish_reason="stop", message=ChoiceMessage(content="a"), token_ids=[1], token_logprobs=[-1.0])
    assert choice.token_logprobs is not None
    choice.token_logprobs[0] = math.nan
    with pytest.raises(CodecError, match="token_logprobs"):
        sampled(TrajectoryGroup(trajectories=[Trajectory(messages_and_choices=[choice])]))


def test_tokens_in_the_json_and_beside_it_are_refused_by_both_encoders():
    choice = Choice(finish_reason="stop", message=ChoiceMessage(content="a"), token_ids=[1])
    group = SampledGroup(group=TrajectoryGroup(trajectories=[Trajectory(messages_and_choices=[choice])]), turns=(SampledTokens.of([1]),))
    for encode in (encode_json, encode_safetensors):
        with pytest.raises(CodecError, match="token_ids"):
            encode(group)


def test_a_choice_that_would_be_read_as_a_message_is_refused_by_both_encoders():
    choice = Choice(finish_reason="stop", message=ChoiceMessage(content="a"), role="assistant")  # type: ignore[call-arg]  # an unknown field
    group = SampledGroup(group=TrajectoryGroup(trajectories=[Trajectory(messages_and_choices=[choice])]), turns=(None,))
    for encode in (encode_json, encode_safetensors):
        with pytest.raises(CodecError, match="role"):
            encode(group)


LONE = [b"\\ud800", b"\\uDFFF x", b"\\\\\\udc00", b"\\ud83d\\ud83d\\ude00", b"\xed\xa0\x80"]
WHOLE = [b"\\ud83d\\ude00", b"\\\\ud800", "\U0001f600".encode()]


def in_text(text: bytes, place: str) -> bytes:
    said = orjson.dumps({"trajectories": [{"reward": 1}, {"messages_and_choices": [], "reward": 0, place: "@"}, {"reward": 2}]})
    item = {"role": "user", "content": "a", "more": {"b": ["@"]}}
    said = (
        said if place != "message" else said.replace(b'"messages_and_choices":[]', b'"messages_and_choices":[' + orjson.dumps(item) + b"]")
    )
    return said.replace(b"@", text)


@pytest.mark.parametrize("text", LONE)
def test_a_lone_surrogate_in_a_conversation_marks_its_trajectory_and_no_other(text: bytes):
    group = decode_group(in_text(text, "message"))
    for read in (group, decode_group(encode_json(group)), decode_group(encode_safetensors(group), SAFETENSORS_TYPE)):
        faults = [(trajectory.model_extra or {}).get("unreadable") for trajectory in read.group.trajectories]
        assert faults[0] is faults[2] is None
        assert faults[1].startswith("messages_and_choices[0].more.b[0]: the text holds a lone surrogate")


@pytest.mark.parametrize("text", LONE)
def test_a_lone_surrogate_elsewhere_is_replaced(text: bytes):
    group = decode_group(in_text(text, "note"))
    extra = group.group.trajectories[1].model_extra or {}
    assert "unreadable" not in extra
    assert "\ufffd" in extra["note"]
    assert decode_group(encode_json(group)) == group


@pytest.mark.parametrize("text", WHOLE)
def test_whole_characters_and_texts_that_only_look_like_escapes_stay(text: bytes):
    group = decode_group(in_text(text, "message"))
    assert (group.group.trajectories[1].model_extra or {}).keys() == {"message"}
    assert group.group.trajectories[1].messages_and_choices[0].model_extra["more"]["b"] == [orjson.loads(b'"' + text + b'"')]  # type: ignore[index]


def test_a_lone_surrogate_in_a_line_that_is_no_group_is_named():
    with pytest.raises(CodecError) as caught:
        decode_example(b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "\\ud800"}]}')
    assert (caught.value.path, "lone surrogate" in caught.value.detail) == ("messages[1].content", True)


@pytest.mark.parametrize(
    ("choice", "path", "said"),
    [
        ({"token_ids": ["1"]}, "token_ids[0]", "the text '1' is not an integer"),
        ({"token_ids": [1], "token_logprobs": ["-1"]}, "token_logprobs[0]", "the text '-1' is not a number"),
        (
            {"message": {"tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}},
            "message.tool_calls[0].function.arguments",
            "not list",
        ),
        ({"finish_reason": "weird"}, "finish_reason", "'abort'"),
    ],
)
def test_what_is_of_another_type_is_named_with_what_it_is(choice: dict[str, Any], path: str, said: str):
    with pytest.raises(CodecError) as caught:
        decode_group(orjson.dumps(group_of(**choice)))
    assert caught.value.path == f"{CHOICE}.{path}"
    assert said in caught.value.detail


def test_nan_as_a_reward_is_told_from_nan_as_a_log_probability():
    with pytest.raises(CodecError, match="no reward"):
        decode_group(b'{"trajectories": [{"reward": NaN}]}')
    with pytest.raises(CodecError, match="write null for a missing log-probability"):
        decode_group(b'{"trajectories": [], "token_logprobs": [NaN]}')


@pytest.mark.parametrize("reason", ["abort", None])
def test_a_turn_that_was_cut_off_is_a_choice(reason: str | None):
    group = decode_group(orjson.dumps(group_of(finish_reason=reason, token_ids=[1], token_logprobs=[-1])))
    for read in (group, decode_group(encode_json(group)), decode_group(encode_safetensors(group), SAFETENSORS_TYPE)):
        (choice,) = read.group.choices()
        assert choice.finish_reason == reason


def test_an_empty_list_of_log_probabilities_is_a_turn_of_no_tokens_in_both_forms():
    group = decode_group(orjson.dumps(group_of(logprobs={"content": [], "refusal": None})))
    for read in (group, decode_group(encode_json(group)), decode_group(encode_safetensors(group), SAFETENSORS_TYPE)):
        (turn,) = read.turns
        assert turn is not None
        assert len(turn) == 0
    assert decode_group(orjson.dumps(group_of(logprobs={"content": None}))).turns == (None,)
