"""Captured exchanges: requests to a model and its answers, verbatim, in four dialects, as `openpipe-art` records them.

`calls_of` reads them into one form: a `Call` is what one choice of one answer sampled, behind which prompt, in which conversation. Ids come
from the answer only; a streamed answer is recorded as the one that it adds up to. The process that captures calls reads them with this
module.

Guarantees: ids, log-probabilities and versions of a call have one length, or a `CodecError` with the path; a call without ids says why.
Versions: of each token, where the answer names them (`policy_versions`, `policy_token_spans`), else of the answer (`policy_version`), else
of its model's name (`NAME:step3`, `NAME@3`). Limitations: an echoed prompt is read only where the answer has the prompt's ids; pictures
stay content that the tokenizer refuses.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import Annotated

from pydantic import AfterValidator, Field

from headrace.schemas import dialects
from headrace.schemas.base import Open
from headrace.schemas.dialects import Json
from headrace.schemas.reasons import CodecError
from headrace.schemas.reasons import DeadLetterReason as Reason

_SUFFIX = re.compile(r"(?::(?:step|v)(\d+)|@(\d+)|:latest|@latest(?:-served)?)$")


def _utc(value: datetime) -> datetime:
    return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


Moment = Annotated[datetime, AfterValidator(_utc)]


class PolicySpan(Open):
    """Tokens `[start_token, end_token)` of a choice, and the version that sampled them."""

    start_token: int = Field(ge=0)
    end_token: int = Field(ge=0)
    policy_version: int = Field(ge=0)


class Sampled(Open):
    """What an engine says of the tokens that it sampled; all optional. It stands in a choice, in a generation, or in the answer."""

    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    compact_logprobs: list[float | None] | None = None
    art_completion_logprobs: list[float | None] | None = None
    policy_versions: list[int] | None = None
    policy_token_spans: list[PolicySpan] | None = None

    @property
    def scores(self) -> list[float | None] | None:
        """Log-probabilities as a plain list, one for each of `token_ids`."""
        return self.art_completion_logprobs if self.compact_logprobs is None else self.compact_logprobs


class ChatChoice(Sampled):
    """Of a chat completion."""

    index: int = 0
    finish_reason: str | None = None
    message: Json
    logprobs: Json | None = None


class TextLogprobs(Open):
    """Of a completion."""

    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None


class TextChoice(Sampled):
    """Of a completion."""

    index: int = 0
    finish_reason: str | None = None
    text: str = ""
    logprobs: TextLogprobs | None = None


class Answer(Open):
    """What every answer may say."""

    model: str | None = None
    policy_version: int | None = Field(default=None, ge=0)


class ChatAnswer(Answer):
    """`/chat/completions`."""

    choices: list[ChatChoice]
    prompt_token_ids: list[int] | None = None


class TextAnswer(Answer):
    """`/completions`."""

    choices: list[TextChoice]
    prompt_token_ids: list[int] | None = None


class Generation(Sampled):
    """One sampling inside of a response, which may call tools between two."""

    output_tokens: list[Json] | None = None
    output_indices: list[int] = Field(default_factory=list)


class ResponseAnswer(Answer):
    """`/responses`."""

    output: list[Json] = Field(default_factory=list)
    status: str | None = None
    token_generations: list[Generation] | None = None


class MessageAnswer(Sampled, Answer):
    """Anthropic's `/messages`."""

    content: list[Json] = Field(default_factory=list)
    stop_reason: str | None = None
    logprobs: list[float | None] | None = None


class Exchange(Open):
    """One request and its answer."""

    start_time: Moment
    end_time: Moment | None = None
    request: Json
    model: str | None = None


class ChatExchange(Exchange):
    """`/chat/completions`."""

    response: ChatAnswer


class TextExchange(Exchange):
    """`/completions`."""

    response: TextAnswer


class ResponseExchange(Exchange):
    """`/responses`."""

    response: ResponseAnswer


class MessageExchange(Exchange):
    """`/messages`."""

    response: MessageAnswer


class Exchanges(Open):
    """Those of one trajectory."""

    chat_completions: list[ChatExchange] = Field(default_factory=list)
    completions: list[TextExchange] = Field(default_factory=list)
    responses: list[ResponseExchange] = Field(default_factory=list)
    messages: list[MessageExchange] = Field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.chat_completions or self.completions or self.responses or self.messages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What one choice of one answer sampled."""

    path: str
    """Of the exchange, as `exchanges.chat_completions[3]`."""
    began: datetime
    ended: datetime
    model: str | None
    """As the request names it, without a version."""
    conversation: list[Json]
    """Chat messages before the answer; assistant messages among them are context."""
    tools: list[Json] | None
    choice: Json
    """A raw choice: `message`, `finish_reason`, and its tokens as `headrace.schemas.turns.lift` takes them."""
    lacks: str | None = None
    """Why the tokens that were sampled are not known; None where they are."""


def calls_of(exchanges: Exchanges) -> list[Call]:
    """All calls, in the order of their times.

    Raises:
        CodecError: an exchange contradicts itself; the path begins with `exchanges`.
    """
    found: list[Call] = []
    for name, read in (("chat_completions", _chat), ("completions", _text), ("responses", _responses), ("messages", _messages)):
        for i, exchange in enumerate(getattr(exchanges, name)):
            path = f"exchanges.{name}[{i}]"
            try:
                found.extend(read(exchange, path))
            except dialects.DialectError as error:
                raise CodecError(Reason.INVALID_SCHEMA, f"{path}.{error.path}", error.detail) from None
    return sorted(found, key=lambda call: (call.began, call.ended))


def _chat(exchange: ChatExchange, path: str) -> Iterator[Call]:
    conversation, tools = dialects.chat(exchange.request)
    answer = exchange.response
    for choice in answer.choices:
        raw: Json = {
            "finish_reason": choice.finish_reason,
            "index": 0,
            "message": dialects.without_nulls(choice.message),
            "logprobs": choice.logprobs,
        }
        ids, scores = choice.token_ids, choice.scores
        if ids == [] and (dialects.says_something(choice.message) or dialects.has_entries(choice.logprobs)):
            ids = None  # an engine that was not asked for them
        if ids is not None and scores is not None:
            raw["logprobs"] = None
            raw["token_logprobs"] = scores
        prompt = choice.prompt_token_ids or answer.prompt_token_ids
        known = ids is not None or dialects.has_ids(choice.logprobs)
        yield _call(exchange, answer, path, raw, choice, ids, prompt, known=known, conversation=conversation, tools=tools)


def _text(exchange: TextExchange, path: str) -> Iterator[Call]:
    answer = exchange.response
    prompts = dialects.prompts(exchange.request.get("prompt"))
    each = max(1, len(answer.choices) // max(1, len(prompts)))
    for choice in answer.choices:
        given = prompts[min(choice.index // each, len(prompts) - 1)] if prompts else None
        prompt = choice.prompt_token_ids or (answer.prompt_token_ids if len(prompts) < 2 else None)
        if prompt is None and isinstance(given, list):
            prompt = given
        logprobs = choice.logprobs or TextLogprobs()
        ids = choice.token_ids
        if ids is None or (ids == [] and (choice.text or logprobs.tokens)):
            ids = dialects.ids_of_texts(logprobs.tokens)
        scores = choice.scores if choice.scores is not None else logprobs.token_logprobs
        if exchange.request.get("echo") and ids is not None:
            ids, scores = dialects.without_echo(prompt, ids, scores)
        raw: Json = {"finish_reason": choice.finish_reason, "index": 0, "message": {"role": "assistant", "content": choice.text}}
        if ids is not None and scores:
            raw["token_logprobs"] = scores
        # A raw prompt is no conversation: without its ids nothing can be put before what was sampled.
        known = ids is not None and bool(prompt)
        yield _call(exchange, answer, path, raw, choice, ids, prompt, known=known, conversation=[], tools=None)


def _responses(exchange: ResponseExchange, path: str) -> Iterator[Call]:
    conversation, tools = dialects.responses(exchange.request)
    answer = exchange.response
    if not answer.token_generations:
        message = dialects.response_message(answer.output)
        raw: Json = {"finish_reason": dialects.response_end(answer.status, message), "index": 0, "message": message}
        yield _call(exchange, answer, path, raw, Sampled(), None, None, known=False, conversation=conversation, tools=tools)
        return
    done = 0
    for generation in answer.token_generations:
        stop = max(generation.output_indices, default=done - 1) + 1
        message = dialects.response_message([answer.output[i] for i in generation.output_indices if i < len(answer.output)])
        ids, scores = generation.token_ids, generation.scores
        if generation.output_tokens is not None and (ids is None or scores is None):
            ids, scores = dialects.pairs(generation.output_tokens)
        raw = {"finish_reason": dialects.response_end(answer.status, message), "index": 0, "message": message}
        if ids is not None and scores:
            raw["token_logprobs"] = scores
        before = [*conversation, *dialects.response_items(answer.output[:done])]
        known = ids is not None and bool(generation.prompt_token_ids)
        yield _call(
            exchange, answer, path, raw, generation, ids, generation.prompt_token_ids, known=known, conversation=before, tools=tools
        )
        done = max(done, stop)


def _messages(exchange: MessageExchange, path: str) -> Iterator[Call]:
    conversation, tools = dialects.messages(exchange.request)
    answer = exchange.response
    ids = None if answer.token_ids == [] and answer.content else answer.token_ids
    scores = answer.scores if answer.scores is not None else answer.logprobs
    raw: Json = {"finish_reason": dialects.message_end(answer.stop_reason), "index": 0, "message": dialects.message_of(answer.content)}
    if ids is not None and scores:
        raw["token_logprobs"] = scores
    known = ids is not None and bool(answer.prompt_token_ids)
    yield _call(exchange, answer, path, raw, answer, ids, answer.prompt_token_ids, known=known, conversation=conversation, tools=tools)


def _call(  # noqa: PLR0917 - one place for what the four dialects share
    exchange: Exchange,
    answer: Answer,
    path: str,
    raw: Json,
    sampled: Sampled,
    ids: list[int] | None,
    prompt: list[int] | None,
    *,
    known: bool,
    conversation: list[Json],
    tools: list[Json] | None,
) -> Call:
    asked = exchange.request.get("model")
    name = asked if isinstance(asked, str) else answer.model or exchange.model
    scores = raw.get("token_logprobs")
    if known and ids is not None and scores is not None and len(scores) != len(ids):
        raise CodecError(Reason.LENGTH_MISMATCH, f"{path}.response", f"{len(ids)} token ids but {len(scores)} log-probabilities")
    if not known:
        for key in ("logprobs", "token_logprobs"):
            raw.pop(key, None)
    else:
        raw |= {"token_ids": ids, "prompt_token_ids": prompt or None}
        count = len(ids) if ids is not None else dialects.count_entries(raw.get("logprobs"))
        raw["policy_versions"] = _versions(sampled, answer, [answer.model, name], count, path)
    return Call(
        path=path,
        began=exchange.start_time,
        ended=exchange.end_time or exchange.start_time,
        model=None if name is None else _SUFFIX.sub("", name),
        conversation=conversation,
        tools=tools,
        choice={key: value for key, value in raw.items() if value is not None or key == "finish_reason"},
        lacks=None if known else f"{path}.response has no token ids: ask the engine for logprobs and return_token_ids",
    )


def _versions(sampled: Sampled, answer: Answer, names: list[str | None], count: int, path: str) -> list[int] | None:
    if sampled.policy_versions is not None:
        return sampled.policy_versions
    if sampled.policy_token_spans:
        spans = sorted(sampled.policy_token_spans, key=lambda span: span.start_token)
        versions = [span.policy_version for span in spans for _ in range(min(span.end_token, count) - span.start_token)]
        gaps = any(after.start_token != before.end_token for before, after in pairwise(spans))
        if spans[0].start_token != 0 or gaps or len(versions) != count:
            raise CodecError(Reason.LENGTH_MISMATCH, f"{path}.response", f"policy_token_spans do not cover the {count} sampled tokens")
        return versions
    if answer.policy_version is not None:
        return [answer.policy_version] * count
    for name in names:
        found = _SUFFIX.search(name or "")
        if found is not None and (found[1] or found[2]):
            return [int(found[1] or found[2])] * count
    return None
