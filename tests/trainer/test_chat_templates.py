"""What chat templates make of conversations: switches, thoughts, tool calls, and templates that do not behave."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.trainer.conversations import ALLOW, USER, choice, only, refusal, text_of, tokenize
from tests.trainer.tiny import END, TEMPLATE

from headrace.schemas.reasons import RejectionReason as Reason
from headrace.trainer import chat_text
from headrace.trainer.plan import BaseSource
from headrace.trainer.tokenize import GroupTokenizer

Make = Callable[..., BaseSource]

# The shape of Qwen3's own: thoughts of turns before the last user message are left out, and a switch asks for an empty thought.
THINKING = (
    "{%- set ns = namespace(last=-1) %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{%- if m.role == 'assistant' %}"
    "{%- set content = m.content %}{%- set thought = '' %}"
    "{%- if m.reasoning_content is string %}{%- set thought = m.reasoning_content %}"
    "{%- elif '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if loop.index0 > ns.last and (loop.last or thought) %}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}"
    "{{- content + '<|im_end|>\\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tiny: BaseSource) -> GroupTokenizer:
    return GroupTokenizer(tiny)


@pytest.fixture(scope="module")
def thinking(make_tokenizer: Make) -> GroupTokenizer:
    return GroupTokenizer(make_tokenizer(THINKING))


def calls(arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


def test_switches_reach_the_template(thinking: GroupTokenizer):
    items = [USER, choice("a")]
    assert text_of(only(tokenize(thinking, items))) == "[user\nq]\n[assistant\na]"
    off = only(tokenize(thinking, items, switches={"enable_thinking": False}))
    assert text_of(off) == "[user\nq]\n[assistant\n<think>\n\n</think>\n\na]"
    assert text_of(off, trained=True) == "a]"


@pytest.mark.parametrize("name", ["tokenize", "chat_template", "messages", "add_generation_prompt", "tools"])
def test_a_switch_can_not_take_the_place_of_an_argument(thinking: GroupTokenizer, name: str):
    refused = refusal(thinking, [USER, choice("a")], switches={name: True})
    assert refused.reason is Reason.TOKENIZATION_FAILED
    assert f"chat_template_kwargs can't set {name}" in refused.detail


def test_a_template_that_leaves_earlier_thoughts_out_splits_the_turns(thinking: GroupTokenizer):
    """The second prompt is no extension of the first turn: each turn trains behind the prompt that it had."""
    first = choice("<think>\nhm\n</think>\n\na")
    first_seq, second_seq = tokenize(thinking, [USER, first, USER, choice("b")]).trajectories[0].sequences
    assert text_of(first_seq) == "[user\nq]\n[assistant\n<think>\nhm\n</think>\n\na]"
    assert text_of(first_seq, trained=True) == "<think>\nhm\n</think>\n\na]"
    assert text_of(second_seq) == "[user\nq]\n[assistant\na]\n[user\nq]\n[assistant\nb]"
    assert text_of(second_seq, trained=True) == "b]"


def test_thoughts_within_one_users_turn_stay_and_the_turns_join(thinking: GroupTokenizer):
    first = choice("a", [*b"<think>\nhm\n</think>\n\na", END], message={"content": "a", "reasoning_content": "hm"})
    sequence = only(tokenize(thinking, [USER, first, {"role": "tool", "content": "r"}, choice("b")]))
    assert text_of(sequence) == "[user\nq]\n[assistant\n<think>\nhm\n</think>\n\na]\n[tool\nr]\n[assistant\nb]"
    assert text_of(sequence, trained=True) == "<think>\nhm\n</think>\n\na]b]"


def test_text_is_trained_on_from_where_the_template_asks_the_model_to_speak(thinking: GroupTokenizer):
    told = {"role": "assistant", "content": "a", "reasoning_content": "hm"}
    assert text_of(only(tokenize(thinking, [USER, told], config=ALLOW)), trained=True) == "<think>\nhm\n</think>\n\na]"
    plain = {"role": "assistant", "content": "a"}
    off = tokenize(thinking, [USER, plain], config=ALLOW, switches={"enable_thinking": False})
    assert text_of(only(off), trained=True) == "a]"


def test_examples_with_thoughts_train_each_turn_as_the_model_will_see_it(thinking: GroupTokenizer):
    def said(thought: str, content: str) -> dict[str, Any]:
        return {"role": "assistant", "content": content, "reasoning_content": thought}

    sequences = tokenize(thinking, [USER, said("x", "a"), USER, said("y", "b")], group={"purpose": "sft"}).trajectories[0].sequences
    assert [text_of(s, trained=True) for s in sequences] == ["<think>\nx\n</think>\n\na]", "<think>\ny\n</think>\n\nb]"]
    assert text_of(sequences[1]).startswith("[user\nq]\n[assistant\na]\n[user")


def test_a_template_that_asks_for_a_thought_but_writes_none_trains_on_the_content(make_tokenizer: Make):
    """Asking ends with `<think>`, which the history never shows: the place of the content says what the turn is."""
    asking = TEMPLATE.replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}")
    sequence = only(tokenize(GroupTokenizer(make_tokenizer(asking)), [USER, {"role": "assistant", "content": "a"}], config=ALLOW))
    assert text_of(sequence, trained=True) == "a]"


def test_text_that_begins_the_conversation_needs_no_prompt(make_tokenizer: Make):
    strict = GroupTokenizer(make_tokenizer("{{ messages[0].role + ':' }}" + TEMPLATE))
    sequence = only(tokenize(strict, [{"role": "assistant", "content": "hello"}], config=ALLOW))
    assert text_of(sequence, trained=True) == "hello]"


def test_a_refusal_is_what_was_said(tokenizer: GroupTokenizer):
    refused = choice("no", message={"role": "assistant", "content": None, "refusal": "no"})
    sequence = only(tokenize(tokenizer, [USER, refused, USER, choice("b")]))
    assert text_of(sequence, trained=True) == "no]b]"


def test_log_probabilities_of_a_refusal_are_taken_too(tokenizer: GroupTokenizer):
    entries = [{"token": f"token_id:{t}", "logprob": -0.25} for t in (*b"no", END)]
    refused = {"finish_reason": "stop", "message": {"refusal": "no"}, "logprobs": {"content": None, "refusal": entries}}
    sequence = only(tokenize(tokenizer, [USER, refused]))
    assert text_of(sequence, trained=True) == "no]"
    assert set(sequence.logprobs[sequence.trainable].tolist()) == {-0.25}


def test_empty_content_is_an_empty_turn(tokenizer: GroupTokenizer):
    silent = choice("", [END], message={"role": "assistant", "content": None})
    sequence = only(tokenize(tokenizer, [USER, silent, USER, choice("b")]))
    assert text_of(sequence) == "[user\nq]\n[assistant\n]\n[user\nq]\n[assistant\nb]"
    assert text_of(sequence, trained=True) == "]b]"


@pytest.mark.parametrize("sent", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize("read", ["reasoning", "reasoning_content"])
def test_a_thought_under_either_name_reaches_a_template_of_either_convention(make_tokenizer: Make, sent: str, read: str):
    tokenizer = GroupTokenizer(make_tokenizer(THINKING.replace("m.reasoning_content", f"m.{read}")))
    told = {"role": "assistant", "content": "a", sent: "hm"}
    example = only(tokenize(tokenizer, [USER, told], group={"purpose": "sft"}))
    assert text_of(example, trained=True) == "<think>\nhm\n</think>\n\na]"
    loop = [USER, choice("a", [*b"<think>\nhm\n</think>\n\na", END], message=told), {"role": "tool", "content": "r"}, choice("b")]
    turns_join = only(tokenize(tokenizer, loop))
    assert text_of(turns_join, trained=True) == "<think>\nhm\n</think>\n\na]b]"


ITEMS = TEMPLATE.replace("call.function.arguments is string", "false").replace("arguments | tojson", "arguments|items|list")
BRACKETS = TEMPLATE.replace("call.function.arguments is string", "false").replace(
    "{{ call.function.arguments | tojson }}", "{% for k in call.function.arguments %}{{ k ~ '=' ~ call.function.arguments[k] }}{% endfor %}"
)
TEXT = TEMPLATE.replace("call.function.arguments is string", "true").replace(
    "{{ call.function.arguments }}", "{{ '=' + call.function.arguments }}"
)


@pytest.mark.parametrize(
    ("template", "arguments", "written"),
    [
        (ITEMS, '{"x": 1}', "[('x', 1)]"),
        (ITEMS, {"x": 1}, "[('x', 1)]"),
        (ITEMS, "", "[]"),
        (BRACKETS, '{"x": 1}', "x=1"),
        (BRACKETS, {"x": 1}, "x=1"),
        (TEXT, '{"x":  1}', '={"x":  1}'),
        (TEXT, {"x": "é"}, '={"x": "é"}'),
        (TEXT, '{"x": ', '={"x": '),
        (TEMPLATE, '{"x":  1}', '{"x": 1}'),
    ],
)
def test_tool_arguments_are_what_the_template_needs(make_tokenizer: Make, template: str, arguments: Any, written: str):
    sequence = only(tokenize(GroupTokenizer(make_tokenizer(template)), [USER, calls(arguments), USER, choice("a")]))
    assert f"[assistant\n[f:{written}]]\n" in text_of(sequence)


@pytest.mark.parametrize("arguments", ['{"x": ', "[1]", "7"])
def test_arguments_that_are_no_object_cost_their_own_trajectory(make_tokenizer: Make, arguments: str):
    group = tokenize(GroupTokenizer(make_tokenizer(ITEMS)), [USER, calls(arguments), USER, choice("a")], [USER, choice("a")])
    assert [(member.index, member.reason) for member in group.rejected] == [(0, Reason.TOKENIZATION_FAILED)]
    place = "messages_and_choices[1].tool_calls[0].function.arguments"
    assert group.rejected[0].detail.startswith("trajectories[0]: messages_and_choices[3]: the chat template can't render")
    assert f"{place} is {arguments!r}, which is no JSON object" in group.rejected[0].detail
    assert len(group.trajectories) == 1


@pytest.mark.parametrize(
    "escape",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append({'role': 'user'}) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ ''.format.__globals__ }}{{ '{0.__class__.__mro__}'.format(1) }}",
        "{% include '/etc/passwd' %}",
        "{{ open('/etc/passwd').read() }}",
    ],
)
def test_a_template_can_not_leave_its_sandbox(make_tokenizer: Make, escape: str):
    hostile = GroupTokenizer(make_tokenizer(escape + "{{ 1 / 0 }}"))
    refused = refusal(hostile, [USER, choice("a")])
    assert refused.reason is Reason.TOKENIZATION_FAILED
    assert "ZeroDivisionError" not in refused.detail


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def test_a_template_that_does_not_end_costs_its_own_trajectory_and_little_time(make_tokenizer: Make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chat_text, "RENDER_SECONDS", 0.2)
    sometimes = GroupTokenizer(make_tokenizer("{% if messages[0].content == 'loop' %}" + ENDLESS + "{% endif %}" + TEMPLATE))
    begin = time.process_time()
    group = tokenize(sometimes, [{"role": "user", "content": "loop"}, choice("a")], [USER, choice("a")])
    assert time.process_time() - begin < 5
    assert group.indices == [1]
    assert "the chat template does not end on this conversation: it used more than 0.2 s" in group.rejected[0].detail


def test_a_template_that_never_ends_is_not_asked_for_every_turn(make_tokenizer: Make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chat_text, "RENDER_SECONDS", 0.1)
    never = GroupTokenizer(make_tokenizer(ENDLESS))
    refused = refusal(never, *[[USER, choice("a")]] * 40)
    assert "does not end" in refused.detail
    begin = time.process_time()
    refusal(never, *[[USER, choice("a")]] * 40)
    assert time.process_time() - begin < 2


def test_a_template_that_takes_all_memory_is_stopped(make_tokenizer: Make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chat_text, "RENDER_BYTES", 1 << 28)
    greedy = GroupTokenizer(make_tokenizer("{{ 'x' * (2 ** 30) }}"))
    refused = refusal(greedy, [USER, choice("a")])
    assert "MemoryError" in refused.detail
    assert bytearray(1 << 29)  # the bound is gone afterwards


def test_a_template_that_writes_too_much_is_not_tokenized(make_tokenizer: Make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chat_text, "RENDERED_CHARACTERS", 1000)
    refused = refusal(GroupTokenizer(make_tokenizer("{{ 'x' * 1001 }}")), [USER, choice("a")])
    assert "wrote 1001 characters, at most 1000" in refused.detail
