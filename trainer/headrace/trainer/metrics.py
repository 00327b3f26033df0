"""What is reported of a step, by name. Finite numbers only.

`loss` (sum over trainable tokens / their number), `policy_loss` (the same), `grad_norm` (before clipping), `learning_rate`;
`reward_mean`, `reward_std` (population, over all trajectories of the batch, also of groups without variance);
`ratio_mean/min/max` (of the loss's level, before clips), `clip_fraction`; `ess` (effective sample size over the number of tokens,
(sum r)^2 / (N sum r^2)); `kl_behaviour` (k3 estimate of KL(behaviour || learner), mean of exp(d) - 1 - d over the sampled tokens
whose log-probability is known, d = new - old: Schulman 2020, never negative); `entropy` (mean over trainable tokens);
`probs_corr` (Pearson, of exp(old) and exp(new)); `advantage_abs_mean`; `tokens`, `trainable_tokens`, `sequences`, `rows`, `fill`
(share of packed positions that are no padding), `groups`, `trajectories`, `groups_zero_variance`, `exceptions`,
`tokens_per_second` (through the update), `peak_memory_bytes`, `logprobs_missing` (trainable tokens without one).
"""

import math
import resource
import sys
from collections.abc import Sequence

import numpy as np
import torch

from headrace.trainer.groups import TokenizedGroup
from headrace.trainer.loss import LOG_RATIO_BOUND, LossOutput, LossTokens
from headrace.trainer.options import StepOptions
from headrace.trainer.packing import PackedRows


class StepMetrics:
    """Collects over the micro batches of a step.

    Args:
        groups: The batch.
        rows: Its packed rows.
    """

    def __init__(self, groups: Sequence[TokenizedGroup], rows: PackedRows) -> None:
        self._groups = groups
        self._rows = rows
        self._parts: list[dict[str, torch.Tensor]] = []
        self._losses: list[torch.Tensor] = []
        self.grad_norm = 0.0

    def add(self, new_N: torch.Tensor, entropy_N: torch.Tensor, tokens: LossTokens, output: LossOutput, loss: torch.Tensor) -> None:
        """One micro batch; `loss` is its share of the step's loss."""
        self._losses.append(loss.double().cpu())
        part = {
            "new": new_N,
            "old": tokens.old_N,
            "entropy": entropy_N,
            "ratio": output.ratio_N,
            "clipped": output.clipped_N,
            "advantage": tokens.advantages_N,
        }
        self._parts.append({name: values.detach().double().cpu() for name, values in part.items()})

    @property
    def loss(self) -> float:
        """The step's loss."""
        return float(sum(self._losses))

    def as_dict(self, options: StepOptions, *, seconds: float) -> dict[str, float]:
        """All metrics; `seconds` is the time of the update."""
        rewards = np.array([trajectory.reward for group in self._groups for trajectory in group.trajectories], dtype=np.float64)
        rows = self._rows
        values: dict[str, float] = {
            "learning_rate": options.learning_rate,
            "tokens": rows.tokens,
            "trainable_tokens": rows.trainable_tokens,
            "sequences": len(np.unique(rows.branches_RL[rows.branches_RL >= 0])),
            "rows": rows.rows,
            "fill": rows.tokens / rows.token_ids_RL.size if rows.token_ids_RL.size else 0.0,
            "groups": len(self._groups),
            "trajectories": len(rewards),
            "groups_zero_variance": sum(group.zero_variance for group in self._groups),
            "exceptions": sum(group.exceptions for group in self._groups),
            "peak_memory_bytes": _peak_memory(),
        }
        if len(rewards):
            values |= {"reward_mean": float(rewards.mean()), "reward_std": float(rewards.std())}
        if self._parts:
            values |= self._token_metrics()
            values |= {"loss": self.loss, "policy_loss": self.loss, "grad_norm": self.grad_norm}
            values["tokens_per_second"] = rows.tokens / seconds if seconds > 0 else 0.0
        return {name: float(value) for name, value in values.items() if math.isfinite(value)}

    def _token_metrics(self) -> dict[str, float]:
        all_N = {name: torch.cat([part[name] for part in self._parts]) for name in self._parts[0]}
        ratio_N = all_N["ratio"]
        known_N = ~all_N["old"].isnan()
        d_N = (all_N["new"] - all_N["old"])[known_N].clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        return {
            "ratio_mean": float(ratio_N.mean()),
            "ratio_min": float(ratio_N.min()),
            "ratio_max": float(ratio_N.max()),
            "clip_fraction": float(all_N["clipped"].mean()),
            "ess": float(ratio_N.sum() ** 2 / (len(ratio_N) * (ratio_N**2).sum())),
            "kl_behaviour": float((d_N.exp() - 1 - d_N).mean()),
            "entropy": float(all_N["entropy"].mean()),
            "advantage_abs_mean": float(all_N["advantage"].abs().mean()),
            "probs_corr": _pearson(all_N["old"][known_N].exp(), all_N["new"][known_N].exp()),
            "logprobs_missing": float((~known_N).sum()),
        }


def _pearson(a: torch.Tensor, b: torch.Tensor) -> float:
    if len(a) < 2 or float(a.std()) == 0 or float(b.std()) == 0:
        return math.nan
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1])


def _peak_memory() -> float:
    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)
