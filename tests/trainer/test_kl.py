"""KL as a change of advantages: the peer's published values, closed forms, and that nothing depends on the packing."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.trainer.kl import adjusted_advantages, kl_terms
from headrace.trainer.loss import LossTokens, policy_loss
from headrace.trainer.options import LossOptions

NEW = [-0.7, -2.5, -0.2, -1.1]
REFERENCE = [-0.9, -2.0, -0.3, -1.0]


def doubles(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_published_loss_gradient_and_kl_of_coefficient_one_half():
    new_N = doubles(NEW).requires_grad_()
    terms_N = kl_terms(new_N, doubles(REFERENCE))
    mean = float(terms_N.mean())
    assert mean == pytest.approx(-0.075, abs=1e-12)
    tokens = LossTokens(
        old_N=doubles([-1.0, -2.0, -0.5, math.nan]),
        behaviour_N=doubles([-1.0, -2.0, -0.5, math.nan]),
        reference_N=None,
        advantages_N=adjusted_advantages(doubles([1, 1, -1, -1]), terms_N, mean, 0.5),
        weights_N=doubles([0.25] * 4),
        branches_N=torch.tensor([0, 0, 1, 1]),
    )
    output = policy_loss(new_N, tokens, LossOptions())
    output.total.backward()
    assert output.total.item() == pytest.approx(0.318420, abs=6e-7)
    assert new_N.grad is not None
    assert new_N.grad.tolist() == pytest.approx([-0.291063, -0.183855, 0.366993, 0.246875], abs=6e-7)


def test_a_token_moved_further_than_the_mean_loses_advantage_by_the_difference():
    k = [n - r for n, r in zip(NEW, REFERENCE, strict=True)]
    mean = sum(k) / 4
    changed = adjusted_advantages(doubles([1.0, 1.0, -1.0, -1.0]), kl_terms(doubles(NEW), doubles(REFERENCE)), mean, 0.3)
    assert changed.tolist() == pytest.approx([a + 0.3 * (mean - x) for a, x in zip([1, 1, -1, -1], k, strict=True)], abs=1e-12)


def test_the_change_carries_no_gradient():
    terms_N = kl_terms(doubles(NEW).requires_grad_(), doubles(REFERENCE).requires_grad_())
    assert not adjusted_advantages(doubles([1.0] * 4), terms_N, 0.1, 0.5).requires_grad


@given(
    pairs=st.lists(st.tuples(st.floats(-8, 0), st.floats(-8, 0)), min_size=2, max_size=20),
    coef=st.floats(0, 2),
    cut=st.integers(1, 19),
)
def test_the_change_sums_to_zero_over_the_update_however_it_is_cut_into_rows(pairs: list[tuple[float, float]], coef: float, cut: int):
    source, reference = (doubles(list(side)) for side in zip(*pairs, strict=True))
    mean = float(kl_terms(source, reference).mean())
    rows = [slice(0, cut), slice(cut, None)]
    changes = [adjusted_advantages(torch.zeros_like(source[row]), kl_terms(source[row], reference[row]), mean, coef) for row in rows]
    assert float(torch.cat(changes).sum()) == pytest.approx(0, abs=1e-9)
    whole = adjusted_advantages(torch.zeros_like(source), kl_terms(source, reference), mean, coef)
    assert torch.equal(torch.cat(changes), whole)


@pytest.mark.parametrize("odd", [-math.inf, math.inf, -9999.0, math.nan])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_any_log_probability_gives_a_bounded_term_and_a_missing_one_gives_none(odd: float, dtype: torch.dtype):
    one, other = torch.tensor([odd, -1.0, odd], dtype=dtype), torch.tensor([-1.0, odd, odd], dtype=dtype)
    terms = kl_terms(one, other).tolist()
    assert all(abs(term) <= 20 for term in terms)
    assert terms[2] == 0
    assert terms[0] == -terms[1] == (0 if math.isnan(odd) else math.copysign(20, odd))


def test_advantages_keep_their_type():
    changed = adjusted_advantages(torch.ones(2), kl_terms(torch.zeros(2), torch.zeros(2)), 0.5, 1.0)
    assert (changed.dtype, changed.tolist()) == (torch.float32, [1.5, 1.5])
