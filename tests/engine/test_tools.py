"""Tools: shown to the chat template, and calls read out of what the model says."""

import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx
import orjson
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI
from tests.engine.site import BASE, running, site_with
from tests.trainer.tiny import save_byte_tokenizer
from transformers import AddedToken, AutoTokenizer

from headrace.engine.http.tool_calls import ToolCallReader, ToolCallStream
from headrace.schemas.chat import Tool, ToolCall

TOOLS = [{"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object", "properties": {}}}}]
ASK = [{"role": "user", "content": "hello"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(kafka: str, speaking_model, tmp_path_factory) -> AsyncIterator[httpx.AsyncClient]:
    """Of a model that always says `well`, then a tool call."""
    work = tmp_path_factory.mktemp("tools")
    async with site_with(kafka, speaking_model, work, f"t{uuid.uuid4().hex[:10]}.") as site, running(site) as client:
        yield client


@pytest.mark.asyncio(loop_scope="module")
async def test_a_tool_is_called_and_its_answer_goes_back(engine):
    client = AsyncOpenAI(base_url=str(engine.base_url), api_key="none", max_retries=0)
    fields = {"model": BASE, "messages": ASK, "tools": TOOLS, "extra_body": {"return_token_ids": True}}
    answer = await client.chat.completions.create(**fields)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "well"
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, orjson.loads(call.function.arguments)) == ("function", "look", {"key": "a"})
    assert answer.prompt_token_ids[0] == 6  # the template was given the tools
    again = [*ASK, choice.message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "b"}]
    after = await client.chat.completions.create(**fields | {"messages": again})
    assert after.usage.prompt_tokens > answer.usage.prompt_tokens

    calls, content, finish, tokens = {}, "", None, []
    async for chunk in await client.chat.completions.create(**fields, stream=True):
        (part,) = chunk.choices
        content += part.delta.content or ""
        tokens += part.token_ids
        finish = part.finish_reason or finish
        for delta in part.delta.tool_calls or []:
            calls[delta.index] = (delta.function.name, delta.function.arguments)
    assert (content, finish, calls) == ("well", "tool_calls", {0: ("look", call.function.arguments)})
    assert tokens == choice.token_ids


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}])
async def test_without_tools_or_with_none_the_text_stays_as_it_was_said(engine, fields):
    answer = (await engine.post("chat/completions", json={"model": BASE, "messages": ASK} | fields)).json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"].startswith("well <tool_call> {")
    assert "tool_calls" not in choice["message"]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_call_that_was_cut_off_stays_content(engine):
    answer = (await engine.post("chat/completions", json={"model": BASE, "messages": ASK, "tools": TOOLS, "max_tokens": 4})).json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == 'well <tool_call> {"name": "look",'


OFFERED = [
    Tool.model_validate({"function": {"name": "f", "parameters": {"properties": {"x": {"type": "integer"}, "s": {"type": "string"}}}}})
]
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
CODER = "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n<parameter=s>\n2\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
TURN = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% for call in m.tool_calls or [] %}@{% endfor %}"
ENDS = "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
ARGUMENTS = "{{ call.function.arguments | tojson }}"
WRITTEN = {
    "hermes": '\n<tool_call>\n{"name": "{{ call.function.name }}", "arguments": ' + ARGUMENTS + "}\n</tool_call>",
    "coder": "<tool_call>\n<function={{ call.function.name }}>\n{% for k, v in call.function.arguments | items %}"
    "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
    "glm": "<tool_call>{{ call.function.name }}\n{% for k, v in call.function.arguments | items %}"
    "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>",
    "mistral list": '[TOOL_CALLS] [{"name": "{{ call.function.name }}", "arguments": ' + ARGUMENTS + "}]",
    "mistral": "[TOOL_CALLS]{{ call.function.name }}[ARGS]" + ARGUMENTS,
    "llama": '{"name": "{{ call.function.name }}", "parameters": ' + ARGUMENTS + "}",
    "unknown": "CALL {{ call.function.name }}(" + ARGUMENTS + ")",
    "none": "",
}


def reader_for(folder: Path, written: str, special: Sequence[str] = (), **of_tokenizer: object) -> ToolCallReader:
    """Of a tokenizer whose template writes calls so."""
    save_byte_tokenizer(folder, TURN.replace("@", written) + ENDS)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken(text, special=True) for text in special])
    for name, value in of_tokenizer.items():
        setattr(tokenizer, name, value)
    return ToolCallReader(tokenizer)


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ToolCallReader]:
    return {name: reader_for(tmp_path_factory.mktemp("form"), written) for name, written in WRITTEN.items()}


def called(calls: list[ToolCall]) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in calls]


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        ("hermes", "plain\n", "plain\n", []),
        ("hermes", CALL, "", [("f", '{"x": 1}')]),
        ("hermes", f"I look.\n{CALL}\n{CALL}", "I look.", [("f", '{"x": 1}'), ("f", '{"x": 1}')]),
        ("hermes", CALL.removesuffix("</tool_call>"), "", [("f", '{"x": 1}')]),
        ("hermes", "a <tool_call>no json</tool_call> b", "a <tool_call>no json</tool_call> b", []),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
            '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
            [],
        ),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ("hermes", f"<tool_call>broken</tool_call>{CALL}", "<tool_call>broken</tool_call>", [("f", '{"x": 1}')]),
        ("hermes", "half of <tool_c", "half of <tool_c", []),
        ("coder", f"so\n{CODER}", "so", [("f", '{"x": 1, "s": "2"}')]),
        ("coder", CODER.removeprefix("<tool_call>\n"), "", [("f", '{"x": 1, "s": "2"}')]),
        ("glm", GLM + GLM, "", [("f", '{"x": 1}'), ("f", '{"x": 1}')]),
        ("glm", "<tool_call>f\n</tool_call>", "", [("f", "{}")]),
        ("mistral list", '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}]', "", [("f", '{"x": 1}')]),
        ("mistral", 'a[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]f{}', "a", [("f", '{"x": 1}'), ("f", "{}")]),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]abcdef123[ARGS]{"x": 1}', "", [("f", '{"x": 1}')]),
        ("mistral", "[TOOL_CALLS]f[ARGS]{", "[TOOL_CALLS]f[ARGS]{", []),
        ("llama", '{"name": "f", "parameters": {"x": 1}}', "", [("f", '{"x": 1}')]),
        ("llama", '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "f", "parameters": {}}', "", [("f", "{}"), ("f", "{}")]),
        ("llama", '{"name": "else", "parameters": {}}', '{"name": "else", "parameters": {}}', []),
        ("llama", 'see {"name": "f", "parameters": {}}', 'see {"name": "f", "parameters": {}}', []),
    ],
)
def test_calls_are_taken_out_and_what_does_not_parse_stays(
    readers: dict[str, ToolCallReader], form: str, text: str, content: str, calls: list[tuple[str, str]]
):
    left, found = readers[form].parse(text, OFFERED)
    assert (left, called(found)) == (content, calls)


@pytest.mark.parametrize("form", WRITTEN)
def test_the_form_is_what_the_chat_template_writes_and_an_unknown_one_is_warned_of_once(
    readers: dict[str, ToolCallReader], form: str, caplog: pytest.LogCaptureFixture
):
    reader = ToolCallReader(readers[form].tokenizer)
    for _ in range(2):
        name = reader.form.name
    known = {"mistral list": "[TOOL_CALLS]", "mistral": "[TOOL_CALLS]", "llama": "JSON with parameters"}
    assert name == known.get(form, "<tool_call>")
    assert len(caplog.records) == (form in {"unknown", "none"})


def test_a_form_that_the_tokenizer_names_itself_is_read(tmp_path: Path):
    field = {
        "open_pattern": r"<call:(?P<name>\w+)>",
        "close": "</call>",
        "repeats": True,
        "content": "json",
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    }
    shipped = {"start_anchor": "<|im_start|>assistant\n", "fields": {"tool_calls": field, "content": {"content": "text"}}}
    reader = reader_for(tmp_path, "", response_template=shipped)
    left, found = reader.parse('so <call:f>{"x": 1}</call> <call:f>{</call>', OFFERED)
    assert (left, called(found)) == ("so  <call:f>{</call>", [("f", '{"x": 1}')])


def test_marks_that_are_special_tokens_stay_in_the_text_that_is_read(tmp_path: Path):
    reader = reader_for(tmp_path, WRITTEN["hermes"], special=["<tool_call>", "</tool_call>", "<other>"])
    assert {reader.tokenizer.convert_ids_to_tokens(i) for i in reader.kept_ids} == {"<tool_call>", "</tool_call>"}


PARTS = [
    CALL,
    CODER,
    GLM,
    "a",
    " ",
    "\n",
    "<tool_call>",
    "</tool_call>",
    "<tool",
    '{"name": "g"}',
    "<",
    "[TOOL_CALLS]",
    "[ARGS]",
    "f",
    "{}",
]
PARTS += ['{"name": "f", "parameters": {}}', "; ", "<|python_tag|>"]


@given(st.lists(st.sampled_from(PARTS), max_size=8), st.sampled_from(["hermes", "mistral", "llama"]), st.data())
def test_text_in_pieces_gives_what_the_whole_gives(readers, parts, form, data):
    text = "".join(parts)
    stream, content, at = ToolCallStream(readers[form], OFFERED), "", 0
    while at < len(text):
        length = data.draw(st.integers(1, len(text) - at))
        content += stream.push(text[at : at + length])
        at += length
    rest, calls = stream.end()
    whole, expected = readers[form].parse(text, OFFERED)
    assert (content + rest, called(calls)) == (whole, called(expected))
