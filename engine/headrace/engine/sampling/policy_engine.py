"""One base model that samples for several policies: each is a set of weights held next to it by name.

Guarantees: a batch is of one policy, from its first token to its last. Limitations: being called from two threads; the process that owns
it has one thread for it. `threads` is torch's setting for the whole process.
"""

from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from headrace.engine.sampling.decoding import Alternatives, SeededDraw, decode
from headrace.engine.sampling.engine_weights import EngineWeights, facts_of
from headrace.engine.sampling.sampled_row import SampledRow


class PolicyEngine:
    """A causal LM with its tokenizer. All of it blocks.

    Args:
        base_path: Folder of a Hugging Face model with its tokenizer.
        gguf_file: File name inside it, where the weights are GGUF.
        threads: Torch threads of this process; None leaves torch's own setting.
        device: Where it runs; float32 everywhere.
    """

    def __init__(self, base_path: Path | str, *, gguf_file: str | None = None, threads: int | None = None, device: str = "cpu") -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(base_path, gguf_file=gguf_file)
        self._weights = EngineWeights(Path(base_path), gguf_file=gguf_file, device=device)
        self._device = torch.device(device)
        self.facts = facts_of(self._weights.base, self.tokenizer)

    def read(self, folder: Path) -> dict[str, torch.Tensor]:
        """The tensors of a folder; may run in a thread of its own, while another samples.

        Raises:
            WeightsMismatchError: none, or not readable.
        """
        return self._weights.read(folder)

    def hold(self, name: str, folder: Path, tensors: dict[str, torch.Tensor], over: str | None = None) -> None:
        """See `EngineWeights.hold`."""
        self._weights.hold(name, folder, tensors, over)

    def drop(self, name: str) -> None:
        """Forget weights; what is not held is no error."""
        self._weights.drop(name)

    def sample(self, weights: str | None, rows: Sequence[SampledRow]) -> None:
        """Sample rows, as one batch, to their ends. None: with the base model."""
        wanted = [row for row in rows if row.wanted]
        if not wanted:
            return
        requests = [row.request for row in wanted]
        longest = max(request.max_tokens for request in requests)

        def told(row: int, token_id: int, logprob: float, alternatives: Alternatives) -> bool:
            return wanted[row].take(token_id, logprob, alternatives)

        decode(
            self._weights.use(weights),
            [request.prompt for request in requests],
            max_tokens=longest,
            stop_ids=frozenset(),  # each row has its own
            draw=SeededDraw([request.draw for request in requests], longest, self._device),
            on_token=told,
            alternatives=max(request.alternatives for request in requests),
        )

    def text_of(self, token_ids: Sequence[int], *, special: bool = False, kept: Collection[int] = ()) -> str:
        """Token ids as text, without special tokens, unless all or the `kept` ones are asked for."""
        if kept:
            return str(self.tokenizer.decode([i for i in token_ids if i in kept or i not in self._special], skip_special_tokens=False))
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=not special))

    @cached_property
    def _special(self) -> frozenset[int]:
        marked = (token_id for token_id, token in self.tokenizer.added_tokens_decoder.items() if token.special)
        return frozenset({*self.tokenizer.all_special_ids, *marked})
