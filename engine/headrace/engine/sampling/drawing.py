"""How the next token is chosen from a softmax: with one generator for the batch, or with a seed of each row's own.

Guarantees: `SeededDraw` gives a row the tokens that its seed, temperature and top_p say, whatever else is in the batch, as far as the
log-probabilities are the same (batches of other shapes round them differently). Temperature 0 takes the most probable token.
Shapes: R rows as they were at first, B rows that are left, V vocabulary, N new tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headrace.engine.sampling.decoding import Draw


def draw_from(generator: torch.Generator) -> Draw:
    """At temperature 1, with one generator for all rows."""

    def draw(logprobs_BV: torch.Tensor, _row_B: torch.Tensor, _n: int) -> torch.Tensor:
        return torch.multinomial(logprobs_BV.exp(), 1, generator=generator)

    return draw


@dataclass(frozen=True, slots=True, kw_only=True)
class RowDraw:
    """How the tokens of one row are chosen."""

    seed: int
    """0 to 2^63 - 1."""
    temperature: float = 1.0
    """0: the most probable token."""
    top_p: float = 1.0
    """Only from the fewest most probable tokens that hold so much; the rest is never drawn."""


class SeededDraw:
    """A `Draw` for rows that differ: each token by one number between 0 and 1 from the row's own generator, and the inverse of the CDF.

    Args:
        rows: Of the batch, in order.
        max_tokens: N, of the longest.
        device: Of the log-probabilities.
    """

    def __init__(self, rows: Sequence[RowDraw], max_tokens: int, device: torch.device) -> None:
        # On the CPU, so that a seed means the same on every device.
        numbers = [torch.rand(max_tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(row.seed)) for row in rows]
        self._uniform_RN = torch.stack(numbers).to(device)
        self._temperature_R = torch.tensor([row.temperature for row in rows], device=device)
        self._top_p_R = torch.tensor([row.top_p for row in rows], device=device)
        self._plain = all(row.temperature == 1 for row in rows)
        self._whole = all(row.top_p == 1 for row in rows)

    def __call__(self, logprobs_BV: torch.Tensor, row_B: torch.Tensor, n: int) -> torch.Tensor:
        """See `Draw`."""
        temperature_B1 = self._temperature_R[row_B, None]
        greedy_B1 = temperature_B1 == 0
        probs_BV = logprobs_BV.exp() if self._plain else torch.softmax(logprobs_BV / torch.where(greedy_B1, 1.0, temperature_B1), dim=-1)
        if not self._whole:
            probs_BV = _nucleus(probs_BV, self._top_p_R[row_B, None])
        cdf_BV = probs_BV.cumsum(dim=-1, dtype=torch.float64)
        # `right`: the first token whose sum is above the number; one of probability 0 is never that.
        drawn_B1 = torch.searchsorted(cdf_BV, self._uniform_RN[row_B, n, None] * cdf_BV[:, -1:], right=True)
        drawn_B1 = drawn_B1.clamp_(max=logprobs_BV.shape[1] - 1)
        return drawn_B1 if self._plain else torch.where(greedy_B1, logprobs_BV.argmax(dim=-1, keepdim=True), drawn_B1)


def _nucleus(probs_BV: torch.Tensor, top_p_B1: torch.Tensor) -> torch.Tensor:
    """What is outside of the nucleus set to 0."""
    sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True)
    outside_BV = sorted_BV.cumsum(dim=-1) - sorted_BV >= top_p_B1
    outside_BV[:, 0] = False
    return sorted_BV.masked_fill(outside_BV, 0.0).new_zeros(probs_BV.shape).scatter_(1, order_BV, sorted_BV.masked_fill(outside_BV, 0.0))
