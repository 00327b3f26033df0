"""The loss against published values of a peer, and against closed forms in float64 written out here."""

import math
from collections.abc import Callable

import pytest
import torch

from headrace.trainer.loss import LossTokens, policy_loss
from headrace.trainer.options import LossOptions

N = math.nan
# The peer's published row, its four trainable positions: branches a, a, b, b.
GOLDEN_NEW = [-0.7, -2.5, -0.2, -1.1]
GOLDEN_OLD = [-1.0, -2.0, -0.5, N]
GOLDEN_A = [1.0, 1.0, -1.0, -1.0]

CISPO = LossOptions()
PPO = LossOptions(kind="ppo", epsilon=0.2, epsilon_high=0.2)
NARROW = LossOptions(epsilon=0.2, epsilon_high=0.2)


def changed(options: LossOptions, **changes: object) -> LossOptions:
    return LossOptions(**{name: changes.get(name, getattr(options, name)) for name in LossOptions.__slots__})  # type: ignore[attr-defined]


def run(  # noqa: PLR0917 - one row of a table
    options: LossOptions,
    new: list[float] = GOLDEN_NEW,
    old: list[float] = GOLDEN_OLD,
    advantages: list[float] = GOLDEN_A,
    weights: list[float] | None = None,
    branches: list[int] | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[float, list[float]]:
    """Mean loss and its gradient by the learner's log-probabilities."""
    new_N = torch.tensor(new, dtype=dtype, requires_grad=True)
    tokens = LossTokens(
        old_N=torch.tensor(old, dtype=dtype),
        advantages_N=torch.tensor(advantages, dtype=dtype),
        weights_N=torch.tensor(weights or [1.0] * len(new), dtype=dtype),
        branches_N=torch.tensor(branches or [0, 0, 1, 1]),
    )
    loss = policy_loss(new_N, tokens, options).total / len(new)
    loss.backward()
    return loss.item(), new_N.grad.tolist()


@pytest.mark.parametrize(
    ("options", "old", "loss", "gradient"),
    [
        (CISPO, GOLDEN_OLD, 0.272814, [-0.337465, -0.151633, 0.337465, 0.25]),
        (PPO, GOLDEN_OLD, 0.135832, [0, -0.151633, 0.337465, 0.25]),
        (changed(PPO, epsilon_high=0.28), GOLDEN_OLD, 0.115832, [0, -0.151633, 0.337465, 0.25]),
        (changed(PPO, epsilon=0.1, epsilon_high=0.1), GOLDEN_OLD, 0.160832, [0, -0.151633, 0.337465, 0.25]),
        (NARROW, GOLDEN_OLD, 0.375000, [-0.3, -0.2, 0.3, 0.25]),
        (changed(PPO, mask_prob_ratio=True), GOLDEN_OLD, 0.450000, [0, 0, 0, 0.25]),
        (changed(NARROW, mask_prob_ratio=True), GOLDEN_OLD, 0.325000, [-0.2, -0.2, 0.2, 0.25]),
        (CISPO, [N, N, N, N], 0.475000, [-0.25, -0.25, 0.25, 0.25]),
        (CISPO, [-9999.0, -2.0, -0.5, N], 0.911589, [-1.25, -0.151633, 0.337465, 0.25]),
        (CISPO, [-math.inf, -2.0, -0.5, N], 0.911589, [-1.25, -0.151633, 0.337465, 0.25]),
        # The peer's gradient is NaN at the token of -9999; the clipped branch of PPO has none.
        (PPO, [-9999.0, -2.0, -0.5, N], 0.135832, [0, -0.151633, 0.337465, 0.25]),
        # The peer caps positive advantages too (0.229082); the option's name says negative ones, so only the third token changes.
        (
            changed(CISPO, negative_cap=1.0),
            GOLDEN_OLD,
            (0.7 * math.exp(0.3) + 2.5 * math.exp(-0.5) - 0.2 - 1.1) / 4,
            [-0.337465, -0.151633, 0.25, 0.25],
        ),
    ],
)
def test_published_values_to_six_digits(options: LossOptions, old: list[float], loss: float, gradient: list[float]):
    got, got_gradient = run(options, old=old)
    assert got == pytest.approx(loss, abs=6e-7)
    assert got_gradient == pytest.approx(gradient, abs=6e-7)


def finite_difference(value: Callable[[list[float]], float], at: list[float]) -> list[float]:
    h = 1e-6
    return [(value([*at[:i], at[i] + h, *at[i + 1 :]]) - value([*at[:i], at[i] - h, *at[i + 1 :]])) / (2 * h) for i in range(len(at))]


NEW = [-0.31, -1.7, -0.9, -2.2, -0.05, -3.1]
OLD = [-0.5, -1.2, -1.9, -2.0, N, -2.9]
A = [1.5, 1.5, 1.5, -0.75, -0.75, -0.75]
W = [0.6, 0.6, 0.6, 1.4, 1.4, 1.4]
# Ids that float16 and bfloat16 can't tell apart: branches are compared as integers.
BRANCHES = [4096, 4096, 4097, 4098, 4098, 4098]


def ratios(new: list[float], level: str) -> list[float]:
    d = [n - (n if math.isnan(o) else o) for n, o in zip(new, OLD, strict=True)]
    token = [math.exp(x) for x in d]
    whole = []
    for b in BRANCHES:
        own = [x for x, c in zip(d, BRANCHES, strict=True) if c == b]
        whole.append(math.exp(sum(own) / len(own)))
    return {
        "token": token,
        "sequence": whole,
        "average": [(t + s) / 2 for t, s in zip(token, whole, strict=True)],
        "geometric_average": [math.sqrt(t * s) for t, s in zip(token, whole, strict=True)],
    }[level]


@pytest.mark.parametrize("level", ["token", "sequence", "average", "geometric_average"])
@pytest.mark.parametrize("kind", ["cispo", "ppo"])
def test_every_ratio_level_equals_its_closed_form(kind: str, level: str):
    options = LossOptions(kind=kind, epsilon=0.3, epsilon_high=0.5, level=level)  # type: ignore[arg-type]
    r = ratios(NEW, level)
    clipped = [min(max(x, 0.7), 1.5) for x in r]
    if kind == "cispo":
        terms = [-c * a * w * n for c, a, w, n in zip(clipped, A, W, NEW, strict=True)]
    else:
        terms = [-min(x * a, c * a) * w for x, c, a, w in zip(r, clipped, A, W, strict=True)]
    loss, gradient = run(options, NEW, OLD, A, W, BRANCHES)
    assert loss == pytest.approx(sum(terms) / 6, abs=1e-9)
    if kind == "cispo":
        assert gradient == pytest.approx([-c * a * w / 6 for c, a, w in zip(clipped, A, W, strict=True)], abs=1e-9)


@pytest.mark.parametrize("level", ["token", "sequence", "average", "geometric_average"])
def test_the_gradient_of_ppo_flows_through_the_ratio_to_the_whole_branch(level: str):
    """Against central differences; the missing log-probability stays what it was, so that the ratio moves there too."""
    options = LossOptions(kind="ppo", epsilon=0.3, epsilon_high=0.5, level=level)  # type: ignore[arg-type]
    filled = [n if math.isnan(o) else o for n, o in zip(NEW, OLD, strict=True)]
    _, gradient = run(options, NEW, OLD, A, W, BRANCHES)
    numeric = finite_difference(lambda new: run(options, new, filled, A, W, BRANCHES)[0], NEW)
    assert gradient == pytest.approx(numeric, abs=1e-8)


def test_kimi_tau_lowers_the_advantage_by_the_detached_log_ratio():
    tau = 0.3
    loss, gradient = run(LossOptions(kimi_k2_tau=tau), NEW, OLD, A, W, BRANCHES)
    d = [0.0 if math.isnan(o) else n - o for n, o in zip(NEW, OLD, strict=True)]
    factor = [min(math.exp(x), 5.0) * (a - tau * x) * w / 6 for x, a, w in zip(d, A, W, strict=True)]
    assert loss == pytest.approx(-sum(f * n for f, n in zip(factor, NEW, strict=True)), abs=1e-9)
    assert gradient == pytest.approx([-f for f in factor], abs=1e-9)


def test_recomputed_log_probabilities_make_the_ratio_one_and_truncation_weighs_by_the_old_ratio():
    """`precalculate_logprobs` with one update a step: old is the learner itself; rho = exp(old - behaviour), capped, detached."""
    options = LossOptions(kind="ppo", epsilon=0.2, epsilon_high=0.2, recompute_old=True, truncation_cap=1.1)
    loss, gradient = run(options, NEW, OLD, A, W, BRANCHES)
    rho = [1.0 if math.isnan(o) else min(math.exp(n - o), 1.1) for n, o in zip(NEW, OLD, strict=True)]
    factor = [-a * w * t / 6 for a, w, t in zip(A, W, rho, strict=True)]
    assert loss == pytest.approx(sum(factor), abs=1e-9)
    assert gradient == pytest.approx(factor, abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("stored", [-math.inf, math.inf, -9999.0, -101.0, N, -3.4e38, 3.4e38])
@pytest.mark.parametrize("level", ["token", "sequence", "average", "geometric_average"])
@pytest.mark.parametrize("kind", ["cispo", "ppo"])
@pytest.mark.parametrize("tau", [None, 0.5])
def test_loss_and_gradient_are_finite_for_any_stored_log_probability(kind: str, level: str, stored: float, tau: float | None, dtype):
    for a in ([1.0] * 4, [-1.0] * 4):
        options = LossOptions(kind=kind, level=level, kimi_k2_tau=tau)  # type: ignore[arg-type]
        loss, gradient = run(options, old=[stored, -2.0, -stored, N], advantages=a, dtype=dtype)
        assert math.isfinite(loss)
        assert all(math.isfinite(g) for g in gradient)
