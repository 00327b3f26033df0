"""What a conversation is made of: messages, sampled choices with their log-probabilities and token ids, tools.

The shapes are those of OpenAI chat completions as the training-jobs API sends them. A message item is a `Choice` if it has
`finish_reason` or `message`, and no `role`; otherwise it is a context `Message`. Headrace adds to a choice: `token_ids`,
`token_logprobs` (plain arrays, the compact form of `logprobs.content`), `policy_versions` (per token) and `prompt_token_ids`.

Guarantees: types only; whether lengths agree is the codec's business (`turns.py`), so that one rule serves both encodings.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from headrace.schemas.base import Open

Role = Literal["developer", "system", "user", "assistant", "tool", "function"]
FinishReason = Literal["stop", "length", "tool_calls", "content_filter", "function_call", "abort"]
"""Of a choice; `abort` (an engine that was told to drop the request) and null say that the turn was cut off, like `length`."""


class ToolFunction(Open):
    """The function that a tool offers; `parameters` is a JSON Schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Open):
    """A tool the agent may call."""

    type: str = "function"
    function: ToolFunction


def _check_arguments(value: Any) -> Any:  # noqa: ANN401 - raw JSON
    if not isinstance(value, str | dict):
        raise PydanticCustomError(
            "arguments_type", "the arguments of a call are a JSON object, or its text, not {kind}", {"kind": type(value).__name__}
        )
    return value


Arguments = Annotated[str | dict[str, Any], BeforeValidator(_check_arguments)]


class ToolCallFunction(Open):
    """A called function; `arguments` is JSON text, or an object where a runtime sends it decoded."""

    name: str
    arguments: Arguments = ""


class ToolCall(Open):
    """One call that an assistant turn made."""

    id: str | None = None
    type: str = "function"
    function: ToolCallFunction


class Message(Open):
    """A context message: nothing in it is trained unless `allow_training_without_logprobs` says so."""

    role: Role
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The newer name of `reasoning_content` (vLLM since late 2025)."""
    refusal: str | None = None


class TokenLogprob(Open):
    """One sampled token; `token` is `token_id:<n>` (vLLM's return_tokens_as_token_ids) or text. A null logprob is missing."""

    token: str
    logprob: float | None = None
    bytes: list[int] | None = None
    top_logprobs: list[Any] = Field(default_factory=list)


class ChoiceLogprobs(Open):
    """Log-probabilities of a choice: of its content, or of its refusal."""

    content: list[TokenLogprob] | None = None
    refusal: list[TokenLogprob] | None = None


class ChoiceMessage(Open):
    """What the model said in a choice."""

    role: Literal["assistant"] = "assistant"
    content: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Choice(Open):
    """A sampled assistant turn.

    `finish_reason` must be there, and may be null: the turn was cut off. `token_ids`, `token_logprobs` and `policy_versions` have one entry
    a sampled token; `token_span` is used inside the safetensors form only: `[start, stop)` of this turn in the group's flat arrays.
    """

    finish_reason: FinishReason | None
    index: int = 0
    message: ChoiceMessage
    logprobs: ChoiceLogprobs | None = None
    token_ids: list[int] | None = None
    token_logprobs: list[float | None] | None = None
    policy_versions: list[int | None] | None = None
    prompt_token_ids: list[int] | None = None
    token_span: tuple[int, int] | None = None


def thoughts_of(message: Message | ChoiceMessage) -> dict[str, str]:
    """What the model thought before it spoke, under both names, for readers that know one of them; empty without a thought."""
    thought = message.reasoning_content or message.reasoning
    return {"reasoning_content": thought, "reasoning": message.reasoning or thought} if thought else {}


def is_choice(item: Any) -> bool:  # noqa: ANN401 - called on raw JSON and on models
    """Whether a message item is a sampled choice: it has `finish_reason` or `message`, and no `role`."""
    if isinstance(item, Choice | Message):
        return isinstance(item, Choice)
    return isinstance(item, dict) and ("finish_reason" in item or "message" in item) and "role" not in item


def _tag(item: Any) -> str:  # noqa: ANN401 - as is_choice
    # Pydantic asks for every item of every group, also when it writes: models first.
    kind = type(item)
    return "choice" if kind is Choice or (kind is not Message and is_choice(item)) else "message"


MessageOrChoice = Annotated[Annotated[Choice, Tag("choice")] | Annotated[Message, Tag("message")], Discriminator(_tag)]
