"""The loss against published values of a peer, and against closed forms in float64 written out here."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.trainer.loss import LossOutput, LossTokens, policy_loss
from headrace.trainer.options import LossOptions

N = math.nan
Result = tuple[float, list[float]]

CISPO = LossOptions()
PPO = LossOptions(kind="ppo", epsilon=0.2, epsilon_high=0.2)
NARROW = LossOptions(epsilon=0.2, epsilon_high=0.2)
LEVELS = ["token", "sequence", "average", "geometric_average"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Trained tokens as plain floats. By default the peer's published row, its four trainable positions: branches a, a, b, b."""

    new: Sequence[float] = (-0.7, -2.5, -0.2, -1.1)
    old: Sequence[float] = (-1.0, -2.0, -0.5, N)
    behaviour: Sequence[float] = field(default=())
    """As `old` where empty."""
    reference: Sequence[float] | None = (-0.9, -2.0, -0.3, -1.0)
    advantages: Sequence[float] = (1.0, 1.0, -1.0, -1.0)
    weights: Sequence[float] = (0.25, 0.25, 0.25, 0.25)
    branches: Sequence[int] = (0, 0, 1, 1)

    def output(self, options: LossOptions, dtype: torch.dtype = torch.float64) -> tuple[LossOutput, torch.Tensor]:
        new_N = torch.tensor(self.new, dtype=dtype, requires_grad=True)
        tokens = LossTokens(
            old_N=torch.tensor(self.old, dtype=dtype),
            behaviour_N=torch.tensor(self.behaviour or self.old, dtype=dtype),
            reference_N=None if self.reference is None else torch.tensor(self.reference, dtype=dtype),
            advantages_N=torch.tensor(self.advantages, dtype=dtype),
            weights_N=torch.tensor(self.weights, dtype=dtype),
            branches_N=torch.tensor(self.branches, dtype=torch.int64),
        )
        return policy_loss(new_N, tokens, options), new_N

    def run(self, options: LossOptions, dtype: torch.dtype = torch.float64) -> Result:
        """Loss, and its gradient by the learner's log-probabilities."""
        output, new_N = self.output(options, dtype)
        output.total.backward()
        assert new_N.grad is not None
        return output.total.item(), new_N.grad.tolist()


@pytest.mark.parametrize(
    ("options", "old", "loss", "gradient"),
    [
        (CISPO, Case.old, 0.272814, [-0.337465, -0.151633, 0.337465, 0.25]),
        (PPO, Case.old, 0.135832, [0, -0.151633, 0.337465, 0.25]),
        (replace(PPO, epsilon_high=0.28), Case.old, 0.115832, [0, -0.151633, 0.337465, 0.25]),
        (replace(PPO, epsilon=0.1, epsilon_high=0.1), Case.old, 0.160832, [0, -0.151633, 0.337465, 0.25]),
        (NARROW, Case.old, 0.375000, [-0.3, -0.2, 0.3, 0.25]),
        (replace(PPO, mask_prob_ratio=True), Case.old, 0.450000, [0, 0, 0, 0.25]),
        (replace(NARROW, mask_prob_ratio=True), Case.old, 0.325000, [-0.2, -0.2, 0.2, 0.25]),
        (CISPO, (N, N, N, N), 0.475000, [-0.25, -0.25, 0.25, 0.25]),
        (CISPO, (-9999.0, -2.0, -0.5, N), 0.911589, [-1.25, -0.151633, 0.337465, 0.25]),
        (CISPO, (-math.inf, -2.0, -0.5, N), 0.911589, [-1.25, -0.151633, 0.337465, 0.25]),
        # Three rows where the peer is wrong by its own documentation. Its gradient is NaN at the token of -9999: the clipped branch of PPO
        # is a constant there, so it is 0.
        (PPO, (-9999.0, -2.0, -0.5, N), 0.135832, [0, -0.151633, 0.337465, 0.25]),
        # The peer caps positive advantages too (0.229082); the option's name says negative ones, so only the third token changes.
        (
            replace(CISPO, negative_cap=1.0),
            Case.old,
            (0.7 * math.exp(0.3) + 2.5 * math.exp(-0.5) - 0.2 - 1.1) / 4,
            [-0.337465, -0.151633, 0.25, 0.25],
        ),
        # Truncation without recomputed log-probabilities: the peer applies the same ratio twice (0.123657). `resolve` leaves the cap out,
        # and a cap on exp(old - behaviour) = 1 changes nothing either.
        (replace(CISPO, truncation_cap=1.0), Case.old, 0.272814, [-0.337465, -0.151633, 0.337465, 0.25]),
    ],
)
def test_published_values_to_six_digits(options: LossOptions, old: tuple[float, ...], loss: float, gradient: list[float]):
    got, got_gradient = Case(old=old).run(options)
    assert got == pytest.approx(loss, abs=6e-7)
    assert got_gradient == pytest.approx(gradient, abs=6e-7)


def closed_form(case: Case, o: LossOptions) -> Result:
    """Loss and gradient written out from the definitions."""
    n = len(case.new)
    old = [new if math.isnan(old) else old for new, old in zip(case.new, case.old, strict=True)]
    behaviour = [x if math.isnan(b) else b for x, b in zip(old, case.behaviour or case.old, strict=True)]
    members = defaultdict(list)
    for i, branch in enumerate(case.branches):
        members[branch].append(i)
    loss, gradient = 0.0, [0.0] * n
    for i in range(n):
        d, own = case.new[i] - old[i], members[case.branches[i]]
        token = math.exp(d)
        # Over the tokens whose old log-probability is known; the others take this mean, so each token's share of the gradient is 1 / n.
        known = [case.new[j] - case.old[j] for j in own if not math.isnan(case.old[j])]
        whole = math.exp(sum(known) / max(1, len(known)))
        # The ratio, and its derivatives: by the token itself, and by each token of its branch (to be divided by their number).
        r, by_token, by_branch = {
            "token": (token, token, 0.0),
            "sequence": (whole, 0.0, whole),
            "average": ((token + whole) / 2, token / 2, whole / 2),
            "geometric_average": (math.sqrt(token * whole), math.sqrt(token * whole) / 2, math.sqrt(token * whole) / 2),
        }[o.level]
        a, w, live = case.advantages[i], case.weights[i], True
        if o.negative_cap is not None and a < 0 and r > o.negative_cap:
            r, live = o.negative_cap, False
        if o.mask_prob_ratio and not 1 - o.epsilon < r < 1 + o.epsilon_high:
            r, live = 0.0, False
        a -= (o.kimi_k2_tau or 0.0) * d
        clipped = min(max(r, 1 - o.epsilon), 1 + o.epsilon_high)
        if o.truncation_cap is not None:
            w *= min(math.exp(old[i] - behaviour[i]), o.truncation_cap)
        if o.kind == "cispo":
            loss -= w * clipped * a * case.new[i]
            gradient[i] -= w * clipped * a
        else:
            loss -= w * min(r * a, clipped * a)
            if live and r * a <= clipped * a:
                gradient[i] -= w * a * by_token
                for j in own:
                    gradient[j] -= w * a * by_branch / len(own)
        if o.kl_loss_coef and case.reference is not None:
            u = case.reference[i] - case.new[i]
            loss += o.kl_loss_coef * case.weights[i] * (math.exp(u) - 1 - u)
            gradient[i] += o.kl_loss_coef * case.weights[i] * (1 - math.exp(u))
    return loss, gradient


OFF_POLICY = Case(
    new=(-0.31, -1.7, -0.9, -2.2, -0.05, -3.1),
    old=(-0.5, -1.2, -1.9, -2.0, N, -2.9),
    behaviour=(-0.6, -1.3, -1.7, N, -0.1, -3.3),
    reference=(-0.4, -1.5, -1.0, -2.6, -0.01, -3.0),
    advantages=(1.5, 1.5, 1.5, -0.75, -0.75, -0.75),
    weights=(0.1, 0.1, 0.1, 0.23, 0.23, 0.23),
    # Ids that float16 and bfloat16 can't tell apart: branches are compared as integers.
    branches=(4096, 4096, 4097, 4098, 4098, 4098),
)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["cispo", "ppo"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"epsilon": 0.05, "epsilon_high": 0.05},
        {"mask_prob_ratio": True},
        {"negative_cap": 0.9},
        {"kimi_k2_tau": 0.3},
        {"recompute_old": True, "truncation_cap": 1.1},
        {"kl_loss_coef": 0.7},
        {"mask_prob_ratio": True, "negative_cap": 1.1, "kimi_k2_tau": -0.2, "truncation_cap": 0.8, "kl_loss_coef": 0.01},
    ],
    ids=str,
)
def test_loss_and_gradient_of_every_option_equal_their_closed_form(kind: str, level: str, changes: dict[str, float]):
    options = LossOptions(**({"kind": kind, "level": level, "epsilon": 0.3, "epsilon_high": 0.5} | changes))  # type: ignore[arg-type]
    loss, gradient = OFF_POLICY.run(options)
    expected, expected_gradient = closed_form(OFF_POLICY, options)
    assert loss == pytest.approx(expected, abs=1e-9)
    assert gradient == pytest.approx(expected_gradient, abs=1e-9)


logprobs = st.floats(-6, 0)
tokens = st.tuples(logprobs, logprobs | st.just(N), logprobs | st.just(N), logprobs, st.floats(-3, 3), st.floats(0, 1), st.integers(0, 3))
cases = st.lists(tokens, min_size=1, max_size=12).map(
    lambda rows: Case(**dict(zip(("new", "old", "behaviour", "reference", "advantages", "weights", "branches"), zip(*rows), strict=True)))  # noqa: B905
)
any_options = st.builds(
    LossOptions,
    kind=st.sampled_from(["cispo", "ppo"]),
    epsilon=st.sampled_from([0.0003, 0.2, 1.0, 1.7]),
    epsilon_high=st.sampled_from([0.0004, 0.28, 4.0]),
    level=st.sampled_from(LEVELS),
    mask_prob_ratio=st.booleans(),
    negative_cap=st.none() | st.sampled_from([0.5, 1.3]),
    kimi_k2_tau=st.none() | st.floats(-1, 1),
    truncation_cap=st.none() | st.sampled_from([0.7, 2.0]),
    kl_loss_coef=st.sampled_from([0.0, 0.001, 1.0]),
)


@given(case=cases, options=any_options)
@settings(deadline=None, max_examples=300)
def test_any_combination_of_options_equals_its_closed_form(case: Case, options: LossOptions):
    loss, gradient = case.run(options)
    expected, expected_gradient = closed_form(case, options)
    # Ratios reach exp(6): 1e-9 is relative to the size of the terms.
    assert loss == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert gradient == pytest.approx(expected_gradient, rel=1e-9, abs=1e-9)


@given(case=cases, options=any_options, factor=st.integers(2**33, 2**60))
@settings(deadline=None, max_examples=50)
def test_the_values_of_branch_ids_do_not_matter(case: Case, options: LossOptions, factor: int):
    sparse = replace(case, branches=[factor * (branch - 2) + 1 for branch in case.branches])
    assert sparse.run(options) == case.run(options)


@given(case=cases, options=any_options)
@settings(deadline=None, max_examples=50)
def test_losses_and_gradients_of_parts_add_up_to_those_of_the_whole(case: Case, options: LossOptions):
    """Nobody divides later: micro batches that keep branches whole sum to the update's loss."""
    loss, gradient = 0.0, [0.0] * len(case.new)
    for branch in set(case.branches):
        own = [i for i, b in enumerate(case.branches) if b == branch]
        part = replace(case, **{name: [getattr(case, name)[i] for i in own] for name in case.__dataclass_fields__})
        part_loss, part_gradient = part.run(options)
        loss += part_loss
        for i, value in zip(own, part_gradient, strict=True):
            gradient[i] += value
    whole, whole_gradient = case.run(options)
    assert loss == pytest.approx(whole, rel=1e-9, abs=1e-9)
    assert gradient == pytest.approx(whole_gradient, rel=1e-9, abs=1e-9)


def test_the_total_is_the_policy_term_plus_the_kl_term():
    output, _ = OFF_POLICY.output(LossOptions(kl_loss_coef=0.7))
    plain, _ = OFF_POLICY.output(LossOptions())
    assert output.total.item() == pytest.approx((output.policy + output.kl_loss).item(), abs=1e-15)
    assert output.policy.item() == plain.total.item()
    assert output.kl_loss.item() > 0
    assert not output.policy.requires_grad
    assert not output.kl_loss.requires_grad
    assert plain.kl_loss.item() == 0


def test_a_missing_reference_has_no_kl_and_a_missing_tensor_is_an_error():
    missing = replace(OFF_POLICY, reference=[N] * 6)
    assert missing.run(LossOptions(kl_loss_coef=0.7)) == OFF_POLICY.run(LossOptions())
    with pytest.raises(ValueError, match="kl_loss_coef needs the reference"):
        replace(OFF_POLICY, reference=None).run(LossOptions(kl_loss_coef=0.7))


def test_recomputed_log_probabilities_make_the_ratio_one_and_truncation_weighs_by_the_sampler():
    """`precalculate_logprobs` with one update a step: old is the learner itself; rho = exp(old - behaviour), capped, detached."""
    case = replace(OFF_POLICY, old=OFF_POLICY.new)
    options = LossOptions(kind="ppo", epsilon=0.2, epsilon_high=0.2, recompute_old=True, truncation_cap=1.1)
    output, _ = case.output(options)
    rho = [1.0 if math.isnan(b) else min(math.exp(n - b), 1.1) for n, b in zip(case.new, case.behaviour, strict=True)]
    factor = [-a * w * t for a, w, t in zip(case.advantages, case.weights, rho, strict=True)]
    loss, gradient = case.run(options)
    assert output.ratio_N.tolist() == [1.0] * 6
    assert output.truncation_N is not None
    assert output.truncation_N.tolist() == pytest.approx(rho, abs=1e-12)
    assert loss == pytest.approx(sum(factor), abs=1e-9)
    assert gradient == pytest.approx(factor, abs=1e-9)


def test_clipped_marks_the_tokens_whose_term_the_clip_changed():
    # Ratios e^0.3, e^-0.5, e^0.3, 1 with advantages +, +, -, -: PPO clips where that lowers the surrogate, CISPO always.
    assert Case().output(PPO)[0].clipped_N.tolist() == [True, False, False, False]
    assert Case().output(NARROW)[0].clipped_N.tolist() == [True, True, True, False]


@pytest.mark.parametrize(
    "options",
    [PPO, replace(PPO, epsilon=0.0, epsilon_high=0.0), replace(PPO, negative_cap=1.0), CISPO],
    ids=["ppo", "ppo without room", "capped at 1", "cispo"],
)
@pytest.mark.parametrize("level", LEVELS)
def test_on_policy_the_gradient_is_that_of_the_plain_policy_gradient(options: LossOptions, level: str):
    case = replace(OFF_POLICY, old=OFF_POLICY.new, branches=[0, 0, 0, 1, 1, 1])
    _, gradient = case.run(replace(options, level=level))  # type: ignore[arg-type]
    assert gradient == pytest.approx([-a * w for a, w in zip(case.advantages, case.weights, strict=True)], abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("stored", [-math.inf, math.inf, -9999.0, -101.0, -18.0, -12.7, N, -3.4e38, 3.4e38])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["cispo", "ppo"])
@pytest.mark.parametrize("extras", [{}, {"kimi_k2_tau": 0.5, "truncation_cap": 2.0, "kl_loss_coef": 0.1, "negative_cap": 3.0}], ids=str)
def test_loss_and_gradient_are_finite_for_any_stored_log_probability(
    kind: str, level: str, stored: float, extras: dict[str, float], dtype: torch.dtype
):
    options = LossOptions(kind=kind, level=level, **extras)  # type: ignore[arg-type]
    for sign in (1.0, -1.0):
        odd = [stored, -2.0, -stored, N]
        loss, gradient = Case(old=odd, behaviour=[-1.0, stored, N, -stored], reference=odd, advantages=[sign] * 4).run(options, dtype)
        assert math.isfinite(loss)
        assert all(math.isfinite(g) for g in gradient)


@pytest.mark.parametrize("missing", [N, -9999.0, -9984.0, -3.4e38, -math.inf])
@pytest.mark.parametrize("level", LEVELS[1:])
@pytest.mark.parametrize("kind", ["cispo", "ppo"])
def test_a_missing_log_probability_is_no_number_in_the_mean_of_its_branch(kind: str, level: str, missing: float):
    """600 tokens of negative advantage, one of them unknown: the ratio is that of the others, and the gradient stays of its size."""
    n = 600
    case = Case(new=[-1.1] * n, old=[-1.0] * n, reference=None, advantages=[-1.0] * n, weights=[1 / n] * n, branches=[7] * n)
    options = LossOptions(kind=kind, level=level, epsilon=0.2, epsilon_high=0.2)  # type: ignore[arg-type]
    _, whole = case.run(options)
    output, _ = replace(case, old=[missing, *case.old[1:]]).output(options)
    _, gradient = replace(case, old=[missing, *case.old[1:]]).run(options)
    assert output.ratio_N[1:].tolist() == pytest.approx([math.exp(-0.1)] * (n - 1), abs=1e-12)
    assert gradient[1:] == pytest.approx(whole[1:], rel=0.01)
    assert gradient[0] == pytest.approx(whole[0], rel=0.2)


def test_a_log_ratio_counts_as_twenty_at_most_and_kimi_tau_sees_it_so():
    """-9999 says only "far": the ratio is clipped to 5, and the advantage falls by tau * 20."""
    loss, gradient = Case(old=(-9999.0, N, N, N), weights=(1, 0, 0, 0)).run(LossOptions(kimi_k2_tau=0.5))
    assert loss == pytest.approx(-5 * (1 - 0.5 * 20) * -0.7, abs=1e-9)
    assert gradient == pytest.approx([-5 * (1 - 0.5 * 20), 0, 0, 0], abs=1e-9)


@pytest.mark.parametrize("level", LEVELS)
def test_no_tokens_are_no_loss_and_the_graph_stays(level: str):
    """A rank without a row makes its pass: its backward must run."""
    empty = Case(new=[], old=[], reference=[], advantages=[], weights=[], branches=[])
    assert empty.run(LossOptions(kind="ppo", level=level, kl_loss_coef=0.1)) == (0.0, [])  # type: ignore[arg-type]
