"""From groups to tokens: exact tokens, exact masks, exact refusals."""

import math
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from tests.trainer.conversations import ALLOW, USER, choice, only, refusal, runs, text_of, tokenize
from tests.trainer.tiny import END, START, TEMPLATE, VOCABULARY

from headrace.schemas.chat import Tool
from headrace.schemas.codec import decode_group
from headrace.schemas.reasons import RejectionReason as Reason
from headrace.schemas.training import ModelSettings, TrainConfig
from headrace.trainer.chat_text import ChatText, canonical_tool
from headrace.trainer.plan import BaseSource, BaseUnusableError
from headrace.trainer.tokenize import GroupTokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny: BaseSource) -> GroupTokenizer:
    return GroupTokenizer(tiny)


def test_published_tokenization_of_one_turn(tokenizer: GroupTokenizer):
    sequence = only(tokenize(tokenizer, [USER, choice("ab")]))
    expected = [START, *b"user\nq", END, 10, START, *b"assistant\n", 97, 98, END]
    assert sequence.token_ids.tolist() == expected
    assert len(sequence) == 23
    assert runs(sequence) == [(False, 20), (True, 3)]
    assert sequence.logprobs[20:].tolist() == pytest.approx([-0.5, -0.51, -0.52])
    assert all(math.isnan(x) for x in sequence.logprobs[:20])
    assert sequence.policy_versions is None


def test_published_tokenization_of_two_turns_with_one_end_mark_each(tokenizer: GroupTokenizer):
    sequence = only(tokenize(tokenizer, [USER, choice("ab"), USER, choice("c")]))
    assert len(sequence) == 46
    assert runs(sequence) == [(False, 20), (True, 3), (False, 21), (True, 2)]
    assert sequence.token_ids.tolist().count(END) == 4


def test_a_turn_that_was_cut_gets_the_templates_end_mark_untrained(tokenizer: GroupTokenizer):
    cut = choice("ab", list(b"ab"), finish_reason="length")
    sequence = only(tokenize(tokenizer, [USER, cut, USER, choice("c")]))
    assert runs(sequence) == [(False, 20), (True, 2), (False, 22), (True, 2)]
    assert sequence.token_ids[22] == END
    assert only(tokenize(tokenizer, [USER, cut])).token_ids[-1] == ord("b")


def test_the_text_of_a_choice_does_not_matter_for_its_own_tokens(tokenizer: GroupTokenizer):
    sequence = only(tokenize(tokenizer, [USER, choice("DIFFERENT", [*b"ab", END])]))
    assert sequence.token_ids[20:].tolist() == [97, 98, END]


def test_a_history_that_reads_otherwise_than_it_was_sampled_goes_on_in_a_new_sequence(tokenizer: GroupTokenizer):
    """The next prompt shows other tokens than were drawn: no silent misalignment, and each drawn token is trained once."""
    group = tokenize(tokenizer, [USER, choice("xy", [*b"ab", END]), USER, choice("c")])
    first, second = group.trajectories[0].sequences
    assert first.token_ids[-3:].tolist() == [97, 98, END]
    assert runs(second) == [(False, 44), (True, 2)]
    assert bytes(second.token_ids[20:22].tolist()) == b"xy"
    assert group.trainable_tokens == 5


def test_given_prompt_ids_are_the_context_and_turns_join_while_they_extend(tokenizer: GroupTokenizer):
    first = choice("", [5, 6], prompt_token_ids=[1, 2])
    second = choice("", [9], prompt_token_ids=[1, 2, 5, 6, 7, 8])
    third = choice("", [3], prompt_token_ids=[1, 2, 5])
    group = tokenize(tokenizer, [USER, first, USER, second, USER, third])
    joined, split = group.trajectories[0].sequences
    assert joined.token_ids.tolist() == [1, 2, 5, 6, 7, 8, 9]
    assert joined.trainable.tolist() == [False, False, True, True, False, False, True]
    assert split.token_ids.tolist() == [1, 2, 5, 3]
    assert split.trainable.tolist() == [False, False, False, True]


def test_versions_per_token_are_kept(tokenizer: GroupTokenizer):
    first = choice("", [5, 6], prompt_token_ids=[1], policy_versions=[3, 4])
    second = choice("", [9], prompt_token_ids=[1, 5, 6])
    sequence = only(tokenize(tokenizer, [first, second]))
    assert sequence.policy_versions is not None
    assert sequence.policy_versions.tolist() == [-1, 3, 4, -1]


def test_a_first_token_without_any_prompt_is_not_trained(tokenizer: GroupTokenizer):
    sequence = only(tokenize(tokenizer, [choice("", [5, 6], prompt_token_ids=[])]))
    assert sequence.trainable.tolist() == [False, True]


def test_single_missing_log_probabilities_stay_missing(tokenizer: GroupTokenizer):
    sequence = only(tokenize(tokenizer, [USER, choice("a", token_logprobs=[None, -1.0])]))
    assert math.isnan(sequence.logprobs[20])
    assert sequence.trainable[20]


def test_every_history_of_a_trajectory_is_trained(tokenizer: GroupTokenizer):
    extra = {"messages_and_choices": [USER, choice("other")]}
    context_only = {"messages_and_choices": [USER]}
    group = tokenize(tokenizer, [USER, choice("a")], additional_histories=[extra, context_only])
    assert [s.trainable_tokens for s in group.trajectories[0].sequences] == [2, 6]


def test_tools_are_rendered_in_one_order_whatever_came(tokenizer: GroupTokenizer):
    function = {"strict": None, "parameters": {"type": "object"}, "description": "d", "name": "f"}
    tool = {"function": function, "type": "function"}
    sequence = only(tokenize(tokenizer, [USER, choice("a")], tools=[tool]))
    text = bytes(t for t in sequence.token_ids.tolist() if t < 256)
    assert text.startswith(b'[{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]')
    assert list(canonical_tool(Tool.model_validate(tool))) == ["type", "function"]


def test_a_conversation_that_members_share_is_rendered_once(tokenizer: GroupTokenizer, monkeypatch: pytest.MonkeyPatch):
    rendered: list[object] = []
    render = ChatText._render

    def noted(self: ChatText, messages: list[dict[str, Any]], *rest: Any, **options: Any) -> str:
        rendered.append(messages)
        return render(self, messages, *rest, **options)

    monkeypatch.setattr(ChatText, "_render", noted)
    calls = [{"function": {"name": "f", "arguments": {"x": x}}} for x in (1, True)]
    told = [[USER, {"role": "assistant", "content": None, "tool_calls": [call]}, choice("c")] for call in calls]
    group = tokenize(tokenizer, [USER, choice("a")], [USER, choice("b")], *told)
    assert len(rendered) == 3
    prompts = [bytes(t for t in member.sequences[0].token_ids.tolist() if t < 256) for member in group.trajectories]
    assert (b'"x": 1' in prompts[2], b'"x": true' in prompts[3]) == (True, True), "equal in Python, not in a template"


def test_tool_calls_of_an_earlier_turn_are_rendered_once(tokenizer: GroupTokenizer):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    drawn = choice("", [*b'[f:{"x": 1}]', END], message={"role": "assistant", "content": None, "tool_calls": [call]})
    sequence = only(tokenize(tokenizer, [USER, drawn, {"role": "tool", "content": "r", "tool_call_id": "c"}, choice("a")]))
    assert bytes(t for t in sequence.token_ids.tolist() if t < 256).count(b"[f:") == 1
    assert [n for trained, n in runs(sequence) if trained] == [13, 2]


def test_text_is_trained_on_exactly_where_allowed(tokenizer: GroupTokenizer):
    told = {"role": "assistant", "content": "héy"}
    text_only = {"finish_reason": "stop", "message": {"role": "assistant", "content": "ok"}}
    without = choice("zz", token_logprobs=None)
    sequence = only(tokenize(tokenizer, [USER, told, USER, text_only, USER, without], config=ALLOW))
    assert text_of(sequence, trained=True) == "ok]zz]"
    assert all(math.isnan(x) for x in sequence.logprobs)
    assert text_of(only(tokenize(tokenizer, [USER, told], config=ALLOW)), trained=True) == "héy]"


def test_told_messages_are_context_unless_allowed(tokenizer: GroupTokenizer):
    sequence = only(tokenize(tokenizer, [USER, {"role": "assistant", "content": "told"}, USER, choice("a")]))
    assert sequence.trainable_tokens == 2


def test_a_reward_that_was_left_out_is_no_reward_of_0(tokenizer: GroupTokenizer):
    raw = {"trajectories": [{"messages_and_choices": [USER, choice("a")], "reward": 1.0}, {"messages_and_choices": [USER, choice("b")]}]}
    settings = ModelSettings(base_model="tiny")
    group = tokenizer.tokenize(decode_group(orjson.dumps(raw)), "g", settings)
    (rejected,) = group.rejected
    assert (rejected.index, rejected.reason) == (1, Reason.MISSING_REWARD)
    assert rejected.detail.startswith("trajectories[1]: reward is missing")
    assert len(tokenizer.tokenize(decode_group(orjson.dumps(raw | {"purpose": "sft"})), "g", settings).trajectories) == 2


def test_a_sentinel_of_an_engine_is_a_missing_log_probability(tokenizer: GroupTokenizer):
    sequence = only(tokenize(tokenizer, [USER, choice("abc", token_logprobs=[-0.5, -9999.0, -9984.0, 0.05])]))
    assert sequence.logprobs[sequence.trainable].tolist() == pytest.approx([-0.5, math.nan, math.nan, 0.05], nan_ok=True)


@pytest.mark.parametrize(
    ("items", "reason", "part"),
    [
        ([], Reason.NO_TRAINABLE_TOKENS, "no sampled token"),
        ([USER], Reason.NO_TRAINABLE_TOKENS, "no sampled token"),
        ([USER, {"role": "assistant", "content": "a"}], Reason.NO_TRAINABLE_TOKENS, "allow_training_without_logprobs"),
        ([USER, choice("", [])], Reason.NO_TRAINABLE_TOKENS, "no sampled token"),
        (
            [USER, choice("a", logprobs={"content": []}, token_ids=None, token_logprobs=None)],
            Reason.NO_TRAINABLE_TOKENS,
            "no sampled token",
        ),
        ([USER, choice("a", token_logprobs=[None, None])], Reason.MISSING_LOGPROBS, "messages_and_choices[1]: all 2"),
        ([USER, choice("a", token_logprobs=[-9999.0, -3.4e38])], Reason.MISSING_LOGPROBS, "messages_and_choices[1]: all 2"),
        (
            [USER, choice("a", token_logprobs=[-0.5, 0.7])],
            Reason.INVALID_LOGPROBS,
            "messages_and_choices[1]: the log-probability of token 1",
        ),
        ([USER, {"finish_reason": "stop", "message": {"content": "a"}}], Reason.MISSING_LOGPROBS, "without token ids"),
        (
            [USER, {"finish_reason": "stop", "message": {"content": "a"}, "logprobs": {"content": [{"token": "a:5", "logprob": -1}]}}],
            Reason.MISSING_LOGPROBS,
            "return-tokens-as-token-ids",
        ),
        ([USER, choice("", [5, VOCABULARY])], Reason.TOKEN_OUT_OF_VOCABULARY, f"token_ids[1] is {VOCABULARY}, but the base model has 264"),
        ([USER, choice("a", prompt_token_ids=[1, -1])], Reason.TOKEN_OUT_OF_VOCABULARY, "prompt_token_ids[1] is -1"),
        ([USER, choice("a", prompt_token_ids=[2**40])], Reason.TOKEN_OUT_OF_VOCABULARY, "prompt_token_ids[0]"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}, choice("a")],
            Reason.UNSUPPORTED_CONTENT,
            "messages_and_choices[0].content holds a part of type 'image_url'",
        ),
        ([{"role": "user", "content": "q" * 600}, choice("a")], Reason.TOO_LONG, "a sequence of 621 tokens, at most 400"),
    ],
)
def test_an_unfit_trajectory_is_set_aside_with_a_reason_of_its_own(
    tokenizer: GroupTokenizer, items: list[dict[str, Any]], reason: Reason, part: str
):
    group = tokenize(tokenizer, [USER, choice("fine")], items, [USER, choice("also")])
    assert [trajectory.reward for trajectory in group.trajectories] == [0.0, 2.0]
    assert group.indices == [0, 2]
    (rejected,) = group.rejected
    assert (rejected.reason, rejected.index) == (reason, 1)
    assert rejected.detail.startswith("trajectories[1]: ")
    assert part in rejected.detail


def test_a_history_at_fault_is_named(tokenizer: GroupTokenizer):
    refused = refusal(tokenizer, [USER, choice("a")], additional_histories=[{"messages_and_choices": [choice("", [999])]}])
    assert refused.detail.startswith("trajectories[0]: additional_histories[0].messages_and_choices[0].token_ids[0]")


def test_no_trajectories_are_refused(tokenizer: GroupTokenizer):
    assert refusal(tokenizer).reason is Reason.NO_TRAJECTORIES


@pytest.mark.parametrize(("limit", "row", "fits"), [(23, None, True), (22, None, False), (400, 23, True), (400, 22, False)])
def test_the_longest_sequence_is_bounded_by_model_and_row(tokenizer: GroupTokenizer, limit: int, row: int | None, *, fits: bool):
    config = TrainConfig(packed_sequence_length=row)
    if fits:
        assert tokenize(tokenizer, [USER, choice("ab")], config=config, limit=limit).tokens == 23
    else:
        assert refusal(tokenizer, [USER, choice("ab")], config=config, limit=limit).reason is Reason.TOO_LONG


def test_more_positions_than_the_base_model_has_are_refused(tokenizer: GroupTokenizer):
    refused = refusal(tokenizer, [{"role": "user", "content": "q" * 600}, choice("a")], limit=10_000)
    assert "at most 512" in refused.detail


def test_what_a_template_says_is_kept(make_tokenizer: Callable[..., BaseSource]):
    broken = GroupTokenizer(make_tokenizer("{{ raise_exception('roles must alternate') }}"))
    refused = refusal(broken, [USER, choice("a")])
    assert refused.reason is Reason.TOKENIZATION_FAILED
    assert "roles must alternate" in refused.detail


def test_without_a_chat_template_prompt_ids_are_needed_and_enough(make_tokenizer: Callable[..., BaseSource]):
    bare = GroupTokenizer(make_tokenizer(None))
    refused = refusal(bare, [USER, choice("a")])
    assert refused.reason is Reason.TOKENIZATION_FAILED
    assert "prompt_token_ids" in refused.detail
    assert only(tokenize(bare, [USER, choice("a", prompt_token_ids=[1])])).trainable_tokens == 2


def test_text_that_the_template_rewrites_is_refused_not_misread(make_tokenizer: Callable[..., BaseSource]):
    shouting = GroupTokenizer(make_tokenizer(TEMPLATE.replace("m.content", "(m.content | upper)")))
    refused = refusal(shouting, [USER, {"role": "assistant", "content": "a"}], config=ALLOW)
    assert refused.reason is Reason.TOKENIZATION_FAILED
    assert "rewrites this assistant turn" in refused.detail


def test_a_folder_that_is_no_base_model_says_so(tmp_path: Any):
    with pytest.raises(BaseUnusableError, match="config can't be read"):
        GroupTokenizer(BaseSource(path=str(tmp_path)))


def test_rewards_versions_and_exceptions_are_carried(tokenizer: GroupTokenizer):
    failed = {"exceptions": [{"type": "E", "message": "boom"}]}
    versions = {"reward": 0.1, "initial_policy_version": 3, "final_policy_version": 4}
    tokenized = tokenize(tokenizer, [USER, choice("a")], group=failed, **versions)
    (trajectory,) = tokenized.trajectories
    assert (trajectory.reward, trajectory.initial_policy_version, trajectory.final_policy_version) == (0.1, 3, 4)
    assert (tokenized.group_id, tokenized.exceptions, tokenized.zero_variance) == ("g", 1, True)
