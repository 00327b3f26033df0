"""Scoring in chunks against plain log-softmax."""

import pytest
import torch

from headrace.trainer.vocabulary import score_logits, scoring


@pytest.fixture
def head() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(6, 11, bias=False, dtype=torch.float64)


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_chunks_give_the_log_softmax_and_its_gradients(head: torch.nn.Linear, chunk: int):
    hidden = torch.randn(1, 9, 6, dtype=torch.float64, requires_grad=True)
    # Two targets share a column: a token that two sequences share predicts two different ones.
    predictors, targets = torch.tensor([0, 2, 2, 5, 7, 8, 1]), torch.tensor([3, 0, 10, 4, 4, 9, 1])
    expected = (hidden[0] @ head.weight.T).log_softmax(-1)[predictors, targets]
    gradients = torch.autograd.grad((expected * torch.arange(7)).sum(), [hidden, head.weight])
    with scoring(head, predictors, targets, chunk):
        scores = head(hidden)
    assert scores.shape == (1, 7, 2)
    torch.testing.assert_close(scores[0, :, 0], expected, rtol=0, atol=1e-13)
    for mine, theirs in zip(torch.autograd.grad((scores[0, :, 0] * torch.arange(7)).sum(), [hidden, head.weight]), gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_the_layer_is_its_own_again_also_after_an_error(head: torch.nn.Linear):
    hidden = torch.zeros(1, 2, 6, dtype=torch.float64)
    with pytest.raises(IndexError), scoring(head, torch.tensor([9]), torch.tensor([0]), 4):
        head(hidden)
    assert head(hidden).shape == (1, 2, 11)


def test_entropy_is_that_of_the_distribution():
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [50.0, 0.0, 0.0, 0.0]])
    scores = score_logits(logits, torch.tensor([1, 0]))
    torch.testing.assert_close(scores[:, 1], torch.tensor([4.0, 1.0]).log(), rtol=0, atol=1e-6)
    torch.testing.assert_close(scores[:, 0], torch.tensor([0.25, 1.0]).log(), rtol=0, atol=1e-6)


def test_a_logit_of_minus_infinity_adds_nothing_to_the_entropy():
    scores = score_logits(torch.tensor([[0.0, 0.0, -torch.inf, -torch.inf]]), torch.tensor([1]))
    torch.testing.assert_close(scores[0], torch.tensor([0.5, 2.0]).log(), rtol=0, atol=1e-6)


def test_no_more_than_a_chunk_of_logits_is_alive_at_once(head: torch.nn.Linear, monkeypatch: pytest.MonkeyPatch):
    sizes = []
    plain = torch.nn.Linear.forward

    def counted(self: torch.nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return plain(self, hidden)

    monkeypatch.setattr(torch.nn.Linear, "forward", counted)
    hidden = torch.randn(1, 9, 6, dtype=torch.float64, requires_grad=True)
    with scoring(head, torch.arange(8), torch.zeros(8, dtype=torch.int64), 3):
        scores = head(hidden)
    assert sizes == [3, 3, 2]
    scores[..., 0].sum().backward()
    assert sorted(sizes[3:]) == [2, 3, 3]  # computed again for the backward, chunk by chunk
