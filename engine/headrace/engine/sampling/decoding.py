"""The sampling loop of the local engine: a batch of prompts through a Hugging Face causal LM with its own KV cache.

Guarantees: each log-probability is that of the full softmax at temperature 1 in float32, however the token was drawn, so a trainer that
forces the tokens finds it again; a row that is shorter than its neighbours is padded on the left, behind the mask, with positions of its
own. The same batch and the same draws give the same tokens. Limitations: sharing the prefill of equal prompts; rows that join a batch
later. Shapes: B rows, T tokens so far (padding included), V vocabulary, N new tokens, K alternatives.

How the next token is chosen from a softmax: with one generator for the batch, or with a seed of each row's own.

Guarantees: `SeededDraw` gives a row the tokens that its seed, temperature and top_p say, whatever else is in the batch, as far as the
log-probabilities are the same (batches of other shapes round them differently). Temperature 0 takes the most probable token.
Shapes: R rows as they were at first, B rows that are left, V vocabulary, N new tokens.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """What was drawn for one prompt; both lists have the same length."""

    token_ids: list[int]
    """The stop token included, where one was drawn."""
    logprobs: list[float]
    """float32, natural logarithm, temperature 1."""
    stopped: bool
    """By a stop token; otherwise the limit was reached."""


Draw = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""(log-probabilities [B, V], which prompt each row is of [B], how many tokens it has) → a token for each row [B, 1]."""
Alternatives = list[tuple[int, float]]
"""The most probable tokens of one place with their log-probabilities, the first is the most probable."""
OnToken = Callable[[int, int, float, Alternatives], bool]
"""(prompt, token, log-probability, alternatives) as each is drawn; True ends that row."""


@torch.inference_mode()
def decode(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    stop_ids: frozenset[int],
    draw: Draw,
    on_token: OnToken | None = None,
    alternatives: int = 0,
) -> list[Decoded]:
    """Sample one continuation for every prompt.

    Args:
        model: In eval mode; logits [B, T, V].
        prompts: B prompts of at least one token each, every id below V.
        max_tokens: New tokens a row at most, at least 1.
        stop_ids: Ids that end a row.
        draw: How a token is chosen.
        on_token: Told of each token; it may end a row.
        alternatives: K most probable tokens that `on_token` is told of.
    """
    device = model.device
    ids_BT, mask_BT = _left_padded(prompts, device)
    length_B = mask_BT.sum(dim=1)
    position_BT = (mask_BT.cumsum(dim=1) - 1).clamp_(min=0)
    stops = torch.tensor(sorted(stop_ids), dtype=torch.long, device=device)
    forward = inspect.signature(model.forward).parameters
    cache = DynamicCache(config=model.config)
    # The argument was renamed within transformers 5; asking for one position's logits saves B*T*V floats in the prefill.
    fixed = {"cache" if "cache" in forward else "past_key_values": cache, "use_cache": True}
    if "logits_to_keep" in forward:
        fixed["logits_to_keep"] = 1

    token_BN = torch.zeros((len(prompts), max_tokens), dtype=torch.long, device=device)
    logprob_BN = torch.zeros((len(prompts), max_tokens), dtype=torch.float32, device=device)
    count_B = torch.full((len(prompts),), max_tokens, dtype=torch.long, device=device)
    stopped_B = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    # The batch shrinks: which prompt each of its rows belongs to, and whether that row has ended.
    row_B = torch.arange(len(prompts), device=device)
    ended_B = torch.zeros_like(stopped_B)
    for n in range(max_tokens):
        logits_BV = model(input_ids=ids_BT, attention_mask=mask_BT, position_ids=position_BT, **fixed).logits[:, -1].float()
        logprobs_BV = torch.log_softmax(logits_BV, dim=-1)
        drawn_B1 = draw(logprobs_BV, row_B, n)
        token_BN[row_B, n] = drawn_B1[:, 0]
        logprob_BN[row_B, n] = logprobs_BV.gather(1, drawn_B1)[:, 0]
        ends_B = torch.isin(drawn_B1[:, 0], stops) & ~ended_B
        stopped_B[row_B[ends_B]] = True
        if on_token is not None:
            ends_B |= _told(on_token, logprobs_BV, drawn_B1, row_B, ended_B=ended_B, alternatives=alternatives)
        count_B[row_B[ends_B]] = n + 1
        ended_B = ended_B | ends_B
        live_B = (~ended_B).nonzero()[:, 0]
        if live_B.numel() == 0:
            break
        ids_BT, position_BT = drawn_B1, length_B[:, None]
        # Rows that have ended are carried along until half have: copying the cache at every end would cost more than it saves.
        if 2 * live_B.numel() <= row_B.numel():
            cache.batch_select_indices(live_B)
            ids_BT, position_BT, mask_BT, length_B, row_B, ended_B = (
                t[live_B] for t in (ids_BT, position_BT, mask_BT, length_B, row_B, ended_B)
            )
        mask_BT = torch.cat([mask_BT, mask_BT.new_ones((mask_BT.shape[0], 1))], dim=1)
        length_B = length_B + 1

    tokens, logprobs = token_BN.tolist(), logprob_BN.tolist()
    return [
        Decoded(token_ids=tokens[b][:count], logprobs=logprobs[b][:count], stopped=stopped)
        for b, (count, stopped) in enumerate(zip(count_B.tolist(), stopped_B.tolist(), strict=True))
    ]


def _told(
    on_token: OnToken,
    logprobs_BV: torch.Tensor,
    drawn_B1: torch.Tensor,
    row_B: torch.Tensor,
    *,
    ended_B: torch.Tensor,
    alternatives: int,
) -> torch.Tensor:
    """Tell of this step's tokens; bool [B]: the rows that are to end."""
    rows, ended, tokens = row_B.tolist(), ended_B.tolist(), drawn_B1[:, 0].tolist()
    logprobs = logprobs_BV.gather(1, drawn_B1)[:, 0].tolist()
    best: list[Alternatives] = [[] for _ in rows]
    if alternatives:
        values_BK, ids_BK = logprobs_BV.topk(min(alternatives, logprobs_BV.shape[1]), dim=1)
        best = [list(zip(ids, values, strict=True)) for ids, values in zip(ids_BK.tolist(), values_BK.tolist(), strict=True)]
    ends = [not ended[b] and on_token(rows[b], tokens[b], logprobs[b], best[b]) for b in range(len(rows))]
    return torch.tensor(ends, dtype=torch.bool, device=row_B.device)


def _left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask, both int64 [B, T]; padding (id 0, mask 0) stands on the left."""
    width = max(len(prompt) for prompt in prompts)
    ids_BT = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], dtype=torch.long, device=device)
    mask_BT = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], dtype=torch.long, device=device)
    return ids_BT, mask_BT


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
