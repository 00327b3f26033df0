"""Trajectories with sequences longer than what is trained on: refused, or cut, by the model's policy (`BatchPolicy.over_long`).

Asked at admission with the limits of model and base, and at the cut with the row length of the job, which is known only then.
Guarantees: no sequence above the limit comes through; a cut sequence without a trainable token is left out, and a trajectory with none left
is refused. Limitations: what was sampled beyond the limit.
"""

from dataclasses import dataclass

from headrace.schemas.training import ModelSettings
from headrace.trainer.groups import TokenSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseLimits:
    """What a base model can read."""

    vocabulary: int
    """Token ids are below."""
    positions: int | None
    """Tokens of the longest sequence; None: its config names no bound."""

    def longest(self, settings: ModelSettings) -> int:
        """Tokens of the longest sequence that a model with this base is trained on."""
        bounds = (settings.max_sequence_tokens, settings.train.packed_sequence_length, self.positions)
        return min(bound for bound in bounds if bound is not None)


class OverLongError(Exception):
    """The trajectory does not fit; the message says how long it is, or that nothing of it is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """What is trained on of a trajectory."""

    sequences: tuple[TokenSequence, ...]
    truncated: int
    """How many sequences were cut."""


def fit(sequences: tuple[TokenSequence, ...], limit: int, *, truncate: bool) -> Fitted:
    """The sequences within `limit` tokens each.

    Raises:
        OverLongError: one is longer and `truncate` is off, or nothing trainable is left.
    """
    longest = max((len(sequence) for sequence in sequences), default=0)
    if longest <= limit:
        return Fitted(sequences=sequences, truncated=0)
    if not truncate:
        raise OverLongError(f"a sequence of {longest} tokens, at most {limit} are trained on")
    kept = tuple(sequence.head(limit) for sequence in sequences if sequence.trainable[:limit].any())
    if not kept:
        raise OverLongError(f"no sampled token is left within {limit} tokens")
    return Fitted(sequences=kept, truncated=sum(len(sequence) > limit for sequence in sequences))
