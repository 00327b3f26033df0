"""Which turns are the policy's own, and whether their end trains: exact masks for each kind of data."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.trainer.conversations import ALLOW, USER, choice, only, refusal, text_of, tokenize
from tests.trainer.tiny import TEMPLATE, save_byte_tokenizer, save_model

from headrace.schemas.codec import decode_group
from headrace.schemas.reasons import RejectionReason as Reason
from headrace.schemas.training import ModelSettings
from headrace.trainer.plan import BaseSource
from headrace.trainer.tokenize import GroupTokenizer

Make = Callable[..., BaseSource]
SFT: dict[str, Any] = {"purpose": "sft"}

# Without a token that ends a turn: the next role's marker does, as in GLM's. `[` is a marker here.
GLM = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.reasoning_content and loop.last %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ '{' + call.function.name + '}' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def said(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def text_choice(text: str, **fields: Any) -> dict[str, Any]:
    return {"finish_reason": "stop", "message": {"content": text}, **fields}


@pytest.fixture(scope="module")
def tokenizer(tiny: BaseSource) -> GroupTokenizer:
    return GroupTokenizer(tiny)


@pytest.fixture(scope="module")
def glm(make_tokenizer: Make) -> GroupTokenizer:
    return GroupTokenizer(make_tokenizer(GLM))


def trained(tokenizer: GroupTokenizer, items: list[dict[str, Any]], **options: Any) -> str:
    return text_of(only(tokenize(tokenizer, items, **options)), trained=True)


@pytest.mark.parametrize("options", [{"group": SFT}, {"config": ALLOW}])
@pytest.mark.parametrize(
    ("turn", "own"),
    [
        (said("a"), "a]"),
        (text_choice("a"), "a]"),
        (text_choice("a", finish_reason="tool_calls"), "a]"),
        (text_choice("a", finish_reason="length"), "a"),
        (text_choice("a", finish_reason="abort"), "a"),
        (text_choice("a", finish_reason=None), "a"),
        (text_choice("a", finish_reason="content_filter"), "a"),
        (text_choice("a", stop_reason="###"), "a"),
        (text_choice("a", stop_reason=256), "a]"),
        (said("a", finish_reason="length"), "a"),
    ],
)
def test_a_turn_of_text_trains_its_end_unless_it_was_cut_off(
    tokenizer: GroupTokenizer, options: dict[str, Any], turn: dict[str, Any], own: str
):
    assert trained(tokenizer, [USER, turn], **options) == own


@pytest.mark.parametrize("options", [{"group": SFT}, {"config": ALLOW}])
def test_where_a_template_has_no_end_of_turn_the_next_roles_marker_is_the_end(glm: GroupTokenizer, options: dict[str, Any]):
    group = tokenize(glm, [USER, text_choice("a"), USER, text_choice("b")], **options)
    assert text_of(only(group)) == "[user\nq[assistant\na[user\nq[assistant\nb["
    assert text_of(only(group), trained=True) == "a[b["
    assert group.trajectories[0].turns_without_end == 0
    call = {"message": {"content": "a", "tool_calls": [{"id": "c", "function": {"name": "f"}}]}, "finish_reason": "tool_calls"}
    assert trained(glm, [USER, call], **options) == "a{f}["
    thought = text_choice("a", message={"content": "a", "reasoning": "hm"})
    assert trained(glm, [USER, thought], **options) == "<think>hm</think>a["
    assert trained(glm, [USER, text_choice("a", finish_reason="length"), USER, text_choice("b")], **options) == "ab["


@pytest.mark.parametrize(
    ("closing", "own", "unknown"), [("<|im_end|>\n", "a]", 0), (" <|im_end|>\n", "a ]", 0), ("\n###\n", "a", 1), ("", "a[", 0)]
)
@pytest.mark.parametrize("options", [{"group": SFT}, {"config": ALLOW}])
def test_a_turn_whose_end_no_token_tells_trains_without_one_and_is_counted(
    make_tokenizer: Make, closing: str, own: str, unknown: int, options: dict[str, Any]
):
    group = tokenize(GroupTokenizer(make_tokenizer(TEMPLATE.replace("<|im_end|>\n", closing))), [USER, said("a")], **options)
    assert text_of(only(group), trained=True) == own
    assert group.trajectories[0].turns_without_end == unknown


@pytest.mark.parametrize(("stops", "own"), [([256], "a"), ([256, ord("~")], "a~")])
def test_a_stop_token_of_the_base_model_ends_a_turn_though_it_is_no_special_one(tmp_path: Path, stops: list[int], own: str):
    save_model(tmp_path)
    save_byte_tokenizer(tmp_path, TEMPLATE.replace("<|im_end|>\n", "~"))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    assert trained(GroupTokenizer(BaseSource(path=str(tmp_path))), [USER, said("a")], group=SFT) == own


def test_assistant_messages_of_the_prompt_are_context_where_text_trains(tokenizer: GroupTokenizer):
    few_shot = [USER, said("shot"), USER]
    for end in (said("own"), text_choice("own"), choice("own")):
        assert trained(tokenizer, [*few_shot, end], config=ALLOW) == "own]"
    loop = [*few_shot, said("call"), {"role": "tool", "content": "r"}, said("own")]
    assert trained(tokenizer, loop, config=ALLOW) == "call]own]"
    scripted = [USER, text_choice("own"), {"role": "tool", "content": "r"}, said("scripted")]
    assert trained(tokenizer, scripted, config=ALLOW) == "own]"
    assert tokenize(tokenizer, loop, config=ALLOW).trajectories[0].turns_as_context == 1


def test_every_assistant_turn_of_an_example_trains(tokenizer: GroupTokenizer):
    assert trained(tokenizer, [USER, said("a"), USER, said("b")], group=SFT) == "a]b]"


@pytest.mark.parametrize(
    ("options", "of_choice"), [({"group": SFT}, text_choice), ({"config": ALLOW}, text_choice), ({}, choice), ({"config": ALLOW}, choice)]
)
def test_a_weight_of_zero_is_context_in_every_kind_of_job(tokenizer: GroupTokenizer, options: dict[str, Any], of_choice: Any):
    silent = of_choice("a")
    silent["message"]["weight"] = 0
    for turn in (said("a", weight=0), of_choice("a", weight=0), silent):
        assert trained(tokenizer, [USER, turn, USER, of_choice("b")], **options) == "b]"
        refused = refusal(tokenizer, [USER, turn], **options)
        assert refused.reason is Reason.NO_TRAINABLE_TOKENS


def test_a_weight_of_one_trains_an_earlier_turn_of_a_completion(tokenizer: GroupTokenizer):
    assert trained(tokenizer, [USER, said("a", weight=1), USER, said("b")], config=ALLOW) == "a]b]"
    assert trained(tokenizer, [USER, said("a", weight=1), USER, choice("b")]) == "b]", "without the option no text trains"


@pytest.mark.parametrize("weight", [0.5, "0", True, -1, [1]])
def test_another_weight_refuses_its_trajectory_by_name(tokenizer: GroupTokenizer, weight: Any):
    group = tokenize(tokenizer, [USER, said("a", weight=weight)], [USER, said("b")], config=ALLOW)
    (rejected,) = group.rejected
    assert rejected.detail.startswith("trajectories[0]: messages_and_choices[1].weight is ")
    assert group.indices == [1]


def test_a_choice_without_log_probabilities_among_choices_with_them_is_context(tokenizer: GroupTokenizer):
    for without in (text_choice("a"), choice("a", token_logprobs=None), choice("a", token_logprobs=[None, None])):
        group = tokenize(tokenizer, [USER, without, USER, choice("b")])
        assert text_of(only(group)) == "[user\nq]\n[assistant\na]\n[user\nq]\n[assistant\nb]"
        assert text_of(only(group), trained=True) == "b]"
        assert group.trajectories[0].turns_as_context == 1
        elsewhere = tokenize(tokenizer, [USER, without], additional_histories=[{"messages_and_choices": [USER, choice("b")]}])
        assert text_of(only(elsewhere), trained=True) == "b]"


def test_an_empty_list_of_log_probabilities_is_a_turn_of_no_tokens(tokenizer: GroupTokenizer):
    silent = {"finish_reason": "stop", "message": {"content": ""}, "logprobs": {"content": [], "refusal": None}}
    for config in (None, ALLOW):
        assert trained(tokenizer, [USER, silent, USER, choice("b")], config=config) == "b]"


def test_a_trajectory_that_holds_half_of_a_character_is_rejected_alone(tokenizer: GroupTokenizer):
    body = orjson.dumps({"trajectories": [{"messages_and_choices": [USER, choice("a")], "reward": i} for i in range(3)]})
    cut = body.replace(b'"content":"q"', rb'"content":"q\ud83d"', 1)
    group = tokenizer.tokenize(decode_group(cut), "g", ModelSettings(base_model="tiny"))
    assert group.indices == [1, 2]
    assert group.rejected[0].detail.startswith("trajectories[0]: messages_and_choices[0].content: the text holds a lone surrogate")
