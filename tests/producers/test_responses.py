"""Responses of OpenAI-compatible engines become choices with their tokens, or errors that say what to ask for."""

from copy import deepcopy
from typing import Any

import pytest

from headrace.producers import choice_from_completion, choice_from_openai, tool_message
from headrace.schemas.codec import encode_safetensors, sampled
from headrace.schemas.trajectory import Trajectory, TrajectoryGroup

CALL = {"id": "call-1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
CHAT: dict[str, Any] = {
    "object": "chat.completion",
    "policy_version": 3,
    "prompt_token_ids": [1, 2],
    "choices": [
        {
            "index": 0,
            "finish_reason": "tool_calls",
            "message": {"role": "assistant", "content": None, "tool_calls": [CALL]},
            "token_ids": [7, 8],
            "logprobs": {"content": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -0.25}], "refusal": None},
        }
    ],
}
TEXT: dict[str, Any] = {
    "object": "text_completion",
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "text": "4",
            "prompt_token_ids": [1],
            "logprobs": {"tokens": ["token_id:7"], "token_logprobs": [-0.5]},
        }
    ],
}


def chat(**changes: object) -> dict[str, Any]:
    response = deepcopy(CHAT)
    response["choices"][0].update(changes)
    return response


def test_a_chat_completion_becomes_a_choice_with_its_tokens_and_versions() -> None:
    before = deepcopy(CHAT)
    choice = choice_from_openai(CHAT)
    assert before == CHAT
    assert (choice.token_ids, choice.token_logprobs, choice.prompt_token_ids) == ([7, 8], [-0.5, -0.25], [1, 2])
    assert choice.policy_versions == [3, 3]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    answer = tool_message(choice.message.tool_calls[0], {"sum": 4})
    assert (answer.role, answer.tool_call_id, answer.name, answer.content) == ("tool", "call-1", "add", '{"sum": 4}')
    group = TrajectoryGroup(trajectories=[Trajectory(messages_and_choices=[choice, answer], reward=1.0)])
    assert encode_safetensors(sampled(group))


def test_an_object_of_a_client_is_read_as_its_json() -> None:
    class FromClient:
        def model_dump(self) -> dict[str, Any]:
            return deepcopy(CHAT)

    assert choice_from_openai(FromClient()) == choice_from_openai(CHAT)


def test_a_text_completion_whose_tokens_are_written_as_ids_becomes_a_choice() -> None:
    choice = choice_from_completion(TEXT)
    assert (choice.message.content, choice.token_ids, choice.token_logprobs, choice.prompt_token_ids) == ("4", [7], [-0.5], [1])
    assert choice.policy_versions is None


@pytest.mark.parametrize(
    ("response", "message"),
    [
        ({}, "0 choices"),
        (chat(logprobs=None), "has no logprobs: ask the engine"),
        (chat(token_ids=None), "has no token ids"),
        (chat(token_ids=[7]), "1 token ids but 2 logprobs"),
        (chat(message=None), "call choice_from_completion"),
        (chat(finish_reason="tired"), r"choices\[0\].finish_reason"),
        (TEXT, "call choice_from_completion"),
    ],
)
def test_what_is_missing_is_an_error_that_says_what_to_do(response: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choice_from_openai(response)


def test_text_alone_is_a_choice_where_tokens_are_not_needed() -> None:
    choice = choice_from_openai(chat(logprobs=None, token_ids=None), need_tokens=False)
    assert choice.token_ids is None
    assert choice.token_logprobs is None


def test_a_chat_completion_is_no_text_completion() -> None:
    with pytest.raises(ValueError, match="call choice_from_openai"):
        choice_from_completion(CHAT)
