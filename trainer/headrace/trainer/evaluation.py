"""Scoring an evaluation set with the weights that a step made, without training on it.

The set is packed like a batch, but for groups without variance, which weigh nothing in its loss and count in everything else. Before the
step's first update it is scored once where its ratio needs that: `old` is what the sampler stored, and where that is missing, or
`precalculate_logprobs` is set, the learner before the step. After the last update it is scored again. Of the numbers (`NAMES`) those of
tokens are as `headrace.trainer.metrics` says it of trained ones; `reward_weighted` is the mean over groups of

    sum_i w_i r_i / sum_i w_i,   w_i = exp(sum over the sampled tokens of trajectory i of (new - old))

the weighted importance sampling estimate (Precup, Sutton and Singh, 2000) of the reward that the new version would have had on the set.

Guarantees: no gradient, no random number, no part in any normaliser of training: a step with an evaluation makes the same bits as
without. Each token's difference is bounded as in the loss; the weights of a group are normalised before they are taken to the power, so
that nothing overflows. Limitations: confidence intervals; with few trajectories a group, and long ones, the estimate is that of one of
them.
"""

from collections.abc import Sequence

import numpy as np
import torch

from headrace.trainer.groups import TokenizedGroup
from headrace.trainer.loss import LOG_RATIO_BOUND
from headrace.trainer.metrics import TokenStats, token_metrics
from headrace.trainer.placed import placed_rows, sequence_blocks
from headrace.trainer.rows import PackedUpdate
from headrace.trainer.update import PerRow, Scored, Updater, joined

OF_TOKENS = ("ratio_mean", "clip_fraction", "ess", "kl_behaviour", "kl_old", "kl_reference", "entropy", "logprobs_missing")
NAMES = (
    *("groups", "trajectories", "trainable_tokens", "reward_mean", "reward_weighted", "loss", "policy_loss", "kl_loss"),
    *OF_TOKENS,
)


class Evaluation:
    """The evaluation of one step, on one rank.

    Args:
        groups: The set.
        update: All of it as one pass.
        updater: Of the step.
    """

    def __init__(self, groups: Sequence[TokenizedGroup], update: PackedUpdate, updater: Updater) -> None:
        self.update = update
        self._groups = groups
        self._updater = updater
        self._old: PerRow | None = None
        self._reference: PerRow | None = None

    def begin(self, *, recompute_old: bool, reference: PerRow | None) -> None:
        """What must be known before the first update. Called by all ranks.

        Args:
            recompute_old: `precalculate_logprobs`.
            reference: Log-probabilities of the reference policy, where a KL term asks for them.
        """
        self._reference = reference
        # Every rank knows the whole plan, so all decide alike whether the pass is needed.
        missing = any(bool(np.isnan(row.logprobs_N).any()) for row in self.update.rows)
        if not (recompute_old or missing):
            return
        start = self._updater.score(self.update)
        stored = [self._updater.tensor(row.logprobs_N) for row in self._updater.own_rows(self.update)]
        self._old = start if recompute_old else [torch.where(s.isnan(), c, s) for s, c in zip(stored, start, strict=True)]

    def score(self) -> Scored:
        """With the weights as they are now. Called by all ranks."""
        return self._updater.evaluate(self.update, old=self._old, reference=self._reference)

    def numbers(self, scored: Scored, stats: Sequence[TokenStats], ranks: int) -> dict[str, float]:
        """By name, as `NAMES` has them; what can't be computed is left out. Rank 0's to call, with the statistics of all ranks."""
        rewards = np.array([trajectory.reward for group in self._groups for trajectory in group.trajectories], np.float64)
        of_tokens = token_metrics(joined(stats)) if stats else {}
        return {
            "groups": float(len(self._groups)),
            "trajectories": float(len(rewards)),
            "trainable_tokens": float(self.update.targets),
            "reward_mean": float((rewards / len(rewards)).sum()),
            "reward_weighted": self._weighted(stats, ranks),
            "loss": scored.loss,
            "policy_loss": scored.policy_loss,
            "kl_loss": scored.kl_loss,
            **{name: of_tokens[name] for name in OF_TOKENS if name in of_tokens},
        }

    def _weighted(self, stats: Sequence[TokenStats], ranks: int) -> float:
        logs = {(g, t): 0.0 for g, group in enumerate(self._groups) for t in range(len(group.trajectories))}
        for placed in placed_rows([self.update], stats, ranks):
            # Where nothing at all is known the ratio is 1, as in the loss.
            new_N, old_N = np.clip(placed.stats.new_N, -1e4, 1e4), np.clip(placed.stats.old_N, -1e4, 1e4)
            d_N = np.nan_to_num(np.clip(new_N - old_N, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
            for block in sequence_blocks(placed.row):
                owner = placed.owners[int(placed.row.branches_N[block.start])]
                logs[owner.group, owner.trajectory] += float(d_N[block].sum())
        means = []
        for g, group in enumerate(self._groups):
            own = np.array([logs[g, t] for t in range(len(group.trajectories))])
            weights = np.exp(own - own.max())
            rewards = np.array([trajectory.reward for trajectory in group.trajectories], np.float64)
            means.append(float((weights / weights.sum() * rewards).sum()))
        return float(np.mean(means))
