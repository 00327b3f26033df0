"""The policy loss over trainable tokens: CISPO and PPO, with importance ratios from stored or recomputed log-probabilities.

CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4): L_t = -clip(sg(r_t), 1-e, 1+e_high) A_t log p_t. PPO (arXiv 1707.06347, eq. 7): L_t =
-min(r_t A_t, clip(r_t, 1-e, 1+e_high) A_t). Ratio levels: token r = exp(d); sequence r = exp(mean of d over the branch) (GSPO,
arXiv 2507.18071); average (r_tok + r_seq) / 2; geometric_average sqrt(r_tok r_seq). d = log p_new - log p_old; where old is missing
(NaN), old := sg(new). Truncation weighs L_t by min(exp(log p_old - log p_behaviour), cap), detached. KL in the loss is the k3 estimate
(Schulman 2020) with u = log p_ref - log p_new: coefficient * (exp(u) - 1 - u); where the reference is missing (NaN) it is 0. A mean over
the branch is over the tokens whose old log-probability is known; the others, NaN or an engine's sentinel (-9999 or below), take that mean,
with a gradient as any other token's.

Guarantees: loss and gradient are finite for any stored log-probability, in float16, bfloat16, float32 and float64: a log ratio is
clamped at 20 (at 10 where the learner's log-probabilities are float16, which ends at 65,504), after the mean over the branch, and
beyond the clamp the gradient through it is 0. Everything is computed in float32 or, where any input is, in float64. Branches are
compared as integers, whatever the ids. Each token's weight holds all normalisers, so no one divides later, and the sum over micro
batches and ranks is the update's loss. Differences from the peer, on purpose: `negative_cap` caps negative advantages only; a missing value
has no part in a branch's mean (there NaN counts as 0, and -9999 as a number); truncation needs recomputed log-probabilities, else it would
apply the same ratio twice; the peer's gradient is NaN where PPO meets a stored -9999. As there, a token's own ratio to a stored -9999 is
the largest; admission makes NaN of it (`groups.known_logprobs`), so no step meets it. As there, `mask_prob_ratio` acts before the clip, so
under CISPO a masked ratio becomes 1 - epsilon. Limitations: a finite loss where the learner's own log-probability is infinite or NaN, which
the engine refuses. Shapes: N trainable tokens of a micro batch, B branches.
"""

from dataclasses import dataclass

import torch

from headrace.trainer.groups import NO_LOGPROB
from headrace.trainer.options import LossOptions

LOG_RATIO_BOUND = 20.0
_FLOAT16_BOUND = 10.0
# An infinite log-probability would make 0 * inf in the backward of a difference: it becomes this first, far beyond the clamp.
_FARTHEST = 1e4


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTokens:
    """What the loss needs of each trainable token; floats of any float type, [N] each."""

    old_N: torch.Tensor
    """What the ratio is against: the behaviour policy's log-probability, or the learner's before the step; NaN where missing."""
    behaviour_N: torch.Tensor
    """The behaviour policy's log-probability as stored; NaN where missing."""
    reference_N: torch.Tensor | None
    """The reference policy's log-probability, needed for `kl_loss_coef`; NaN where missing."""
    advantages_N: torch.Tensor
    """With any change by KL in them."""
    weights_N: torch.Tensor
    """Coefficient of each token in the update's loss."""
    branches_N: torch.Tensor
    """int64, any values: the sequence a token belongs to; equal ids, one ratio at sequence level."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """The loss, and what metrics are made of; all but `total` are detached."""

    total: torch.Tensor
    """Scalar: sum over tokens of (policy + KL term) * weight."""
    policy: torch.Tensor
    """Scalar: the policy's share of `total`."""
    kl_loss: torch.Tensor
    """Scalar: the KL term's share of `total`, coefficient included; 0 without."""
    ratio_N: torch.Tensor
    """Of the chosen level, before caps, masks and clips."""
    clipped_N: torch.Tensor
    """bool: the clip changed this token's term."""
    truncation_N: torch.Tensor | None
    """The truncated factor; None without truncation."""


def policy_loss(new_N: torch.Tensor, tokens: LossTokens, options: LossOptions) -> LossOutput:
    """The summed loss of a micro batch.

    Args:
        new_N: The learner's log-probabilities, with gradient.
        tokens: The rest.
        options: Which loss.

    Raises:
        ValueError: `kl_loss_coef` is set, and there are no reference log-probabilities.
    """
    bound = _FLOAT16_BOUND if new_N.dtype == torch.float16 else LOG_RATIO_BOUND
    inputs = (new_N, tokens.old_N, tokens.behaviour_N, tokens.reference_N, tokens.advantages_N, tokens.weights_N)
    dtype = torch.float64 if any(x is not None and x.dtype == torch.float64 for x in inputs) else torch.float32
    new_N = new_N.to(dtype)
    advantages_N, weights_N = tokens.advantages_N.to(dtype), tokens.weights_N.to(dtype)
    old_N = _filled(tokens.old_N, new_N)
    d_N = new_N - old_N
    ratio_N = d_N.clamp(-bound, bound).exp()
    if options.level != "token":
        missing_N = tokens.old_N.isnan() | (tokens.old_N <= NO_LOGPROB)
        known_N = torch.where(missing_N, new_N - new_N.detach(), d_N)
        ratio_N = _branch_ratio(known_N, missing_N, tokens.branches_N, options.level, bound)
    used_N = ratio_N
    if options.negative_cap is not None:
        used_N = torch.where((advantages_N < 0) & (used_N > options.negative_cap), options.negative_cap, used_N)
    low, high = 1 - options.epsilon, 1 + options.epsilon_high
    if options.mask_prob_ratio:
        used_N = torch.where((used_N > low) & (used_N < high), used_N, torch.zeros_like(used_N))
    if options.kimi_k2_tau is not None:
        advantages_N = advantages_N - options.kimi_k2_tau * d_N.detach().clamp(-bound, bound)
    bounded_N = used_N.detach().clamp(low, high)
    if options.kind == "ppo":
        # Chosen, not torch.minimum of both: where a ratio is exactly at a bound, that would share the gradient between two equal terms.
        clipped_N = bounded_N * advantages_N < used_N.detach() * advantages_N
        loss_N = -torch.where(clipped_N, bounded_N, used_N) * advantages_N
    else:
        clipped_N = bounded_N != used_N.detach()
        loss_N = -bounded_N * advantages_N * new_N
    truncation_N = None
    if options.truncation_cap is not None:
        truncation_N = (old_N - _filled(tokens.behaviour_N, old_N)).clamp(-bound, bound).exp().clamp(max=options.truncation_cap)
        loss_N = loss_N * truncation_N
    policy = (loss_N * weights_N).sum()
    kl_loss = torch.zeros_like(policy)
    if options.kl_loss_coef:
        kl_loss = options.kl_loss_coef * (_k3(new_N, tokens.reference_N, bound) * weights_N).sum()
    return LossOutput(
        total=policy + kl_loss,
        policy=policy.detach(),
        kl_loss=kl_loss.detach(),
        ratio_N=ratio_N.detach(),
        clipped_N=clipped_N,
        truncation_N=truncation_N,
    )


def _filled(stored_N: torch.Tensor, otherwise_N: torch.Tensor) -> torch.Tensor:
    """Stored log-probabilities, the detached others where missing, all finite."""
    otherwise_N = otherwise_N.detach()
    stored_N = stored_N.to(otherwise_N.dtype)
    return torch.where(stored_N.isnan(), otherwise_N, stored_N.clamp(-_FARTHEST, _FARTHEST))


def _k3(new_N: torch.Tensor, reference_N: torch.Tensor | None, bound: float) -> torch.Tensor:
    if reference_N is None:
        raise ValueError("kl_loss_coef needs the reference policy's log-probabilities, and there are none")
    u_N = (_filled(reference_N, new_N) - new_N).clamp(-bound, bound)
    return u_N.expm1() - u_N


def _branch_ratio(d_N: torch.Tensor, missing_N: torch.Tensor, branches_N: torch.Tensor, level: str, bound: float) -> torch.Tensor:
    """The ratio at a level that looks at the whole branch; `d_N` is 0 where the old log-probability is missing."""
    token_N = d_N.clamp(-bound, bound).exp()
    # Sorting finds the branches: ids may be sparse or random, so they can't be indices themselves.
    index_N: torch.Tensor
    counts_B: torch.Tensor
    _, index_N, counts_B = torch.unique(branches_N, return_inverse=True, return_counts=True)

    def sums(values_N: torch.Tensor) -> torch.Tensor:
        return values_N.new_zeros(len(counts_B)).index_add(0, index_N, values_N)

    if bool(missing_N.any()):
        # A missing token takes the mean of the known ones: the branch's mean is then theirs, and every token has its share of the gradient.
        means_B = sums(d_N.detach()) / sums((~missing_N).to(d_N.dtype)).clamp(min=1)
        d_N = torch.where(missing_N, d_N + means_B[index_N], d_N)
    sequence_N = (sums(d_N) / counts_B).clamp(-bound, bound).exp()[index_N]
    if level == "sequence":
        return sequence_N
    if level == "average":
        return (token_N + sequence_N) / 2
    return token_N.sqrt() * sequence_N.sqrt()
