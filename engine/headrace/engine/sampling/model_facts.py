"""What an engine knows of its model next to the weights: vocabulary, context, and the tokens that end a turn."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Read once; the same for every version of a base model."""

    vocabulary: int
    context: int
    """Positions: prompt and generated tokens together."""
    stop_ids: frozenset[int]
    """The end-of-sequence tokens of the model and of its tokenizer."""

    def check(self, prompt: Sequence[int], max_tokens: int, what: str) -> None:
        """Refuse what the model can't take.

        Args:
            prompt: Token ids.
            max_tokens: New tokens at most.
            what: How the message names the prompt.

        Raises:
            ValueError: says which of both is wrong, and where.
        """
        if not prompt:
            raise ValueError(f"{what} is empty: at least one token or message is needed")
        if len(prompt) + max_tokens > self.context:
            raise ValueError(
                f"{what} has {len(prompt)} tokens; with max_tokens={max_tokens} that is more than the model's {self.context} positions"
            )
        wrong = next((token_id for token_id in prompt if not 0 <= token_id < self.vocabulary), None)
        if wrong is not None:
            raise ValueError(f"{what}: token id {wrong} is outside the vocabulary of {self.vocabulary}")


def facts_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> ModelFacts:
    """The facts of a model with its tokenizer."""
    config = model.config.get_text_config()
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return ModelFacts(
        vocabulary=config.vocab_size,
        context=config.max_position_embeddings,
        stop_ids=frozenset(token_id for token_id in [*ids, tokenizer.eos_token_id] if token_id is not None),
    )
