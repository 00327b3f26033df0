"""Captured exchanges to tokens: what `openpipe-art` 0.5.23 records trains as it was sampled, in chains by ids."""

import copy
import math
from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.trainer.conversations import ALLOW

from headrace.schemas.codec import SAFETENSORS_TYPE, SampledGroup, decode_group, encode_json, encode_safetensors, sampled
from headrace.schemas.reasons import CodecError
from headrace.schemas.reasons import RejectionReason as Reason
from headrace.schemas.training import ModelSettings, TrainConfig
from headrace.schemas.trajectory import TrajectoryGroup
from headrace.trainer.groups import TokenizedGroup
from headrace.trainer.plan import BaseSource
from headrace.trainer.tokenize import GroupRefused, GroupTokenizer

RECORDED = {
    named["name"]: named["group"]
    for named in map(orjson.loads, (Path(__file__).parents[1] / "fixtures" / "art-captured-groups.jsonl").read_bytes().splitlines())
}
"""Groups as the client sends them, of engines that answered with fixed ids."""

Trained = tuple[tuple[int, ...], tuple[int, ...]]
"""Ids of a sequence, and the places that train."""


@pytest.fixture(scope="module")
def tokenizer(tiny: BaseSource) -> GroupTokenizer:
    return GroupTokenizer(tiny)


def tokenized(tokenizer: GroupTokenizer, group: SampledGroup, config: TrainConfig | None = None) -> TokenizedGroup:
    return tokenizer.tokenize(group, "g", ModelSettings(base_model="tiny", train=config or TrainConfig(), max_sequence_tokens=400))


def trained(group: TokenizedGroup, member: int = 0) -> list[Trained]:
    sequences = group.trajectories[member].sequences
    return [(tuple(s.token_ids.tolist()), tuple(i for i, train in enumerate(s.trainable.tolist()) if train)) for s in sequences]


def read(raw: Any, **options: Any) -> SampledGroup:
    return decode_group(orjson.dumps(raw), **options)


def call(second: float, prompt: list[int], ids: list[int], model: str = "m", **fields: Any) -> dict[str, Any]:
    """A chat completion's exchange; without `ids`, one of an engine that gave none."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "a"}}
    if ids:
        entries = [{"token": f"token_id:{i}", "logprob": -0.5} for i in ids]
        choice |= {"prompt_token_ids": prompt, "token_ids": ids, "logprobs": {"content": entries}}
    return {
        "start_time": f"2026-01-01T00:00:{second:09.6f}Z",
        "end_time": f"2026-01-01T00:00:{second + 0.5:09.6f}Z",
        "request": {"model": model, "messages": [{"role": "user", "content": "q"}]},
        "response": {"choices": [choice]},
        **fields,
    }


def group_of(*calls: dict[str, Any], dialect: str = "chat_completions", **fields: Any) -> dict[str, Any]:
    """Two members, so that a group stays where one is rejected."""
    good = {"exchanges": {"chat_completions": [call(0, [1], [2])]}, "reward": 1}
    return {"trajectories": [{"exchanges": {dialect: list(calls)}, "reward": 0, **fields}, good]}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tool_loop", [((1, 2, 3, 10, 11, 9, 20, 21, 3, 12, 9), (3, 4, 5, 9, 10))]),
        (
            "stripped_thinking",
            [((1, 2, 3, 30, 31, 29, 13, 9), (3, 4, 5, 6, 7)), ((1, 2, 3, 13, 9, 22, 3, 30, 29, 14, 9), (7, 8, 9, 10))],
        ),
        ("retry_with_the_same_answer", [((1, 2, 3, 13, 9, 22, 3, 14, 9), (3, 4, 7, 8))]),
        ("retry_with_another_answer", [((1, 2, 3, 13, 9), (3, 4)), ((1, 2, 3, 15, 9, 22, 3, 14, 9), (3, 4, 7, 8))]),
        ("streamed_chat", [((1, 2, 3, 13, 16, 9), (3, 4, 5))]),
        ("completions", [((5, 6, 13, 16, 9), (2, 3, 4))]),
        ("responses", [((1, 2, 3, 10, 11, 9, 20, 21, 3, 12, 9), (3, 4, 5, 9, 10))]),
        ("messages", [((1, 2, 3, 10, 11, 9, 20, 21, 3, 12, 9), (3, 4, 5, 9, 10))]),
    ],
)
def test_recorded_calls_train_the_tokens_that_they_sampled_each_once(tokenizer: GroupTokenizer, name: str, expected: list[Trained]) -> None:
    group = read(RECORDED[name])
    made = tokenized(tokenizer, group)
    assert [trained(made, member) for member in range(2)] == [expected, expected]
    assert [trajectory.reward for trajectory in made.trajectories] == [0.0, 1.0]
    for sequence in made.trajectories[0].sequences:  # each call's log-probabilities begin at its first token
        assert all(sequence.trainable[i] != math.isnan(sequence.logprobs[i]) for i in range(len(sequence)))
    for form in (read(orjson.loads(encode_json(group))), decode_group(encode_safetensors(group), SAFETENSORS_TYPE)):
        assert form == group


def test_versions_come_from_the_answer_else_from_its_models_name(tokenizer: GroupTokenizer) -> None:
    of_loop = tokenized(tokenizer, read(RECORDED["tool_loop"])).trajectories[0]
    assert of_loop.sequences[0].policy_versions is not None
    assert of_loop.sequences[0].policy_versions.tolist() == [-1, -1, -1, 3, 3, 3, -1, -1, -1, 4, 4]
    assert (of_loop.initial_policy_version, of_loop.final_policy_version) == (3, 4)
    of_stream = tokenized(tokenizer, read(RECORDED["streamed_chat"])).trajectories[0]
    assert (of_stream.initial_policy_version, of_stream.final_policy_version) == (5, 5)
    spans = call(0, [1], [5, 6, 7])
    spans["response"]["choices"][0]["policy_token_spans"] = [
        {"start_token": 2, "end_token": 3, "policy_version": 8},
        {"start_token": 0, "end_token": 2, "policy_version": 7},
    ]
    of_spans = tokenized(tokenizer, read(group_of(spans))).trajectories[0]
    assert of_spans.sequences[0].policy_versions is not None
    assert of_spans.sequences[0].policy_versions.tolist() == [-1, 7, 7, 8]


def test_a_call_extends_the_longest_chain_whatever_the_order_of_the_list(tokenizer: GroupTokenizer) -> None:
    first, second = call(0, [1, 2], [3, 9]), call(1, [1, 2, 3, 9, 4], [5, 9])
    third, fork = call(2, [1, 2, 3, 9, 4, 5, 9, 6], [7, 9]), call(3, [1, 2, 3, 9, 8], [6, 9])
    sub_agent = call(0.2, [1, 2, 3], [4, 9])
    expected = [
        ((1, 2, 3, 9, 4, 5, 9, 6, 7, 9), (2, 3, 5, 6, 8, 9)),
        ((1, 2, 3, 4, 9), (3, 4)),
        ((1, 2, 3, 9, 8, 6, 9), (5, 6)),
    ]
    for calls in ([first, sub_agent, second, third, fork], [fork, third, sub_agent, second, first]):
        assert trained(tokenized(tokenizer, read(group_of(*calls)))) == expected
    # Clocks that disagree change which sibling continues in the chain, never what extends what.
    late = first | {"start_time": "2026-01-02T00:00:00", "end_time": None}
    assert ((1, 2, 3, 9, 4, 5, 9, 6, 7, 9), (2, 3, 5, 6, 8, 9)) in trained(tokenized(tokenizer, read(group_of(late, second, third))))


def test_several_choices_of_one_answer_are_branches(tokenizer: GroupTokenizer) -> None:
    two = call(0, [1, 2], [3, 9])
    two["response"]["choices"].append({**two["response"]["choices"][0], "index": 1, "token_ids": [4], "logprobs": {"content": []}})
    two["response"]["choices"][1]["compact_logprobs"] = [-0.25]
    on = call(1, [1, 2, 4, 5], [6])
    assert trained(tokenized(tokenizer, read(group_of(two, on)))) == [((1, 2, 3, 9), (2, 3)), ((1, 2, 4, 5, 6), (2, 4))]


def test_calls_to_other_models_do_not_train(tokenizer: GroupTokenizer) -> None:
    own, judge = call(0, [1, 2], [3, 9], "org/agent@4"), call(1, [1, 5], [6, 9], "org/judge")
    assert trained(tokenized(tokenizer, read(group_of(own, judge), own=lambda name: name == "org/agent"))) == [((1, 2, 3, 9), (2, 3))]
    hosted_judge = call(1, [], [], "hosted-judge")
    assert trained(tokenized(tokenizer, read(group_of(own, hosted_judge)))) == [((1, 2, 3, 9), (2, 3))]
    made = tokenized(tokenizer, read(group_of(own, judge)))
    ((index, reason, detail),) = [(rejected.index, rejected.reason, rejected.detail) for rejected in made.rejected]
    assert (index, reason) == (0, Reason.MISSING_LOGPROBS)
    assert "org/agent, org/judge" in detail


def test_a_call_without_ids_trains_only_where_text_trains(tokenizer: GroupTokenizer) -> None:
    with pytest.raises(GroupRefused) as refused:
        tokenized(tokenizer, read(RECORDED["without_ids"]))
    assert "exchanges.chat_completions[0].response has no token ids" in str(refused.value)
    one_of_two = tokenized(tokenizer, read(group_of(call(0, [1, 2], [3, 9]), call(1, [], []))))
    assert [(rejected.index, rejected.reason) for rejected in one_of_two.rejected] == [(0, Reason.MISSING_LOGPROBS)]
    (sequence,) = tokenized(tokenizer, read(RECORDED["without_ids"]), ALLOW).trajectories[0].sequences
    text = bytes(
        token for token, train in zip(sequence.token_ids.tolist(), sequence.trainable.tolist(), strict=True) if train and token < 256
    )
    assert text == b"ab"  # both turns of the one conversation
    assert all(math.isnan(logprob) for logprob in sequence.logprobs)


def test_contradictions_are_named_by_their_place() -> None:
    short = call(0, [1], [2, 3])
    short["response"]["choices"][0] |= {"logprobs": None, "compact_logprobs": [-0.5]}
    for raw, place in (
        (group_of(short), "trajectories[0].exchanges.chat_completions[0].response"),
        (group_of(call(0, [1], [2], request={"model": "m"})), "trajectories[0].exchanges.chat_completions[0].request.messages"),
        (group_of(call(0, [1], [2], start_time="yesterday")), "trajectories[0].exchanges.chat_completions[0].start_time"),
        (group_of(call(0, [1], [2]), messages_and_choices=[{"role": "user", "content": "q"}]), "trajectories[0].exchanges"),
        ({**group_of(call(0, [1], [2])), "purpose": "sft"}, "trajectories[0].exchanges"),
    ):
        with pytest.raises(CodecError) as error:
            read(raw)
        assert error.value.path == place


def test_a_group_that_a_user_builds_may_hold_exchanges_too(tokenizer: GroupTokenizer) -> None:
    built = TrajectoryGroup.model_validate(copy.deepcopy(RECORDED["tool_loop"]))
    assert built.trajectories[0].exchanges
    assert sampled(built) == read(RECORDED["tool_loop"])
    assert sampled(built).group.trajectories[0].metadata == {"task": {"id": 7, "tags": ["a", None]}}
    assert trained(tokenized(tokenizer, sampled(built))) == trained(tokenized(tokenizer, read(RECORDED["tool_loop"])))


def test_no_exchanges_at_all_leave_the_histories_alone() -> None:
    empty = {"chat_completions": [], "completions": [], "responses": [], "messages": []}
    history = [{"role": "user", "content": "q"}]
    group = read({"trajectories": [{"exchanges": empty, "messages_and_choices": history}, {"exchanges": None, "reward": 1}]}).group
    assert [len(trajectory.messages_and_choices) for trajectory in group.trajectories] == [1, 0]
