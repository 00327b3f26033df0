"""From a packed row to the learner's log-probabilities of its targets.

Guarantees: full-softmax log-probabilities at temperature 1, in float32 or more; only columns that predict a target go through the
vocabulary projection. One row is one pass. Shapes: T tokens of a row, N targets, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headrace.trainer.rows import PackedRow
from headrace.trainer.tree_attention import LAYOUT, RowAttention
from headrace.trainer.vocabulary import score_logits, scoring


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTensors:
    """A row on its device."""

    token_ids_T: torch.Tensor
    position_ids_T: torch.Tensor
    predictors_N: torch.Tensor
    targets_N: torch.Tensor
    attention: RowAttention | None
    """None: the row holds one sequence, and the model's own attention serves it."""

    @classmethod
    def of(cls, row: PackedRow, device: torch.device, width: int | None) -> "RowTensors":
        """Move a row.

        Args:
            row: The row.
            device: Where to.
            width: Of the attention (heads x head width); None: use the model's own attention.
        """

        def tensor(array: Any) -> torch.Tensor:  # noqa: ANN401 - any numpy array
            return torch.from_numpy(np.ascontiguousarray(array)).to(device=device, dtype=torch.int64)

        return cls(
            token_ids_T=tensor(row.token_ids_T),
            position_ids_T=tensor(row.position_ids_T),
            predictors_N=tensor(row.predictors_N),
            targets_N=tensor(row.targets_N),
            attention=None if width is None else RowAttention.of(row, device, width),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorer:
    """How a loaded model scores rows; the start-up self-test decides which way is right for it."""

    width: int | None
    """Of the tree attention; None: one sequence a row."""
    chunked: bool
    """Whether the output layer's logits are the model's, so that they can be scored in chunks."""

    def score(self, model: Any, row: RowTensors, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401 - model or engine, untyped
        """Log-probabilities (with gradient) and entropies (without) of the targets: float[N] each."""
        if self.chunked:
            with scoring(_head(model), row.predictors_N, row.targets_N, chunk):
                scores_N2 = _forward(model, row)[0]
        else:
            scores_N2 = score_logits(logits_at(model, row, row.predictors_N), row.targets_N)
        return scores_N2[:, 0], scores_N2[:, 1].detach()


def logits_at(model: Any, row: RowTensors, columns_N: torch.Tensor) -> torch.Tensor:  # noqa: ANN401 - model or engine, untyped
    """Logits [N, V] at chosen columns; the others are never projected to the vocabulary.

    The columns are chosen right before the output layer, by a hook: the model's own forward then does whatever it does to logits (soft
    caps, scales) on those alone. `logits_to_keep` of transformers takes the last columns only.
    """
    hook = _head(model).register_forward_pre_hook(lambda _module, inputs: (inputs[0][0, columns_N][None], *inputs[1:]))
    try:
        return _forward(model, row)[0]
    finally:
        hook.remove()


def _head(model: Any) -> Any:  # noqa: ANN401 - untyped
    return getattr(model, "module", model).get_output_embeddings()


def _forward(model: Any, row: RowTensors) -> torch.Tensor:  # noqa: ANN401 - untyped
    # No attention mask and no cache: the layout alone says who sees whom.
    layout = {} if row.attention is None else {LAYOUT: row.attention}
    output = model(input_ids=row.token_ids_T[None], position_ids=row.position_ids_T[None], use_cache=False, **layout)
    return output.logits  # type: ignore[no-any-return]  # untyped
