"""The vocabulary projection, in chunks: log-probabilities of chosen tokens without ever holding a row's logits.

While `scoring` is in force, the model's output layer turns hidden states not into logits but into two numbers for each target: its
log-probability and the entropy of the distribution it was drawn from. Chunks of targets go through one by one; in the backward pass a
chunk's logits are computed again. Guarantees: full-softmax log-probabilities at temperature 1, in float32 or more; memory for C x V
logits. Limitations: models that change logits behind their output layer (soft caps, scales): `headrace.trainer.model` finds them out and
lets `logits_at` serve them whole. Shapes: T tokens of a row, N targets, C targets of a chunk, V vocabulary, W hidden width.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


@contextmanager
def scoring(head: Any, predictors_N: torch.Tensor, targets_N: torch.Tensor, chunk: int) -> Iterator[None]:  # noqa: ANN401 - a module
    """Let an output layer score targets: its output becomes [1, N, 2], log-probability and entropy.

    Args:
        head: The output layer.
        predictors_N: int64: columns whose hidden states predict.
        targets_N: int64: token ids.
        chunk: Targets that go through at once.
    """
    own = head.__dict__.get("forward")  # a wrapper that someone else hung on this layer
    project = head.forward

    def score(hidden_1TW: torch.Tensor) -> torch.Tensor:
        hidden_NW = hidden_1TW[0, predictors_N]

        def part(hidden_CW: torch.Tensor, targets_C: torch.Tensor) -> torch.Tensor:
            return score_logits(project(hidden_CW), targets_C)

        parts = []
        for first in range(0, len(targets_N), chunk):
            chosen = slice(first, first + chunk)
            if len(targets_N) <= chunk or not torch.is_grad_enabled():
                parts.append(part(hidden_NW[chosen], targets_N[chosen]))
            else:
                parts.append(checkpoint(part, hidden_NW[chosen], targets_N[chosen], use_reentrant=False))
        return torch.cat(parts)[None]

    head.forward = score
    try:
        yield
    finally:
        if own is None:
            del head.forward  # the class's own shows again
        else:
            head.forward = own


def score_logits(logits_CV: torch.Tensor, targets_C: torch.Tensor) -> torch.Tensor:
    """[C, 2] from [C, V]: log-probability (with gradient) and entropy (without) of each target."""
    logprobs_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32)).log_softmax(-1)
    with torch.no_grad():
        # A token of probability 0 adds 0, not 0 * -inf.
        entropy_C = -(logprobs_CV.exp() * logprobs_CV).masked_fill_(logprobs_CV == -math.inf, 0.0).sum(-1)
    return torch.stack([logprobs_CV.gather(-1, targets_C[:, None])[:, 0], entropy_C], dim=-1)
