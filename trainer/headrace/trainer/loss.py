"""The policy loss over trainable tokens: CISPO and PPO, with importance ratios from the sampler's log-probabilities.

CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4): L_t = -clip(sg(r_t), 1-e, 1+e_high) A_t log p_t. PPO (arXiv 1707.06347, eq. 7): L_t =
-min(r_t A_t, clip(r_t, 1-e, 1+e_high) A_t). Ratio levels: token r = exp(d); sequence r = exp(mean of d over the branch) (GSPO,
arXiv 2507.18071); average (r_tok + r_seq) / 2; geometric_average sqrt(r_tok r_seq). d = log p_new - log p_old; where old is
missing (NaN), old := sg(new).

Guarantees: loss and gradient are finite for any stored log-probability: |log ratio| is clamped at 20 (after the mean over the
branch), where the gradient through the ratio is 0. Branches are compared as integers. Differences from the peer, on purpose:
`negative_cap` caps negative advantages only; truncation needs recomputed log-probabilities, else it would apply the same ratio
twice. As there, `mask_prob_ratio` acts before the clip, so under CISPO a masked ratio becomes 1 - epsilon. Shapes: N trainable
tokens of a micro batch, in row order; B branches.
"""

from dataclasses import dataclass

import torch

from headrace.trainer.options import LossOptions

LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTokens:
    """What the loss needs of each trainable token."""

    old_N: torch.Tensor
    """float32: the behaviour policy's log-probability; NaN where missing."""
    advantages_N: torch.Tensor
    """float32."""
    weights_N: torch.Tensor
    """float32."""
    branches_N: torch.Tensor
    """int64: the sequence a token belongs to; equal ids, one ratio at sequence level."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """The loss, and what metrics are made of (detached)."""

    total: torch.Tensor
    """Sum over tokens of L_t w_t; the caller divides by the step's token count."""
    ratio_N: torch.Tensor
    """Of the chosen level, before caps, masks and clips."""
    clipped_N: torch.Tensor
    """bool: the clip changed this token's term."""


def policy_loss(new_N: torch.Tensor, tokens: LossTokens, options: LossOptions) -> LossOutput:
    """The summed loss of a micro batch.

    Args:
        new_N: The learner's log-probabilities, with gradient.
        tokens: The rest.
        options: Which loss.
    """
    advantages_N = tokens.advantages_N
    old_N = new_N.detach() if options.recompute_old else torch.where(tokens.old_N.isnan(), new_N.detach(), tokens.old_N)
    # An infinite log-probability would make 0 * inf in the backward of the difference: bound it first, far beyond the clamp.
    d_N = new_N - old_N.clamp(min=-1e4, max=1e4)
    bounded_d_N = d_N.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio_N = _ratio(d_N, tokens.branches_N, options.level)
    used_N = ratio_N
    if options.negative_cap is not None:
        used_N = torch.where(advantages_N < 0, used_N.clamp(max=options.negative_cap), used_N)
    low, high = 1 - options.epsilon, 1 + options.epsilon_high
    if options.mask_prob_ratio:
        used_N = torch.where((used_N > low) & (used_N < high), used_N, torch.zeros_like(used_N))
    if options.kimi_k2_tau is not None:
        advantages_N = advantages_N - options.kimi_k2_tau * bounded_d_N.detach()
    bounded_N = used_N.clamp(low, high)
    if options.kind == "ppo":
        loss_N = -torch.minimum(used_N * advantages_N, bounded_N * advantages_N)
        clipped_N = (bounded_N * advantages_N < used_N * advantages_N).detach()
    else:
        loss_N = -bounded_N.detach() * advantages_N * new_N
        clipped_N = (bounded_N != used_N).detach()
    if options.truncation_cap is not None:
        behaviour_N = torch.where(tokens.old_N.isnan(), old_N, tokens.old_N)
        truncated_N = (old_N - behaviour_N).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp().clamp(max=options.truncation_cap)
        loss_N = loss_N * truncated_N.detach()
    return LossOutput(total=(loss_N * tokens.weights_N).sum(), ratio_N=ratio_N.detach(), clipped_N=clipped_N)


def _ratio(d_N: torch.Tensor, branches_N: torch.Tensor, level: str) -> torch.Tensor:
    token_N = d_N.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    if level == "token":
        return token_N
    # The ids count the sequences of the step: small, dense enough to index by.
    index_N = branches_N
    sums_B = d_N.new_zeros(int(index_N.max()) + 1 if len(index_N) else 0).index_add(0, index_N, d_N)
    counts_B = torch.bincount(index_N, minlength=len(sums_B)).to(d_N.dtype)
    sequence_N = (sums_B / counts_B.clamp(min=1)).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()[index_N]
    if level == "sequence":
        return sequence_N
    if level == "average":
        return (token_N + sequence_N) / 2
    return token_N.sqrt() * sequence_N.sqrt()
