"""What clients may ask for: OpenAI's fields, vLLM's additions, and what is refused because it would change the sampling.

Guarantees: a field that would make other tokens is honoured or refused by name, never passed over; fields that change nothing about the
tokens are ignored. Log-probabilities are always those of the full softmax at temperature 1, whatever temperature and top_p the tokens were
drawn with: they are what a trainer compares with.
"""

import secrets
from abc import ABC, abstractmethod
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from headrace.engine.http.errors import ApiError
from headrace.engine.sampling.decoding import RowDraw
from headrace.engine.sampling.engine_weights import ModelFacts
from headrace.engine.sampling.sampled_row import RowRequest
from headrace.schemas.base import Open
from headrace.schemas.chat import Message, Tool
from headrace.schemas.parsing import load_json, validate
from headrace.schemas.reasons import CodecError, DeadLetterReason

MOST_CHOICES = 128
_SEEDS = 2**63
_GOLDEN = 0x9E3779B97F4A7C15
"""Spreads the seeds of one request's choices."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "ignore_eos": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("auto", "none"),
    "top_k": (-1, 0),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""Fields that are not built, and the values that change nothing; null is always one of them."""


class StreamOptions(Open):
    """How a stream is written."""

    include_usage: bool | None = None


class SamplingRequest(Open, ABC):
    """What both ways of asking have in common."""

    model: str
    """`<model id>@<version>`, `<model id>`, or the base model's name."""
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """Null: 1. 0: the most probable token."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=256)] | None = None
    """Beside the model's own."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Null: as many as the context has room for."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _nothing_is_passed_over(cls, given: Any) -> Any:  # noqa: ANN401 - raw JSON
        if isinstance(given, dict):
            for name, neutral in _NEUTRAL.items():
                value = given.get(name)
                if value is not None and value not in neutral:
                    allowed = " or ".join([*(repr(one) for one in neutral), "leave it out"])
                    raise ApiError(
                        f"{name}: not built in this engine, and it would change the tokens: {allowed}",
                        param=name,
                        code="unsupported_parameter",
                    )
        return given

    @property
    @abstractmethod
    def alternatives(self) -> int | None:
        """Most probable tokens to tell of each place; None: no log-probabilities at all."""

    @property
    def token_limit(self) -> int | None:
        """New tokens at most."""
        return self.max_tokens

    def rows(self, prompt: list[int], facts: ModelFacts) -> list[RowRequest]:
        """What is asked of the engine: one row for each choice.

        Raises:
            ApiError: the prompt is empty, too long, or has foreign tokens.
        """
        limit = self.token_limit
        if limit is None:
            limit = max(1, facts.context - len(prompt))
        try:
            facts.check(prompt, limit, "the prompt")
        except ValueError as error:
            raise ApiError(str(error), code="context_length_exceeded" if len(prompt) + limit > facts.context else "invalid_value") from None
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if "" in stops:
            raise ApiError("stop: an empty string would end every answer at once: leave it out", param="stop")
        seed = secrets.randbits(63) if self.seed is None else self.seed
        return [
            RowRequest(
                prompt=tuple(prompt),
                draw=RowDraw(
                    seed=(seed + index * _GOLDEN) % _SEEDS,
                    temperature=1.0 if self.temperature is None else self.temperature,
                    top_p=1.0 if self.top_p is None else self.top_p,
                ),
                max_tokens=limit,
                stop_ids=facts.stop_ids | frozenset(self.stop_token_ids or ()),
                stops=stops,
                alternatives=self.alternatives or 0,
                in_pieces=bool(self.stream),
            )
            for index in range(self.n or 1)
        ]


class ChatRequest(SamplingRequest):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, bool | int | float | str] | None = None
    """Switches of the template, over those of the model's settings."""

    @property
    def alternatives(self) -> int | None:
        """See `SamplingRequest`."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        """See `SamplingRequest`."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def offers_tools(self) -> bool:
        """Whether calls are looked for in the answer."""
        return bool(self.tools) and self.tool_choice != "none"

    def check(self) -> None:
        """What fields say together.

        Raises:
            ApiError: log-probabilities of alternatives without log-probabilities, or content that is no text.
        """
        if self.top_logprobs and not self.logprobs:
            raise ApiError("top_logprobs: set logprobs to true as well", param="top_logprobs", code="invalid_value")
        for i, message in enumerate(self.messages):
            for k, part in enumerate(message.content if isinstance(message.content, list) else ()):
                if part.get("type") != "text" or not isinstance(part.get("text"), str):
                    where = f"messages[{i}].content[{k}]"
                    raise ApiError(
                        f"{where}: this engine reads text only: send {{'type': 'text', 'text': …}}", param=where, code="invalid_value"
                    )


class CompletionRequest(SamplingRequest):
    """`POST /v1/completions`."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def alternatives(self) -> int | None:
        """See `SamplingRequest`."""
        return self.logprobs

    @property
    def token_limit(self) -> int | None:
        """See `SamplingRequest`; OpenAI's default here is 16."""
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or several, as text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if all(isinstance(item, int) for item in self.prompt):
            return [[item for item in self.prompt if isinstance(item, int)]]
        return [item for item in self.prompt if not isinstance(item, int)]


def read_chat(body: bytes) -> ChatRequest:
    """Raises: ApiError, CodecError: says which field is wrong, and how."""
    request = validate(ChatRequest, _object(body))
    request.check()
    return request


def read_completion(body: bytes) -> CompletionRequest:
    """Raises: ApiError, CodecError: says which field is wrong, and how."""
    request = validate(CompletionRequest, _object(body))
    if len(request.prompts) * (request.n or 1) > MOST_CHOICES:
        raise ApiError(
            f"prompt: at most {MOST_CHOICES} completions of one request, over all its prompts", param="prompt", code="invalid_value"
        )
    if not request.prompts:
        raise ApiError("prompt: at least one is needed", param="prompt", code="invalid_value")
    return request


def _object(body: bytes) -> dict[str, Any]:
    value = load_json(body)
    if not isinstance(value, dict):
        raise CodecError(DeadLetterReason.INVALID_SCHEMA, "", "the body must be a JSON object")
    return value
