"""Thoughts: taken out of the text where the chat template takes them apart from the content, and given under both names."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.trainer.test_chat_templates import THINKING
from tests.trainer.tiny import TEMPLATE, save_byte_tokenizer
from transformers import AddedToken, AutoTokenizer

from headrace.engine.http.answers import ChatAnswer, Readers
from headrace.engine.http.requests import ChatRequest
from headrace.engine.http.tool_calls import ThoughtReader, ThoughtStream
from headrace.engine.sampling.sampled_row import RowPiece
from headrace.engine.serving.served_model import Policy

MARKS = ("<think>", "</think>")


def reader_for(folder: Path, template: str, special: tuple[str, ...] = ()) -> ThoughtReader:
    save_byte_tokenizer(folder, template)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken(text, special=True) for text in special])
    return ThoughtReader(tokenizer)


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_the_template_of_either_convention_says_the_marks(tmp_path: Path, name: str):
    reader = reader_for(tmp_path, THINKING.replace("reasoning_content", name), special=MARKS)
    assert reader.marks == MARKS
    assert len(reader.kept_ids) == 2
    assert reader.begun([*b"<|im_start|>assistant\n<think>\n"])
    assert not reader.begun([*b"<think>\n\n</think>\n\n"])


def test_a_template_that_takes_no_thoughts_keeps_them_in_the_content(tmp_path: Path):
    reader = reader_for(tmp_path, TEMPLATE)
    assert reader.marks is None
    stream = ThoughtStream(None, begun=False)
    assert stream.push("<think>hm</think>a") == ("", "<think>hm</think>a")


CASES = [
    ("<think>\nhm\n\nso\n</think>\n\na\n", False, "hm\n\nso", "a\n"),
    ("hm\n</think>\na", True, "hm", "a"),
    ("<think>cut", False, "cut", ""),
    ("<think>\n\n</think>\n\na", False, "", "a"),
    ("a <think>hm</think>", False, "", "a <think>hm</think>"),
    ("\n\na", False, "", "\n\na"),
    ("<thi", False, "", "<thi"),
    ("", False, "", ""),
]


@pytest.mark.parametrize(("text", "begun", "thought", "content"), CASES)
@given(data=st.data())
def test_pieces_give_what_the_whole_gives(text: str, begun: bool, thought: str, content: str, data: st.DataObject):
    stream, at, found = ThoughtStream(MARKS, begun=begun), 0, ["", ""]
    while at < len(text):
        length = data.draw(st.integers(1, len(text) - at))
        found = [a + b for a, b in zip(found, stream.push(text[at : at + length]), strict=True)]
        at += length
    found = [a + b for a, b in zip(found, stream.end(), strict=True)]
    assert found == [thought, content]


def test_an_answer_has_the_thought_under_both_names_and_calls_behind_it(tmp_path: Path):
    reader = reader_for(tmp_path, THINKING)
    tools = [{"function": {"name": "f", "parameters": {}}}]
    request = ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "q"}], "tools": tools})
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'

    def answer() -> ChatAnswer:
        policy = Policy(model_id="m", version=1, weights=None, switches={})
        return ChatAnswer(request, policy, [1], str, Readers(reader.tokenizer))

    def piece(text: str, *, last: bool) -> RowPiece:
        return RowPiece(index=0, text=text, token_ids=[5], logprobs=[-1.0], alternatives=[[]], finish="stop" if last else None)

    (choice,) = answer().whole([piece(f"<think>\nhm\n</think>\n\nso {call}", last=True)])["choices"]
    message = choice["message"]
    assert (message["reasoning"], message["reasoning_content"], message["content"]) == ("hm", "hm", "so")
    assert [made["function"]["name"] for made in message["tool_calls"]] == ["f"]
    streamed = answer()
    deltas = [
        chunk["choices"][0]["delta"]
        for text, last in (("<think>\nh", False), ("m\n</think>\n\nso ", False), (call, True))
        for chunk in streamed.chunks(piece(text, last=last))
    ]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "hm"
    assert "".join(delta.get("content") or "" for delta in deltas) == "so"
    assert [delta.get("reasoning") == delta.get("reasoning_content") for delta in deltas] == [True] * 3
    assert deltas[-1]["tool_calls"][0]["function"]["name"] == "f"
