"""Responses of OpenAI-compatible engines as items of a trajectory.

    response = await client.chat.completions.create(..., logprobs=True, extra_body={"return_token_ids": True})
    trajectory = Trajectory(messages_and_choices=[question, choice_from_openai(response)], reward=1.0)

Guarantees: a choice has the token ids and log-probabilities that the engine reports, and one of each for every token. The response is not
changed. Limitations: streamed chunks are not read; use the whole response.
"""

import json
from collections.abc import Mapping
from typing import Any, Protocol

from pydantic import ValidationError

from headrace.schemas.chat import Choice, Message, ToolCall
from headrace.schemas.turns import ids_of_tokens

_HOW = "ask the engine for them with logprobs and return_token_ids, or pass need_tokens=False to train on text"


class _Model(Protocol):
    def model_dump(self) -> dict[str, Any]: ...


Response = Mapping[str, Any] | _Model
"""The JSON of a response, or the object of the `openai` package (any pydantic model)."""


def choice_from_openai(response: Response, index: int = 0, *, need_tokens: bool = True) -> Choice:
    """One choice of a chat completion, with its tokens, as an item of `messages_and_choices`.

    Args:
        response: A whole chat completion.
        index: Position in `choices`.
        need_tokens: Whether token ids, log-probabilities and the prompt's token ids must be there.

    Raises:
        ValueError: the response has no such choice, or lacks tokens that are needed.
    """
    body, found = _found(response, index)
    if not isinstance(found.get("message"), Mapping):
        raise ValueError(f"choices[{index}] has no message: pass a chat completion, or call choice_from_completion")  # noqa: TRY004 - one kind of error for a response that does not fit
    entries = (found.get("logprobs") or {}).get("content") or (found.get("logprobs") or {}).get("refusal")
    tokens = None if entries is None else [(entry["token"], entry["logprob"]) for entry in entries]
    return _choice(body, index, found["message"], tokens, need_tokens=need_tokens)


def choice_from_completion(response: Response, index: int = 0, *, need_tokens: bool = True) -> Choice:
    """One choice of a text completion; its text becomes the content of an assistant message.

    Args:
        response: A whole text completion.
        index: Position in `choices`.
        need_tokens: As for `choice_from_openai`.

    Raises:
        ValueError: the response has no such choice, or lacks tokens that are needed.
    """
    body, found = _found(response, index)
    if not isinstance(found.get("text"), str):
        raise ValueError(f"choices[{index}] has no text: pass a text completion, or call choice_from_openai")  # noqa: TRY004 - one kind of error for a response that does not fit
    logprobs = found.get("logprobs")
    tokens = None if logprobs is None else [*zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)]
    return _choice(body, index, {"role": "assistant", "content": found["text"]}, tokens, need_tokens=need_tokens)


def tool_message(call: ToolCall, result: object) -> Message:
    """The answer to a tool call, for the trajectory and (by `model_dump(exclude_none=True)`) for the next request.

    Args:
        call: From `choice.message.tool_calls`.
        result: Text, or a value that is written as JSON.
    """
    content = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    return Message(role="tool", tool_call_id=call.id, name=call.function.name, content=content)


def _found(response: Response, index: int) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    body = response if isinstance(response, Mapping) else response.model_dump()
    choices = body.get("choices")
    if not isinstance(choices, list) or not 0 <= index < len(choices):
        count = len(choices) if isinstance(choices, list) else 0
        raise ValueError(f"the response has {count} choices, and none at {index}: pass the whole response of a completion")
    return body, choices[index]


def _choice(
    body: Mapping[str, Any], index: int, message: Mapping[str, Any], tokens: list[tuple[str, float | None]] | None, *, need_tokens: bool
) -> Choice:
    found = body["choices"][index]
    scores = None if tokens is None else [score for _, score in tokens]
    ids = found.get("token_ids")
    if ids is None and tokens is not None:
        ids = ids_of_tokens(name for name, _ in tokens) if tokens else []
    # A batch of prompts has one list for each choice; only a single prompt is on the response itself.
    prompt = found.get("prompt_token_ids") or body.get("prompt_token_ids")
    lacks = [name for name, value in (("token ids", ids), ("logprobs", scores), ("prompt token ids", prompt)) if value is None]
    if lacks and need_tokens:
        raise ValueError(f"choices[{index}] has no {' and no '.join(lacks)}: {_HOW}")
    if ids is not None and scores is not None and len(ids) != len(scores):
        raise ValueError(
            f"choices[{index}] has {len(ids)} token ids but {len(scores)} logprobs: the engine must report both for each token"
        )
    versions = found.get("policy_versions")
    if versions is None and ids is not None and body.get("policy_version") is not None:
        versions = [body["policy_version"]] * len(ids)
    try:
        return Choice.model_validate(
            {
                "finish_reason": found.get("finish_reason"),
                "index": found.get("index", index),
                "message": {name: value for name, value in message.items() if value is not None},
                "token_ids": ids,
                "token_logprobs": None if ids is None else scores,
                "prompt_token_ids": prompt,
                "policy_versions": versions,
            }
        )
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"choices[{index}].{where}: {first['msg']}") from error
