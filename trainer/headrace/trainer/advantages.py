"""From rewards to advantages and token weights.

Per group (GRPO): centred rewards, divided by the population standard deviation + 1e-6 where `scale_rewards` says so. Then over
the batch: a token of a trajectory weighs 1 / (its trainable tokens), scaled to mean 1; `advantage_balance`; and advantages are
scaled so that the weighted mean of |A| over the batch's trainable tokens is 1. Hence the total size of rewards never matters,
only the balance between groups.

Guarantees: a group is without variance iff max == min on the raw float64 rewards, and then gives neither gradient nor
denominators (a peer tests the result of float arithmetic for 0 and trains on rounding errors). A trajectory exactly at its
group's mean counts in the normalisers. Gives up: advantages per turn. Shapes: n trajectories of a group, G groups, K trajectories
of the batch. All float64.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.trainer.groups import TokenizedGroup
from headrace.trainer.options import AdvantageOptions

Floats = npt.NDArray[np.float64]
_EPS = 1e-6


def group_advantages(rewards_n: Floats, *, scale: bool) -> Floats:
    """Advantages of one group: float64[n] from float64[n]. All zero without variance."""
    if len(rewards_n) == 0 or rewards_n.max() == rewards_n.min():
        return np.zeros_like(rewards_n)
    # Means by hand: the sums of the reference (sum / n), not pairwise ones.
    centred_n: Floats = rewards_n - rewards_n.sum() / len(rewards_n)
    if scale:
        centred_n = centred_n / (np.sqrt((centred_n**2).sum() / len(rewards_n)) + _EPS)
    return centred_n


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """What each trainable token of one trajectory gets."""

    group: int
    """Index of the group in the batch."""
    trajectory: int
    """Index of the trajectory in its group."""
    advantage: float
    weight: float
    trainable_tokens: int


def batch_credits(groups: Sequence[TokenizedGroup], options: AdvantageOptions) -> list[Credit]:
    """Advantages and weights of every trajectory that trains, in batch order; empty when nothing does."""
    found = [
        (g, t, float(advantage), trajectory.trainable_tokens)
        for g, group in enumerate(groups)
        if not group.zero_variance
        for t, (trajectory, advantage) in enumerate(
            zip(
                group.trajectories,
                group_advantages(np.array([x.reward for x in group.trajectories], dtype=np.float64), scale=options.scale_rewards),
                strict=True,
            )
        )
    ]
    if not found:
        return []
    tokens_K = np.array([tokens for *_, tokens in found], dtype=np.float64)
    advantages_K = balance(np.array([advantage for _, _, advantage, _ in found], dtype=np.float64), options.balance)
    weights_K = 1.0 / (tokens_K + _EPS)
    weights_K = weights_K / _token_mean(weights_K, tokens_K)
    size = _token_mean(np.abs(advantages_K) * weights_K, tokens_K)
    if size == 0.0:  # the balance took everything away
        return []
    advantages_K = advantages_K / size
    return [
        Credit(group=g, trajectory=t, advantage=float(a), weight=float(w), trainable_tokens=tokens)
        for (g, t, _, tokens), a, w in zip(found, advantages_K, weights_K, strict=True)
    ]


def balance(advantages_K: Floats, b: float) -> Floats:
    """`advantage_balance`: b > 0 shrinks what is not positive by (1 - b), b < 0 what is not negative by (1 + b)."""
    if b > 0:
        return np.where(advantages_K <= 0, advantages_K * (1 - b), advantages_K)
    if b < 0:
        return np.where(advantages_K >= 0, advantages_K * (1 + b), advantages_K)
    return advantages_K


def _token_mean(values_K: Floats, tokens_K: Floats) -> float:
    """Mean over trainable tokens of a value that each trajectory's tokens share."""
    return float((values_K * tokens_K).sum() / tokens_K.sum())
