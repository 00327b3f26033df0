"""From packed rows to the learner's log-probabilities of the sampled tokens.

Guarantees: full-softmax log-probabilities at temperature 1, computed in float32; only positions that predict a trainable token
are kept. Rows go through the model in order, as many at a time as fit the token budget, so that the result does not depend on
anything but the rows. Gives up: a vocabulary projection in chunks; where logits of all positions would be large, rows go one at a
time and the model projects the needed positions only. Shapes: R rows of L tokens, N trainable tokens of a micro batch, V
vocabulary.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch

from headrace.trainer.loss import LossTokens
from headrace.trainer.packing import PackedRows

# Tokens in one forward pass (padding included) and logits kept at most: what a laptop's memory takes.
TOKENS = 16_384
LOGITS = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows that go through the model together."""

    token_ids_RL: torch.Tensor
    position_ids_RL: torch.Tensor
    rows_N: torch.Tensor
    """Row of each trainable token."""
    columns_N: torch.Tensor
    """Column of each trainable token; the column before predicts it."""
    tokens: LossTokens


def micro_batches(rows: PackedRows, device: torch.device, tokens: int = TOKENS) -> list[MicroBatch]:
    """All rows, in order, a micro batch being as many as fit into `tokens` (at least one)."""
    at_once = max(1, tokens // rows.token_ids_RL.shape[1])
    return [_micro_batch(rows, slice(first, first + at_once), device) for first in range(0, rows.rows, at_once)]


def _micro_batch(rows: PackedRows, chosen: slice, device: torch.device) -> MicroBatch:
    def tensor(array: Any, dtype: torch.dtype) -> torch.Tensor:  # noqa: ANN401 - any numpy array
        return torch.from_numpy(array[chosen]).to(device=device, dtype=dtype)

    rows_N, columns_N = tensor(rows.trainable_RL, torch.bool).nonzero(as_tuple=True)
    return MicroBatch(
        token_ids_RL=tensor(rows.token_ids_RL, torch.int64),
        position_ids_RL=tensor(rows.position_ids_RL, torch.int64),
        rows_N=rows_N,
        columns_N=columns_N,
        tokens=LossTokens(
            old_N=tensor(rows.logprobs_RL, torch.float32)[rows_N, columns_N],
            advantages_N=tensor(rows.advantages_RL, torch.float32)[rows_N, columns_N],
            weights_N=tensor(rows.weights_RL, torch.float32)[rows_N, columns_N],
            branches_N=tensor(rows.branches_RL, torch.int64)[rows_N, columns_N],
        ),
    )


def sampled_logprobs(model: Any, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401 - untyped model or engine
    """Log-probabilities (with gradient) and entropies (without) of the trainable tokens: float32[N] each."""
    logits_NV = _logits(model, batch)
    logprobs_NV = logits_NV.float().log_softmax(-1)
    targets_N = batch.token_ids_RL[batch.rows_N, batch.columns_N]
    new_N = logprobs_NV.gather(-1, targets_N[:, None])[:, 0]
    with torch.no_grad():
        entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
    return new_N, entropy_N


def _logits(model: Any, batch: MicroBatch) -> torch.Tensor:  # noqa: ANN401 - untyped model or engine
    """Logits at the positions that predict the trainable tokens."""
    inner = getattr(model, "module", model)
    vocabulary = inner.get_output_embeddings().weight.shape[0]
    rows, width = batch.token_ids_RL.shape
    if rows * width * vocabulary <= LOGITS or not _projects_chosen(inner):
        output = model(input_ids=batch.token_ids_RL, position_ids=batch.position_ids_RL, use_cache=False)
        return output.logits[batch.rows_N, batch.columns_N - 1]  # type: ignore[no-any-return]  # untyped
    parts = []
    for row in range(rows):
        columns = batch.columns_N[batch.rows_N == row] - 1
        output = model(
            input_ids=batch.token_ids_RL[row : row + 1],
            position_ids=batch.position_ids_RL[row : row + 1],
            use_cache=False,
            logits_to_keep=columns,
        )
        parts.append(output.logits[0])
    return torch.cat(parts)


def _projects_chosen(model: Any) -> bool:  # noqa: ANN401 - untyped model
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return "logits_to_keep" in inspect.signature(inner.forward).parameters
