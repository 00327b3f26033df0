"""Optimizer updates over packed rows: reference passes, the KL's centring, forward and backward of every micro step, one step of AdamW.

Guarantees: every rank makes the same number of passes (a row of weight zero where it has none); normalisers are in the targets' weights
before the first backward, so the gradient does not depend on the number of micro steps or ranks; KL is centred over the whole update on
all ranks; a gradient that is not finite raises. Never in training mode beyond what recomputation needs: dropout would make the learner
another policy than the sampler. Shapes: N targets of a row.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from headrace.core.errors import HeadraceError
from headrace.trainer.deepspeed_setup import device, over_ranks, set_clip
from headrace.trainer.forward import RowTensors, Scorer
from headrace.trainer.kl import adjusted_advantages, kl_terms
from headrace.trainer.loss import LossOutput, LossTokens, policy_loss
from headrace.trainer.metrics import TokenStats
from headrace.trainer.options import StepOptions
from headrace.trainer.rows import PackedRow, PackedUpdate
from headrace.trainer.shards import Trainable

PerRow = list[torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSettings:
    """What one update does in addition its rows."""

    rate: float
    weight_decay: float
    max_grad_norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """What the loss of some rows came to; the same on all ranks but for `stats`, which is this rank's share."""

    loss: float
    policy_loss: float
    kl_loss: float
    stats: tuple[TokenStats, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Updated(Scored):
    """What an update did."""

    grad_norm: float


class Updater:
    """Runs the updates of one step on this rank.

    Args:
        trainable: The model's state.
        scorer: How rows are scored.
        options: Of the step.
        rank: This rank's column in the grid of rows.
        ranks: How many there are.
    """

    def __init__(self, trainable: Trainable, scorer: Scorer, options: StepOptions, *, rank: int, ranks: int) -> None:
        self._trainable = trainable
        self._scorer = scorer
        self._options = options
        self._rank = rank
        self._ranks = ranks
        self._device = device()

    def own_rows(self, update: PackedUpdate) -> list[PackedRow]:
        """This rank's rows of an update, one a micro step."""
        return [_EMPTY if (row := step[self._rank]) is None else row for step in update.micro_steps]

    @torch.no_grad()
    def score(self, update: PackedUpdate) -> PerRow:
        """Log-probabilities of the targets of this rank's rows under the model as it is: float[N] for each row."""
        return [self._forward(row)[0] for row in self.own_rows(update)]

    @torch.no_grad()
    def evaluate(self, update: PackedUpdate, *, old: PerRow | None, reference: PerRow | None) -> Scored:
        """The loss of rows under the model as it is. Nothing of the model changes; the arguments are those of `run`."""
        rows = self.own_rows(update)
        advantages = self._advantages(update, rows, reference)
        sums = torch.zeros(3, dtype=torch.float64)
        stats = []
        for i, row in enumerate(rows):
            new_N, entropy_N = self._forward(row)
            tokens = self._tokens(row, advantages[i], _at(old, i), _at(reference, i))
            output = policy_loss(new_N, tokens, self._options.loss)
            sums += _sums(output)
            if row is not _EMPTY:
                stats.append(_stats(row, new_N, entropy_N, tokens, output))
        total, policy, kl = over_ranks(sums).tolist()
        return Scored(loss=total, policy_loss=policy, kl_loss=kl, stats=tuple(stats))

    def run(self, update: PackedUpdate, settings: UpdateSettings, *, old: PerRow | None, reference: PerRow | None) -> Updated:
        """One optimizer update.

        Args:
            update: Its rows.
            settings: Rate, decay, clip.
            old: Log-probabilities of the learner before the step, where `precalculate_logprobs` asks for them.
            reference: Log-probabilities of the reference policy, where a KL term asks for them.

        Raises:
            HeadraceError: the gradient is not finite.
        """
        rows = self.own_rows(update)
        advantages = self._advantages(update, rows, reference)
        set_clip(self._trainable.engine, settings.max_grad_norm)
        for group in self._trainable.optimizer.param_groups:
            group["lr"], group["weight_decay"] = settings.rate, settings.weight_decay
        engine = self._trainable.engine
        sums = torch.zeros(3, dtype=torch.float64)
        stats = []
        norm = math.nan
        for i, row in enumerate(rows):
            last = i == len(rows) - 1
            engine.set_gradient_accumulation_boundary(last)
            new_N, entropy_N = self._forward(row)
            tokens = self._tokens(row, advantages[i], _at(old, i), _at(reference, i))
            output = policy_loss(new_N, tokens, self._options.loss)
            # DeepSpeed takes the mean over ranks; the weights already make a sum of it.
            engine.backward(output.total * self._ranks)
            sums += _sums(output)
            if row is not _EMPTY:
                stats.append(_stats(row, new_N, entropy_N, tokens, output))
            if last and self._trainable.zero_stage == 0:
                norm = self._finite(self._trainable.grad_norm())
            engine.step()
        if self._trainable.zero_stage > 0:
            norm = self._finite(self._trainable.grad_norm())
        total, policy, kl = over_ranks(sums).tolist()
        return Updated(loss=total, policy_loss=policy, kl_loss=kl, grad_norm=norm, stats=tuple(stats))

    def _forward(self, row: PackedRow) -> tuple[torch.Tensor, torch.Tensor]:
        tensors = RowTensors.of(row, self._device, self._scorer.width)
        return self._scorer.score(self._trainable.engine, tensors, self._options.logprob_chunk)

    def _tokens(
        self, row: PackedRow, advantages_N: torch.Tensor, old_N: torch.Tensor | None, reference_N: torch.Tensor | None
    ) -> LossTokens:
        behaviour_N = self.tensor(row.logprobs_N)
        return LossTokens(
            old_N=behaviour_N if old_N is None else old_N,
            behaviour_N=behaviour_N,
            reference_N=reference_N,
            advantages_N=advantages_N,
            weights_N=self.tensor(row.weights_N),
            branches_N=self.tensor(row.branches_N),
        )

    def _advantages(self, update: PackedUpdate, rows: Sequence[PackedRow], reference: PerRow | None) -> PerRow:
        """Advantages of each row's targets, with the KL penalty in them where there is one."""
        plain = [self.tensor(row.advantages_N) for row in rows]
        kl = self._options.kl
        if reference is None or not kl.coef:
            return plain
        sampled = [self.tensor(row.logprobs_N) for row in rows]
        # Every rank knows the whole plan, so all decide alike whether another pass is needed.
        missing = any(bool(np.isnan(row.logprobs_N).any()) for row in update.rows)
        if kl.source == "current_learner" or missing:
            current = self.score(update)
            keep = kl.source == "sample"
            sampled = [torch.where(s.isnan(), c, s) if keep else c for s, c in zip(sampled, current, strict=True)]
        terms = [kl_terms(source, ref) for source, ref in zip(sampled, reference, strict=True)]
        own = [(t, row) for t, row in zip(terms, rows, strict=True) if row is not _EMPTY]
        sums = torch.tensor([sum(float(t.double().sum()) for t, _ in own), sum(len(row.targets_N) for _, row in own)], dtype=torch.float64)
        total, count = over_ranks(sums).tolist()
        return [adjusted_advantages(a, t, total / count, kl.coef) for a, t in zip(plain, terms, strict=True)]

    def tensor(self, array: Any) -> torch.Tensor:  # noqa: ANN401 - any numpy array
        """An array on this rank's device."""
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    @staticmethod
    def _finite(norm: float) -> float:
        if not math.isfinite(norm):
            raise HeadraceError("the gradient is not finite: the weights stay as they were")
        return norm


def without_dropout(module: Any, *, recompute: bool) -> None:  # noqa: ANN401 - a torch module
    """Put a model into evaluation mode; where activations are computed again transformers asks for training mode: then without dropout."""
    module.train(recompute)
    for part in module.modules():
        if isinstance(part, torch.nn.modules.dropout._DropoutNd):
            part.eval()
        if isinstance(getattr(part, "attention_dropout", None), float):
            part.attention_dropout = 0.0


def joined(stats: Sequence[TokenStats]) -> TokenStats:
    """The tokens of several rows as one; at least one."""

    def column(name: str) -> Any:  # noqa: ANN401 - a numpy array, or None
        parts = [getattr(stat, name) for stat in stats]
        return None if parts[0] is None else np.concatenate(parts)

    return TokenStats(**{field.name: column(field.name) for field in fields(TokenStats)})


def _at(rows: PerRow | None, i: int) -> torch.Tensor | None:
    return None if rows is None else rows[i]


def _sums(output: LossOutput) -> torch.Tensor:
    return torch.tensor([float(output.total.detach()), float(output.policy), float(output.kl_loss)], dtype=torch.float64)


def _stats(row: PackedRow, new_N: torch.Tensor, entropy_N: torch.Tensor, tokens: LossTokens, output: LossOutput) -> TokenStats:
    def numbers(tensor: torch.Tensor) -> Any:  # noqa: ANN401 - a numpy array
        return tensor.detach().double().cpu().numpy()

    return TokenStats(
        new_N=numbers(new_N),
        old_N=numbers(tokens.old_N),
        behaviour_N=numbers(tokens.behaviour_N),
        reference_N=None if tokens.reference_N is None else numbers(tokens.reference_N),
        ratio_N=numbers(output.ratio_N),
        clipped_N=output.clipped_N.cpu().numpy(),
        entropy_N=numbers(entropy_N),
        advantages_N=numbers(tokens.advantages_N),
        weights_N=numbers(tokens.weights_N),
        lags_N=row.lags_N,
    )


def _empty_row() -> PackedRow:
    ints, floats = np.int32, np.float32
    return PackedRow(
        token_ids_T=np.zeros(2, ints),
        position_ids_T=np.arange(2, dtype=ints),
        starts_G=np.zeros(1, ints),
        parents_G=np.full(1, -1, ints),
        predictors_N=np.zeros(1, ints),
        targets_N=np.zeros(1, ints),
        branches_N=np.zeros(1, ints),
        logprobs_N=np.full(1, np.nan, floats),
        advantages_N=np.zeros(1, floats),
        weights_N=np.zeros(1, floats),
        lags_N=np.full(1, -1, ints),
        sequence_tokens=2,
        sequences=0,
    )


_EMPTY = _empty_row()
"""What a rank computes that has no row left in a micro step: one target of weight zero."""
