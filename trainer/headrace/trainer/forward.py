"""From packed rows to the learner's log-probabilities of the sampled tokens.

Guarantees: full-softmax log-probabilities at temperature 1, computed in float32; only positions that predict a trainable token go
through the vocabulary projection. Rows go through the model in order, as many at a time as fit the token budget. Gives up: a
vocabulary projection in chunks, so a micro batch holds N x V logits. Shapes: R rows of L tokens, N trainable tokens of a micro
batch, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch

from headrace.trainer.loss import LossTokens
from headrace.trainer.packing import PackedRows

# Tokens in one forward pass, padding included: their activations live until its backward. 2,048 tokens of a 135M model in float32 are
# about 4 GiB. A longer row goes by itself.
TOKENS = {"cpu": 2_048, "cuda": 16_384}


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


def micro_batches(rows: PackedRows, device: torch.device, tokens: int | None = None) -> list[MicroBatch]:
    """All rows, in order, a micro batch being as many as fit into `tokens` (at least one; None: the device's budget)."""
    tokens = TOKENS[device.type] if tokens is None else tokens
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
    logits_NV = logits_at(model, batch.token_ids_RL, batch.position_ids_RL, batch.rows_N, batch.columns_N - 1)
    logprobs_NV = logits_NV.float().log_softmax(-1)
    targets_N = batch.token_ids_RL[batch.rows_N, batch.columns_N]
    new_N = logprobs_NV.gather(-1, targets_N[:, None])[:, 0]
    with torch.no_grad():
        entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
    return new_N, entropy_N


def logits_at(
    model: Any,  # noqa: ANN401 - a transformers model or a DeepSpeed engine, untyped
    token_ids_RL: torch.Tensor,
    position_ids_RL: torch.Tensor,
    rows_N: torch.Tensor,
    columns_N: torch.Tensor,
) -> torch.Tensor:
    """Logits [N, V] at chosen positions of packed rows; the others are never projected to the vocabulary.

    The positions are chosen right before the output projection, by a hook: the model's own forward then does whatever it does to logits
    (soft caps, scales) on those alone. `logits_to_keep` of transformers takes the same columns of every row only.
    """
    head = getattr(model, "module", model).get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda _module, inputs: (inputs[0][rows_N, columns_N][None], *inputs[1:]))
    try:
        # No attention mask and no cache: only then do position ids that restart keep sequences apart.
        output = model(input_ids=token_ids_RL, position_ids=position_ids_RL, use_cache=False)
    finally:
        hook.remove()
    return output.logits[0]  # type: ignore[no-any-return]  # untyped
