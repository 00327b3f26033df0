"""What a local engine generated: tokens with their log-probabilities and policy versions, and the choice they make.

Guarantees: `to_choice` gives the turn exactly as it was sampled, tokens next to the choice (for a `SampledGroup`); `inline_choice` has them
inside (for a plain `TrajectoryGroup`). Imports no torch.
"""

from dataclasses import dataclass
from typing import Literal

from headrace.schemas.chat import Choice, ChoiceMessage
from headrace.schemas.turns import SampledTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One sampled turn; `token_ids`, `logprobs` and `policy_versions` have the same length N.

    Example: `choice, tokens = engine.generate([[1, 2, 3]], max_tokens=8)[0].to_choice()`.
    """

    text: str
    """`token_ids` as text, without special tokens."""
    prompt_token_ids: list[int]
    token_ids: list[int]
    """The stop token included, where one was drawn: it was sampled, so it is trained on."""
    logprobs: list[float]
    """float32, natural logarithm, of the full softmax at temperature 1."""
    policy_versions: list[int]
    """The version that sampled each token."""
    finish_reason: Literal["stop", "length"]

    def to_choice(self) -> tuple[Choice, SampledTokens]:
        """The turn as a choice without tokens, and its tokens as arrays: what `SampledGroup` takes."""
        return self._choice(), SampledTokens.of(self.token_ids, list(self.logprobs), self.policy_versions)

    def inline_choice(self) -> Choice:
        """The turn as one choice that carries its tokens."""
        return self._choice().model_copy(
            update={
                "token_ids": list(self.token_ids),
                "token_logprobs": list(self.logprobs),
                "policy_versions": list(self.policy_versions),
            }
        )

    def _choice(self) -> Choice:
        return Choice(
            finish_reason=self.finish_reason,
            message=ChoiceMessage(content=self.text),
            prompt_token_ids=list(self.prompt_token_ids),
        )
