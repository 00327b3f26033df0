"""What clients get: OpenAI's answers, whole or in chunks, with vLLM's token ids and our policy versions.

Guarantees: an answer in chunks, put together, is the whole answer: the same text, calls, tokens and log-probabilities. `token_ids` (where
asked for) are those that were sampled, the stop token included; `policy_versions` has one entry for each. Limitations: bytes of a token
that is half of a character; its text has the replacement character, as elsewhere.
"""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from headrace.engine.http.requests import ChatRequest, CompletionRequest
from headrace.engine.http.tool_calls import ThoughtReader, ThoughtStream, ToolCallReader, ToolCallStream
from headrace.engine.sampling.decoding import Alternatives
from headrace.engine.sampling.sampled_row import RowPiece
from headrace.engine.serving.served_model import Policy
from headrace.schemas.chat import ToolCall

Json = dict[str, Any]
TokenText = Callable[[Sequence[int]], str]
"""Token ids as text, special tokens included."""


class _Answer(ABC):
    """What both kinds have in common.

    Args:
        request: What was asked for.
        policy: What it was sampled from.
        prompts: Token ids, one prompt for each `n` choices.
        text_of: Token ids as text.
    """

    prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self, request: ChatRequest | CompletionRequest, policy: Policy, prompts: Sequence[Sequence[int]], text_of: TokenText
    ) -> None:
        self._policy = policy
        self._prompts = prompts
        self._n = request.n or 1
        self._text_of = text_of
        self._with_ids = bool(request.return_token_ids)
        self._as_ids = bool(request.return_tokens_as_token_ids)
        self._alternatives = request.alternatives
        self._with_usage = bool(request.stream_options and request.stream_options.include_usage)
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": policy.name}
        self._completion_tokens = 0
        self._begun: set[int] = set()

    def whole(self, pieces: Sequence[RowPiece]) -> Json:
        """One piece a row, in order, each with its end."""
        self._completion_tokens = sum(len(piece.token_ids) for piece in pieces)
        answer: Json = {
            **self._head,
            "object": self.whole_object,
            "choices": [{**self._choice(piece), **self._tokens(piece, first=True)} for piece in pieces],
            "usage": self._usage(),
            "system_fingerprint": None,
            "policy_version": self._policy.version,
        }
        if self._with_ids:
            answer["prompt_token_ids"] = list(self._prompts[0])
        return answer

    def chunks(self, piece: RowPiece) -> list[Json]:
        """The chunks that a piece of a row makes."""
        self._completion_tokens += len(piece.token_ids)
        first = piece.index not in self._begun
        self._begun.add(piece.index)
        chunk = {
            **self._head,
            "object": self.chunk_object,
            "choices": [{**self._delta(piece, first=first), **self._tokens(piece, first=first)}],
            "policy_version": self._policy.version,
        }
        if self._with_usage:
            chunk["usage"] = None
        if self._with_ids and first:
            chunk["prompt_token_ids"] = list(self._prompts[piece.index // self._n])
        return [chunk]

    def last_chunk(self) -> Json | None:
        """The usage, where it was asked for."""
        if not self._with_usage:
            return None
        return {**self._head, "object": self.chunk_object, "choices": [], "usage": self._usage(), "policy_version": self._policy.version}

    @abstractmethod
    def _choice(self, piece: RowPiece) -> Json: ...

    @abstractmethod
    def _delta(self, piece: RowPiece, *, first: bool) -> Json: ...

    def _tokens(self, piece: RowPiece, *, first: bool) -> Json:
        """Of one choice, where token ids are asked for."""
        if not self._with_ids:
            return {}
        tokens: Json = {"token_ids": piece.token_ids, "policy_versions": [self._policy.version] * len(piece.token_ids)}
        if first:
            tokens["prompt_token_ids"] = list(self._prompts[piece.index // self._n])
        return tokens

    def _usage(self) -> Json:
        prompt = sum(len(prompt) for prompt in self._prompts)
        return {"prompt_tokens": prompt, "completion_tokens": self._completion_tokens, "total_tokens": prompt + self._completion_tokens}

    def _token(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._text_of([token_id])


class Readers:
    """What is read out of the text of one base model's answers.

    Args:
        tokenizer: Of the base model.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.calls, self.thoughts = ToolCallReader(tokenizer), ThoughtReader(tokenizer)

    def kept_ids(self, request: ChatRequest) -> frozenset[int]:
        """Special tokens that the text must show; the first time it renders with the chat template."""
        return self.thoughts.kept_ids | (self.calls.kept_ids if request.offers_tools else frozenset())


class ChatAnswer(_Answer):
    """`chat.completion`.

    Args:
        request: What was asked for.
        policy: What it was sampled from.
        prompt: Token ids.
        text_of: Token ids as text.
        readers: Of calls, if tools are offered, and of thoughts.
    """

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, request: ChatRequest, policy: Policy, prompt: Sequence[int], text_of: TokenText, readers: Readers) -> None:
        super().__init__(request, policy, [prompt], text_of)
        self._tools = (request.tools or []) if request.offers_tools else []
        self._calls = readers.calls
        self._marks, self._begun_thought = readers.thoughts.marks, readers.thoughts.begun([*prompt])
        self._streams: dict[int, tuple[ThoughtStream, ToolCallStream | None]] = {}

    def _choice(self, piece: RowPiece) -> Json:
        thought, content, calls = self._read(piece)
        message: Json = {"role": "assistant", "content": (content or None) if calls or thought else content, "refusal": None}
        message |= _named(thought)
        if calls:
            message["tool_calls"] = [_call_json(call) for call in calls]
        return {
            "index": piece.index,
            "message": message,
            "logprobs": self._logprobs(piece),
            "finish_reason": _finish(piece, calls),
            "stop_reason": piece.stopped_by,
        }

    def _delta(self, piece: RowPiece, *, first: bool) -> Json:
        thought, content, calls = self._read(piece)
        delta: Json = {"content": content} if content or not (calls or thought) else {}
        if first:
            delta = {"role": "assistant", "content": content}
        delta |= _named(thought)
        if calls:
            delta["tool_calls"] = [{"index": i, **_call_json(call)} for i, call in enumerate(calls)]
        choice: Json = {
            "index": piece.index,
            "delta": delta,
            "logprobs": self._logprobs(piece),
            "finish_reason": _finish(piece, calls),
        }
        if piece.finish is not None:
            choice["stop_reason"] = piece.stopped_by
        return choice

    def _read(self, piece: RowPiece) -> tuple[str, str, list[ToolCall]]:
        """Thought, content and calls that a piece adds."""
        if piece.index not in self._streams:
            calls_of = ToolCallStream(self._calls, self._tools) if self._tools else None
            self._streams[piece.index] = ThoughtStream(self._marks, begun=self._begun_thought), calls_of
        thoughts, stream = self._streams[piece.index]
        thought, content = thoughts.push(piece.text)
        calls: list[ToolCall] = []
        if piece.finish is not None:
            last_thought, rest = thoughts.end()
            thought, content = thought + last_thought, content + rest
        if stream is not None:
            content = stream.push(content)
            if piece.finish is not None:
                rest, calls = stream.end()
                content += rest
        return thought, content, calls

    def _logprobs(self, piece: RowPiece) -> Json | None:
        if self._alternatives is None:
            return None
        entries = zip(piece.token_ids, piece.logprobs, piece.alternatives, strict=True)
        return {
            "content": [
                {**self._entry(token_id, logprob), "top_logprobs": [self._entry(*other) for other in others]}
                for token_id, logprob, others in entries
            ],
            "refusal": None,
        }

    def _entry(self, token_id: int, logprob: float) -> Json:
        return {"token": self._token(token_id), "logprob": logprob, "bytes": list(self._text_of([token_id]).encode())}


class CompletionAnswer(_Answer):
    """`text_completion`."""

    def __init__(self, request: CompletionRequest, policy: Policy, prompts: Sequence[Sequence[int]], text_of: TokenText) -> None:
        super().__init__(request, policy, prompts, text_of)
        self._offsets: dict[int, int] = {}

    def _choice(self, piece: RowPiece) -> Json:
        return {
            "index": piece.index,
            "text": piece.text,
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish,
            "stop_reason": piece.stopped_by,
        }

    def _delta(self, piece: RowPiece, *, first: bool) -> Json:  # noqa: ARG002 - the other kind needs it
        return self._choice(piece)

    def _logprobs(self, piece: RowPiece) -> Json | None:
        if self._alternatives is None:
            return None
        tokens = [self._token(token_id) for token_id in piece.token_ids]
        offsets: list[int] = []
        at = self._offsets.get(piece.index, 0)
        for token in tokens:
            offsets.append(at)
            at += len(token)
        self._offsets[piece.index] = at
        return {
            "tokens": tokens,
            "token_logprobs": piece.logprobs,
            "top_logprobs": [self._best(others) for others in piece.alternatives] if self._alternatives else None,
            "text_offset": offsets,
        }

    def _best(self, others: Alternatives) -> dict[str, float]:
        return {self._token(token_id): logprob for token_id, logprob in others}


def _finish(piece: RowPiece, calls: Sequence[ToolCall]) -> str | None:
    return "tool_calls" if calls and piece.finish == "stop" else piece.finish


def _named(thought: str) -> Json:
    """A thought under both of its names: clients know one or the other."""
    return {"reasoning": thought, "reasoning_content": thought} if thought else {}


def _call_json(call: ToolCall) -> Json:
    return {"id": call.id, "type": call.type, "function": {"name": call.function.name, "arguments": call.function.arguments}}
