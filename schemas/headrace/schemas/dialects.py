"""What requests and answers of the four inference dialects say, as chat messages and plain token ids.

Chat completions are taken as they are; `/responses` and Anthropic's `/messages` become the messages that a chat template takes.
Guarantees: pure; a request that is no conversation raises `DialectError` with the path. Limitations: hosted tools (web search) are left
out; what is no text stays a content part of its own type, which the tokenizer refuses by name.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import orjson

Json = dict[str, Any]

_TOKEN_ID = re.compile(r"token_id:(\d{1,10})", re.ASCII)
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_STOPS = {"max_tokens": "length", "model_context_window_exceeded": "length", "tool_use": "tool_calls", "refusal": "content_filter"}


class DialectError(Exception):
    """A request or an answer that can't be read; says where and why."""

    def __init__(self, path: str, detail: str) -> None:
        super().__init__(f"{path}: {detail}")
        self.path = path
        self.detail = detail


def without_nulls(value: Json) -> Json:
    """Clients write every field that they know of."""
    return {key: item for key, item in value.items() if item is not None}


def chat(request: Json) -> tuple[list[Json], list[Json] | None]:
    """Conversation and tools of a chat completion's request."""
    messages = [without_nulls(item) for item in _dicts(request.get("messages"), "request.messages")]
    return messages, _list_or_none(request.get("tools"))


def responses(request: Json) -> tuple[list[Json], list[Json] | None]:
    """Conversation and tools of a request for a response."""
    asked, instructions = request.get("input"), request.get("instructions")
    messages: list[Json] = [{"role": "system", "content": instructions}] if isinstance(instructions, str) and instructions else []
    if isinstance(asked, str):
        messages.append({"role": "user", "content": asked})
    else:
        messages += response_items(_dicts(asked or [], "request.input"))
    return messages, _functions(request.get("tools"), "parameters")


def messages(request: Json) -> tuple[list[Json], list[Json] | None]:
    """Conversation and tools of a request for an Anthropic message."""
    system = _content(request.get("system"))
    found: list[Json] = [{"role": "system", "content": system}] if system else []
    for i, item in enumerate(_dicts(request.get("messages"), "request.messages")):
        blocks = item.get("content")
        if item.get("role") == "assistant":
            spoken = {"content": blocks} if isinstance(blocks, str) else message_of(_dicts(blocks, f"request.messages[{i}].content"))
            found.append({"role": "assistant", **spoken})
        else:
            found += _user_blocks(item, i)
    return found, _functions(request.get("tools"), "input_schema")


def message_of(blocks: Iterable[Json]) -> Json:
    """Anthropic's content blocks as the message of a choice."""
    text, thought, calls = [], [], []
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            text.append(str(block.get("text") or ""))
        elif kind == "thinking":
            thought.append(str(block.get("thinking") or ""))
        elif kind == "tool_use":
            calls.append(_call(block.get("id"), block.get("name"), orjson.dumps(block.get("input") or {}).decode()))
    return _spoken("".join(text), "".join(thought), calls)


def message_end(stop_reason: str | None) -> str | None:
    """Anthropic's stop reason as a finish reason; an answer that was broken off has none."""
    return None if stop_reason is None else _STOPS.get(stop_reason, "stop")


def response_items(items: Iterable[Json]) -> list[Json]:
    """Items of a response's input or output as messages: what follows each other of one assistant turn is one message."""
    found: list[Json] = []
    turn: list[Json] = []
    for item in items:
        kind = item.get("type", "message")
        if kind in {"reasoning", "function_call"} or (kind == "message" and item.get("role") == "assistant"):
            turn.append(item)
            continue
        if turn:
            found.append(response_message(turn))
            turn = []
        if kind == "function_call_output":
            output = item.get("output")
            text = output if isinstance(output, str) else _content(output)
            found.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
        elif kind == "message":
            found.append({"role": item.get("role", "user"), "content": _content(item.get("content"))})
    if turn:
        found.append(response_message(turn))
    return found


def response_message(items: Iterable[Json]) -> Json:
    """Items that an assistant turn put out as the message of a choice."""
    text, thought, calls = [], [], []
    for item in items:
        kind = item.get("type", "message")
        if kind == "message":
            content = _content(item.get("content"))
            text.append(content if isinstance(content, str) else "")
        elif kind == "reasoning":
            parts = item.get("content") or item.get("summary") or []
            thought += [str(part.get("text") or "") for part in parts if isinstance(part, dict)]
        elif kind == "function_call":
            calls.append(_call(item.get("call_id"), item.get("name"), str(item.get("arguments") or "")))
    return _spoken("".join(text), "".join(thought), calls)


def response_end(status: str | None, message: Json) -> str:
    """A response's status as a finish reason."""
    if status == "incomplete":
        return "length"
    return "tool_calls" if message.get("tool_calls") else "stop"


def prompts(prompt: Any) -> list[str | list[int]]:  # noqa: ANN401 - raw JSON
    """Prompts of a completion's request: texts, or token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        return []
    return [prompt] if all(type(item) is int for item in prompt) else list(prompt)


def ids_of_texts(tokens: list[str] | None) -> list[int] | None:
    """Ids where every token is `token_id:<n>`."""
    found = [_TOKEN_ID.fullmatch(token) for token in tokens or []]
    ids = [int(match[1]) for match in found if match is not None]
    return ids if ids and len(ids) == len(found) else None


def without_echo(
    prompt: list[int] | None, ids: list[int], scores: list[float | None] | None
) -> tuple[list[int] | None, list[float | None] | None]:
    """What was sampled, where the answer repeats the prompt before it; no ids where it can't be told."""
    if not prompt:
        return None, None
    n = len(prompt)
    sampled = ids[n:] if ids[:n] == prompt else ids
    if scores is not None and len(scores) == n + len(sampled):
        scores = scores[n:]
    return sampled, scores


def pairs(tokens: list[Json]) -> tuple[list[int] | None, list[float | None] | None]:
    """Ids and log-probabilities of `output_tokens`; none where one has no id."""
    ids: list[int] = []
    for token in tokens:
        match = _TOKEN_ID.fullmatch(str(token.get("token")))
        token_id = token.get("token_id", int(match[1]) if match is not None else None)
        if type(token_id) is not int:
            return None, None
        ids.append(token_id)
    return ids, [token.get("logprob") for token in tokens]


def count_entries(logprobs: Json | None) -> int:
    """Tokens of which a chat choice has log-probabilities."""
    return len(_entries(logprobs))


def has_entries(logprobs: Json | None) -> bool:
    """Whether it has any."""
    return bool(_entries(logprobs))


def has_ids(logprobs: Json | None) -> bool:
    """Whether they say the ids of their tokens."""
    entries = _entries(logprobs)
    return bool(entries) and all(isinstance(e, dict) and _TOKEN_ID.fullmatch(str(e.get("token"))) is not None for e in entries)


def says_something(message: Json) -> bool:
    """Whether a message has text, thoughts or calls."""
    return any(message.get(key) for key in ("content", "refusal", "reasoning", "reasoning_content", "tool_calls", "function_call"))


def _entries(logprobs: Json | None) -> list[Any]:
    found = [] if logprobs is None else logprobs.get("content") or logprobs.get("refusal") or []
    return found if isinstance(found, list) else []


def _spoken(text: str, thought: str, calls: list[Json]) -> Json:
    found: Json = {"role": "assistant", "content": text}
    if thought:
        found["reasoning_content"] = thought
    if calls:
        found["tool_calls"] = calls
    return found


def _call(call_id: object, name: object, arguments: str) -> Json:
    return {"id": call_id, "type": "function", "function": {"name": str(name), "arguments": arguments}}


def _user_blocks(item: Json, i: int) -> Iterator[Json]:
    """A user's message: results of tools are messages of their own, before what the user says."""
    blocks = item.get("content")
    if isinstance(blocks, str):
        yield {"role": "user", "content": blocks}
        return
    own: list[Json] = []
    for block in _dicts(blocks, f"request.messages[{i}].content"):
        if block.get("type") == "tool_result":
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": _content(block.get("content")) or ""}
        else:
            own.append(block)
    if own:
        yield {"role": item.get("role", "user"), "content": _content(own)}


def _content(parts: Any) -> str | list[Json] | None:  # noqa: ANN401 - raw JSON
    """Parts of text as one text; with anything else among them, the parts."""
    if parts is None or isinstance(parts, str):
        return parts
    listed = [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    if all(part.get("type") in _TEXT_PARTS or part.get("type") == "refusal" for part in listed):
        return "".join(str(part.get("text") or part.get("refusal") or "") for part in listed)
    return listed


def _functions(tools: Any, schema: str) -> list[Json] | None:  # noqa: ANN401 - raw JSON
    found = [
        {
            "type": "function",
            "function": without_nulls({"name": tool["name"], "description": tool.get("description"), "parameters": tool.get(schema)}),
        }
        for tool in _list_or_none(tools) or []
        if isinstance(tool, dict) and isinstance(tool.get("name"), str) and tool.get("type", "custom") in {"function", "custom"}
    ]
    return found or None


def _list_or_none(value: Any) -> list[Json] | None:  # noqa: ANN401 - raw JSON
    return value if isinstance(value, list) and value else None


def _dicts(value: Any, path: str) -> list[Json]:  # noqa: ANN401 - raw JSON
    if not isinstance(value, list):
        raise DialectError(path, "a list is needed")
    for i, item in enumerate(value):
        if not isinstance(item, dict):
            raise DialectError(f"{path}[{i}]", "an object is needed")
    return value
