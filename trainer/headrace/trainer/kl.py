"""KL to a reference policy as a change of advantages: A_t := A_t + coef (mean(k) - k_t), k_t = log p_source,t - log p_reference,t.

A token that the policy has moved further towards than the average one loses advantage by the difference. The mean is over all trainable
tokens of the whole update, unweighted, so the change sums to zero there and depends neither on packing nor on ranks (the peer centres over
each packed row, which makes the gradient depend on what shares a row). The mean, an estimate of KL(source || reference), is reported;
it may be negative.

Guarantees: finite for any log-probability: |k| is at most 20, as the loss's log ratio, and 0 where either side is missing (NaN).
Detached: the change carries no gradient. Limitations: weights; a trajectory with more tokens pulls the mean more. Shapes: N trainable
tokens.
"""

import torch

from headrace.trainer.loss import LOG_RATIO_BOUND


def kl_terms(source_N: torch.Tensor, reference_N: torch.Tensor) -> torch.Tensor:
    """The k of each token: float64[N], detached.

    Args:
        source_N: Log-probabilities of the learner, or of the sampler, any float type.
        reference_N: Those of the reference policy, any float type.
    """
    # Two equal infinities differ by NaN too: by nothing, that is.
    terms_N = (source_N.detach().double() - reference_N.detach().double()).nan_to_num(nan=0.0)
    return terms_N.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def adjusted_advantages(advantages_N: torch.Tensor, terms_N: torch.Tensor, mean: float, coef: float) -> torch.Tensor:
    """A + coef (mean - k), computed in float64, in the advantages' own type.

    Args:
        advantages_N: Advantages.
        terms_N: From `kl_terms`.
        mean: Of the terms over all trainable tokens of the update, over all ranks.
        coef: `kl_penalty_coef`.
    """
    return (advantages_N.double() + coef * (mean - terms_N.double())).to(advantages_N.dtype)
