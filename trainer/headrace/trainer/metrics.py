"""What is reported of a step, by name. Finite numbers only; what can't be computed is left out.

Of the batch (`batch_metrics`): `groups`, `trajectories`, `groups_zero_variance`, `exceptions`, `trajectories_rejected` (members that their
groups train without), `trajectories_truncated`, `turns_without_end` and `turns_as_context` (see `TokenizedTrajectory`);
`reward_mean/std/min/max` (population, over all trajectories, also of groups without variance), `reward_deviation` (mean over groups of the
deviation inside); `user/NAME` (what rollouts measured, `user_metrics.py`); `updates`, `micro_steps`, `rows`, `dummy_passes` (passes of
weight zero, made where a rank had no row left); `sequences`, `trainable_tokens`, `tokens` (computed: a shared prefix counts once),
`sequence_tokens` (without sharing), `sharing` (their ratio), `fill` (tokens over what the rows could hold), `rank_balance` (tokens over
ranks * the longest row, summed over micro steps: 1 where no rank waits), `padding_tokens` (0: rows have none).

Of the trained tokens (`token_metrics`), each an unweighted mean over them unless said otherwise: `ratio_mean/min/max` (of the
loss's level, before clips); `clip_fraction`, and its two parts by the advantage's sign, `clip_fraction_high` (A > 0) and
`clip_fraction_low` (A < 0), shares of all tokens; `ess_tokens` = (sum r)^2 / sum r^2 (Kish; the number of tokens on-policy) and `ess`,
its share of the tokens; `kl_behaviour` (k3 estimate of KL(behaviour || learner): exp(d) - 1 - d, d = new - behaviour, never negative)
and `kl_behaviour_k1` (-d), over tokens whose log-probability is known; `kl_old`, as `kl_behaviour` for what the ratio is against;
`kl_reference` (k3 estimate of KL(learner || reference), u = reference - new) and `kl_reference_k1` (-u); `entropy`; `probs_corr`
(Pearson, of exp(behaviour) and exp(new)); `advantage_abs_mean`, `advantage_abs_weighted` (weighted as the loss is); `logprobs_missing`
(tokens without one, an engine's -9999 included). Where there are any: `logprobs_positive` (tokens whose stored one is above 0, by
rounding), `entropy_missing` (tokens that `entropy` leaves out, because theirs is not finite).

By lag k, the versions between the one that sampled a token and the one that trained (0 to 15, then `16_up`; `unknown`):
`lag_tokens_<k>`, `ratio_mean_lag_<k>`, `ess_lag_<k>` (a share); `lag_mean`, `lag_max` over known ones.

The engine adds `loss`, `policy_loss`, `kl_loss`, `grad_norm`, `learning_rate`, timings and `peak_memory_bytes`. Guarantees: pure
functions over numpy in float64 (but for `peak_memory`); log-probabilities that are infinite give finite numbers, since their
differences are bounded as in the loss. Shapes: N trained tokens of the step, over all ranks.
"""

import math
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from headrace.trainer.advantages import population_deviation
from headrace.trainer.deepspeed_setup import device
from headrace.trainer.groups import TokenizedGroup
from headrace.trainer.loss import LOG_RATIO_BOUND
from headrace.trainer.reward_trend import reward_deviation
from headrace.trainer.rows import PackedUpdate
from headrace.trainer.user_metrics import averaged

Floats = npt.NDArray[np.float64]
LAG_BUCKETS = 16
"""Lags that have a bucket of their own; larger ones share one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStats:
    """All trained tokens of a step, in any order; [N] each."""

    new_N: Floats
    """The learner's log-probability in the update that trained the token."""
    old_N: Floats
    """What the ratio is against; NaN where missing."""
    behaviour_N: Floats
    """As the sampler said; NaN where missing."""
    reference_N: Floats | None
    """The reference policy's; None without one."""
    ratio_N: Floats
    clipped_N: npt.NDArray[np.bool_]
    entropy_N: Floats
    advantages_N: Floats
    weights_N: Floats
    lags_N: npt.NDArray[np.integer]
    """-1 where unknown."""


def token_metrics(tokens: TokenStats) -> dict[str, float]:
    """Metrics of the trained tokens; none without tokens."""
    n = len(tokens.new_N)
    if n == 0:
        return {}
    ratio_N, clipped_N, advantages_N = tokens.ratio_N, tokens.clipped_N, tokens.advantages_N
    behaviour_d = _differences(tokens.new_N, tokens.behaviour_N)
    known_N = ~np.isnan(tokens.behaviour_N)
    values = {
        "ratio_mean": float(ratio_N.mean()),
        "ratio_min": float(ratio_N.min()),
        "ratio_max": float(ratio_N.max()),
        "clip_fraction": float(clipped_N.mean()),
        "clip_fraction_high": float((clipped_N & (advantages_N > 0)).mean()),
        "clip_fraction_low": float((clipped_N & (advantages_N < 0)).mean()),
        "ess_tokens": _effective(ratio_N),
        "ess": _effective(ratio_N) / n,
        "kl_behaviour": _k3(behaviour_d),
        "kl_behaviour_k1": _mean(-behaviour_d),
        "kl_old": _k3(_differences(tokens.new_N, tokens.old_N)),
        "entropy": _mean(tokens.entropy_N[np.isfinite(tokens.entropy_N)]),
        "probs_corr": _pearson(_probabilities(tokens.behaviour_N[known_N]), _probabilities(tokens.new_N[known_N])),
        "advantage_abs_mean": float(np.abs(advantages_N).mean()),
        "advantage_abs_weighted": _weighted_mean(np.abs(advantages_N), tokens.weights_N),
        "logprobs_missing": float((~known_N).sum()),
    }
    if tokens.reference_N is not None:
        u = _differences(tokens.reference_N, tokens.new_N)
        values |= {"kl_reference": _k3(u), "kl_reference_k1": _mean(-u)}
    odd = {"logprobs_positive": tokens.behaviour_N > 0, "entropy_missing": ~np.isfinite(tokens.entropy_N)}
    values |= {name: float(found_N.sum()) for name, found_N in odd.items() if found_N.any()}
    return _finite(values | _by_lag(tokens.lags_N, ratio_N))


def turn_counts(groups: Sequence[TokenizedGroup]) -> dict[str, float]:
    """Turns that train otherwise than their sender may expect; see `TokenizedTrajectory`."""
    members = [member for group in groups for member in group.trajectories]
    return {name: sum(getattr(member, name) for member in members) for name in ("turns_without_end", "turns_as_context")}


def batch_metrics(groups: Sequence[TokenizedGroup], updates: Sequence[PackedUpdate]) -> dict[str, float]:
    """Metrics of a batch and of its packed updates (several where the step makes several passes: each counts)."""
    rewards = np.array([trajectory.reward for group in groups for trajectory in group.trajectories], dtype=np.float64)
    rows = [row for update in updates for row in update.rows]
    micro_steps = [step for update in updates for step in update.micro_steps]
    tokens = sum(len(row) for row in rows)
    sequence_tokens = sum(row.sequence_tokens for row in rows)
    capacity = sum(update.capacity * sum(1 for _ in update.rows) for update in updates)
    slots = sum(len(step) * max((len(row) for row in step if row is not None), default=0) for step in micro_steps)
    values: dict[str, float] = {
        "groups": len(groups),
        "trajectories": len(rewards),
        "groups_zero_variance": sum(bool(group.trajectories) and group.zero_variance for group in groups),
        "exceptions": sum(group.exceptions for group in groups),
        "trajectories_rejected": sum(len(group.rejected) for group in groups),
        "trajectories_truncated": sum(group.truncated for group in groups),
        **turn_counts(groups),
        "updates": len(updates),
        "micro_steps": len(micro_steps),
        "rows": len(rows),
        "dummy_passes": sum(row is None for step in micro_steps for row in step),
        "sequences": sum(row.sequences for row in rows),
        "trainable_tokens": sum(update.targets for update in updates),
        "tokens": tokens,
        "sequence_tokens": sequence_tokens,
        "sharing": sequence_tokens / tokens if tokens else math.nan,
        "fill": tokens / capacity if capacity else 0.0,
        "rank_balance": tokens / slots if slots else math.nan,
        "padding_tokens": 0.0,
    }
    if len(rewards):
        deviation = reward_deviation(groups)
        # Divided first, so that rewards near the end of float64 do not overflow their sum.
        values |= {
            "reward_mean": float((rewards / len(rewards)).sum()),
            "reward_std": population_deviation(rewards),
            "reward_min": float(rewards.min()),
            "reward_max": float(rewards.max()),
            "reward_deviation": math.nan if deviation is None else deviation,
        }
    members = (member.metrics for group in groups for member in group.trajectories)
    return _finite(values | averaged(members))


def peak_memory() -> float:
    """Bytes: of this process's GPU since `reset_peak_memory`, or of its resident memory since its start where there is no GPU."""
    if device().type == "cuda":
        return float(torch.cuda.max_memory_allocated())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)


def reset_peak_memory() -> None:
    """The next peak is counted from here; only a GPU's can be."""
    if device().type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def _by_lag(lags_N: npt.NDArray[np.integer], ratio_N: Floats) -> dict[str, float]:
    values: dict[str, float] = {}
    known_N = lags_N >= 0
    bucket_N = np.where(known_N, np.minimum(lags_N, LAG_BUCKETS), -1)
    for bucket in np.unique(bucket_N):
        own = ratio_N[bucket_N == bucket]
        name = "unknown" if bucket < 0 else f"{LAG_BUCKETS}_up" if bucket == LAG_BUCKETS else str(bucket)
        values[f"lag_tokens_{name}"] = len(own)
        values[f"ratio_mean_lag_{name}"] = float(own.mean())
        values[f"ess_lag_{name}"] = _effective(own) / len(own)
    if known_N.any():
        values |= {"lag_mean": float(lags_N[known_N].mean()), "lag_max": float(lags_N[known_N].max())}
    return values


def _effective(ratio_N: Floats) -> float:
    """Kish's effective number of samples; NaN where all ratios are 0."""
    largest = float(ratio_N.max())
    if largest == 0.0:
        return math.nan
    relative_N = ratio_N / largest  # squares of the largest ratios stay in range
    return float(relative_N.sum() ** 2 / (relative_N**2).sum())


def _differences(a_N: Floats, b_N: Floats) -> Floats:
    """Of the tokens where both are known: bounded as in the loss."""
    d_N = np.clip(a_N, -1e4, 1e4) - np.clip(b_N, -1e4, 1e4)
    return np.clip(d_N[~np.isnan(d_N)], -LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _k3(d: Floats) -> float:
    return _mean(np.expm1(d) - d)


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else math.nan


def _weighted_mean(values_N: Floats, weights_N: Floats) -> float:
    total = float(weights_N.sum())
    return float((values_N * weights_N).sum() / total) if total else math.nan


def _probabilities(logprobs_N: Floats) -> Floats:
    return np.exp(np.minimum(logprobs_N, 0.0))  # a sampler may say nonsense above 0


def _pearson(a: Floats, b: Floats) -> float:
    if len(a) < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return math.nan
    return float(np.corrcoef(a, b)[0, 1])


def _finite(values: dict[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if math.isfinite(value)}
