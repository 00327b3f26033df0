"""Tools: shown to the chat template, and calls read out of what the model says."""

import uuid
from collections.abc import AsyncIterator

import httpx
import orjson
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI
from tests.engine.site import BASE, running, site_with

from headrace.engine.tool_calls import ToolCallStream, parse_tool_calls

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


CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "called"),
    [
        ("plain\n", "plain\n", []),
        (CALL, "", ["f"]),
        (f"I look.\n{CALL}\n{CALL}", "I look.", ["f", "f"]),
        (CALL.removesuffix("</tool_call>"), "", ["f"]),
        ("a <tool_call>no json</tool_call> b", "a <tool_call>no json</tool_call> b", []),
        ('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', []),
        ('<tool_call>{"name": "f"}</tool_call>', "", ["f"]),
        (f"<tool_call>broken</tool_call>{CALL}", "<tool_call>broken</tool_call>", ["f"]),
        ("half of <tool_c", "half of <tool_c", []),
    ],
)
def test_calls_are_taken_out_and_what_does_not_parse_stays(text, content, called):
    left, calls = parse_tool_calls(text)
    assert (left, [call.function.name for call in calls]) == (content, called)


@given(
    st.lists(st.sampled_from([CALL, "a", " ", "\n", "<tool_call>", "</tool_call>", "<tool", '{"name": "g"}', "<"]), max_size=8), st.data()
)
def test_text_in_pieces_gives_what_the_whole_gives(parts, data):
    text = "".join(parts)
    stream, content, at = ToolCallStream(), "", 0
    while at < len(text):
        length = data.draw(st.integers(1, len(text) - at))
        content += stream.push(text[at : at + length])
        at += length
    rest, calls = stream.end()
    whole, expected = parse_tool_calls(text)
    assert content + rest == whole
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        (call.function.name, call.function.arguments) for call in expected
    ]
