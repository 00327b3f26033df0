"""A rollout engine in the agent's own process: a Hugging Face causal LM that samples with log-probabilities and swaps its weights.

Guarantees: every token comes with its id, its log-probability at temperature 1 and the policy version that drew it; weights change between
calls of `generate`, never inside one; a folder that does not fit is refused and the engine continues with what it has; the same seed and
the same sequence of calls and swaps give the same tokens. Limitations: continuous batching and concurrent calls (one at a time, others
wait); what comes in one call is one batch. `threads` is torch's setting for the whole process.
"""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from headrace.engine.sampling.decoding import decode, draw_from
from headrace.engine.sampling.engine_weights import EngineWeights, facts_of
from headrace.engine.sampling.generation import ChatMessage, Generation, continuation, prompt_ids
from headrace.schemas.chat import Tool

Request = Sequence[ChatMessage] | Sequence[int]
"""A conversation, or the token ids of a prompt."""


class LocalEngine:
    """A causal LM that generates and takes new weights. Blocks: from asyncio use `asyncio.to_thread(engine.generate, …)`.

    Args:
        base_path: Folder of a Hugging Face model with its tokenizer; policy version 0.
        gguf_file: File name inside it, where the weights are GGUF.
        threads: Torch threads of this process; None leaves torch's own setting.
        seed: Of the engine's own random generator.
        device: Where it runs; float32 everywhere.
        chat_template_kwargs: Switches of the chat template (`enable_thinking`): the model's own `chat_template_kwargs`.
    """

    def __init__(
        self,
        base_path: Path | str,
        *,
        gguf_file: str | None = None,
        threads: int | None = None,
        seed: int = 0,
        device: str = "cpu",
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self.tokenizer = AutoTokenizer.from_pretrained(base_path, gguf_file=gguf_file)
        self._weights = EngineWeights(Path(base_path), gguf_file=gguf_file, device=device, keep_base=False)
        self._generator = torch.Generator(device).manual_seed(seed)
        self._switches = dict(chat_template_kwargs or {})
        self._lock = threading.Lock()
        self._version = 0
        self._held: str | None = None
        self._loads = 0
        self._facts = facts_of(self._weights.base, self.tokenizer)

    @property
    def policy_version(self) -> int:
        """The version that the next call samples from."""
        return self._version

    def generate(
        self,
        requests: Sequence[Request],
        *,
        max_tokens: int,
        tools: Sequence[Tool] | None = None,
        stop_token_ids: Sequence[int] | None = None,
    ) -> list[Generation]:
        """Sample one turn for each request, as one batch, at temperature 1.

        Args:
            requests: Conversations, or prompts as token ids. For several rollouts of one prompt, repeat it.
            max_tokens: New tokens of a turn at most.
            tools: Shown to the chat template, for every conversation.
            stop_token_ids: Ids that end a turn; None: the model's end-of-sequence tokens.

        Raises:
            ValueError: an empty prompt, an id outside the vocabulary, a prompt too long for the model's context.
            ChatTemplateError: messages that the template can't render.
        """
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {max_tokens}")
        if not requests:
            return []
        prompts = [self._prompt(request, tools) for request in requests]
        for i, prompt in enumerate(prompts):
            self._facts.check(prompt, max_tokens, f"requests[{i}]")
        stop_ids = self._facts.stop_ids if stop_token_ids is None else frozenset(stop_token_ids)
        with self._lock:
            version = self._version
            model = self._weights.use(self._held)
            rows = decode(model, prompts, max_tokens=max_tokens, stop_ids=stop_ids, draw=draw_from(self._generator))
        return [
            Generation(
                text=str(self.tokenizer.decode(row.token_ids, skip_special_tokens=True)),
                prompt_token_ids=prompt,
                token_ids=row.token_ids,
                logprobs=row.logprobs,
                policy_versions=[version] * len(row.token_ids),
                finish_reason="stop" if row.stopped else "length",
            )
            for prompt, row in zip(prompts, rows, strict=True)
        ]

    def prompt_after(self, before: Generation, messages: Sequence[ChatMessage], tools: Sequence[Tool] | None = None) -> list[int]:
        """Prompt token ids of the next turn: all tokens of the turn before, unchanged, then the new context messages.

        Raises:
            ChatTemplateError: messages that the template can't render.
        """
        return continuation(self.tokenizer, before, messages, tools, self._switches)

    def load(self, folder: Path, version: int) -> None:
        """Take the weights in a folder: full (`*.safetensors`), or a LoRA adapter (`adapter_config.json`).

        Files are read while another thread may generate; the swap itself waits for that call to end.

        Args:
            folder: Verified already: a corrupt safetensors file can load without an error.
            version: Policy version that tokens are marked with from the next call on.

        Raises:
            WeightsMismatchError: it does not fit; the engine continues with what it has.
        """
        tensors = self._weights.read(folder)
        with self._lock:
            self._loads += 1
            name = f"v{version}-{self._loads}"  # never used again, also where a version is loaded twice
            self._weights.hold(name, folder, tensors, over=self._held)
            self._held, self._version = name, version

    def reset(self) -> None:
        """Back to the base model, policy version 0."""
        with self._lock:
            if self._held is not None:
                self._weights.drop(self._held)
            self._held, self._version = None, 0

    def _prompt(self, request: Request, tools: Sequence[Tool] | None) -> list[int]:
        token_ids = [item for item in request if isinstance(item, int)]
        messages = [item for item in request if not isinstance(item, int)]
        if token_ids and messages:
            raise ValueError("a request is messages or token ids, not both")
        return prompt_ids(self.tokenizer, messages, tools, self._switches) if messages else token_ids
