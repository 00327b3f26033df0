"""From rewards to advantages, and to the coefficient of each token in the update's loss.

Per group (GRPO): centred rewards, divided by the population standard deviation + 1e-6 where `scale_rewards` says so. Over the batch:
`advantage_balance`; and where `rescale` says so, advantages are divided by their weighted mean size, so that the total size of rewards
does not matter, only the balance between groups. The aggregation says what a token's loss is multiplied by, with N sampled tokens, K
trajectories and n_k tokens of a token's own trajectory (a sequence is a rollout: all histories of a trajectory together):

    token_mean                 1 / N
    sequence_mean_token_mean   1 / (K n_k)      as the reference service weighs
    sequence_mean_token_sum    1 / K
    constant_norm              1 / (K C)        Dr. GRPO (arXiv 2503.20783), C tokens

Guarantees: a group whose rewards differ by rounding at most (`groups.without_variance`) gives neither gradient nor denominators (a peer
tests the result of float arithmetic for 0 and trains on rounding errors); nor does a group of one. A trajectory at its group's mean, but
for rounding, has advantage 0 and counts in the normalisers, so no rescaling lifts noise. Rewards of any finite size give finite advantages
where they are scaled or rescaled. Limitations: no advantages per turn. Shapes: n trajectories of a group, K trajectories of the batch that
train. All float64.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.schemas.training import LossAggregation
from headrace.trainer.groups import TokenizedGroup, without_variance
from headrace.trainer.options import AdvantageOptions

Floats = npt.NDArray[np.float64]
_EPS = 1e-6
_ROUNDING = 1e-12
"""A reward this close to its group's mean, relative to the rewards' size, is at the mean: what is left is rounding."""
_HUGE = 2.0**500
"""Squares of larger numbers overflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """What each sampled token of one trajectory gets."""

    group: int
    """Index of the group in the batch."""
    trajectory: int
    """Index of the trajectory in its group."""
    advantage: float
    weight: float
    """Coefficient of each sampled token's loss in the update's loss."""
    trainable_tokens: int


def group_advantages(rewards_n: Floats, *, scale: bool) -> Floats:
    """Advantages of one group with variance: float64[n] from float64[n]. What differs from the mean by rounding is exactly 0."""
    if len(rewards_n) == 0:
        return np.zeros_like(rewards_n)
    centred_n, unit = _centred(rewards_n)
    size = max(1.0, float(np.abs(rewards_n).max())) / unit
    centred_n[np.abs(centred_n) <= _ROUNDING * size] = 0.0
    if scale:
        return centred_n / (_root_mean_square(centred_n) + _EPS / unit)
    # A member may be further from the mean than float64 reaches: as far as it does then.
    limit = float(np.finfo(np.float64).max) / unit
    return np.clip(centred_n, -limit, limit) * unit


def population_deviation(rewards_n: Floats) -> float:
    """sqrt(sum (r - mean)^2 / n) of one group, n >= 1; exactly 0 without variance."""
    if without_variance(rewards_n.tolist()):
        return 0.0
    centred_n, unit = _centred(rewards_n)
    return _root_mean_square(centred_n) * unit


def batch_credits(
    groups: Sequence[TokenizedGroup], options: AdvantageOptions, aggregation: LossAggregation, constant: float | None
) -> list[Credit]:
    """Advantages and weights of every trajectory that trains, in batch order; empty when nothing does.

    With `options.rescale` A is divided by sum(w |A|) / sum(w) over the sampled tokens, w their weights: the mean size of an advantage as
    this aggregation sees it. For `sequence_mean_token_mean` that is the reference service's rescale, the mean of |A| over trajectories.

    Args:
        groups: The batch of one update.
        options: From rewards to advantages.
        aggregation: How token losses become one number.
        constant: C of `constant_norm`; None for the others.

    Raises:
        ValueError: `constant_norm` without a positive constant.
    """
    found = [
        (g, t, float(advantage), trajectory.trainable_tokens)
        for g, group in enumerate(groups)
        if group.trajectories and not group.zero_variance
        for t, (trajectory, advantage) in enumerate(
            zip(
                group.trajectories,
                group_advantages(np.array([x.reward for x in group.trajectories], dtype=np.float64), scale=options.scale_rewards),
                strict=True,
            )
        )
        # A rollout without a sampled token is part of its group's baseline, but nothing of it can train.
        if trajectory.trainable_tokens > 0
    ]
    if not found:
        return []
    tokens_K = np.array([tokens for *_, tokens in found], dtype=np.float64)
    advantages_K = balance(np.array([advantage for _, _, advantage, _ in found], dtype=np.float64), options.balance)
    weights_K = _weights(tokens_K, aggregation, constant)
    largest = float(np.abs(advantages_K).max())
    if largest == 0.0:  # rewards too close to tell apart once centred, or the balance took everything away
        return []
    if options.rescale:
        relative_K = advantages_K / largest  # so that no sum overflows
        shares_K = weights_K * tokens_K / (weights_K * tokens_K).sum()
        advantages_K = relative_K / (np.abs(relative_K) * shares_K).sum()
    return [
        Credit(group=g, trajectory=t, advantage=float(a), weight=float(w), trainable_tokens=tokens)
        for (g, t, _, tokens), a, w in zip(found, advantages_K, weights_K, strict=True)
    ]


def sft_credits(groups: Sequence[TokenizedGroup]) -> list[Credit]:
    """Of supervised fine-tuning: advantage 1 and weight 1 / N for every sampled token of the update's groups; rewards count for nothing.

    With `LossOptions()` and missing old log-probabilities (ratio 1) the policy loss is then the mean of -log p: cross-entropy.
    """
    total = sum(group.trainable_tokens for group in groups)
    return [
        Credit(group=g, trajectory=t, advantage=1.0, weight=1.0 / total, trainable_tokens=trajectory.trainable_tokens)
        for g, group in enumerate(groups)
        for t, trajectory in enumerate(group.trajectories)
        if trajectory.trainable_tokens > 0
    ]


def balance(advantages_K: Floats, b: float) -> Floats:
    """`advantage_balance`: b > 0 shrinks what is not positive by (1 - b), b < 0 what is not negative by (1 + b)."""
    if b > 0:
        return np.where(advantages_K <= 0, advantages_K * (1 - b), advantages_K)
    if b < 0:
        return np.where(advantages_K >= 0, advantages_K * (1 + b), advantages_K)
    return advantages_K


def _weights(tokens_K: Floats, aggregation: LossAggregation, constant: float | None) -> Floats:
    trajectories = len(tokens_K)
    match aggregation:
        case "token_mean":
            return np.full(trajectories, 1.0 / tokens_K.sum())
        case "sequence_mean_token_mean":
            return 1.0 / (trajectories * tokens_K)
        case "sequence_mean_token_sum":
            return np.full(trajectories, 1.0 / trajectories)
        case "constant_norm":
            if constant is None or not constant > 0:
                raise ValueError(f"constant_norm needs loss_aggregation_constant above 0, not {constant}")
            return np.full(trajectories, 1.0 / (trajectories * constant))


def _root_mean_square(centred_n: Floats) -> float:
    return math.sqrt(float((centred_n**2).sum()) / len(centred_n))


def _centred(rewards_n: Floats) -> tuple[Floats, float]:
    """Rewards minus their mean, in units of a power of two (exact) that keeps squares finite: 1 for all but huge rewards."""
    largest = float(np.abs(rewards_n).max())
    unit = 1.0 if largest < _HUGE else float(np.ldexp(0.5, np.frexp(largest)[1]))
    scaled_n = rewards_n / unit
    # Means by hand: the sums of the reference (sum / n), not pairwise ones.
    return scaled_n - scaled_n.sum() / len(scaled_n), unit
