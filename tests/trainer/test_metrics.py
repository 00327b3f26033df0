"""Metrics of a step against closed forms."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.trainer.tiny import blank_row, group, sequence

from headrace.schemas.reasons import RejectionReason
from headrace.trainer.groups import RejectedTrajectory
from headrace.trainer.loss import LossTokens, policy_loss
from headrace.trainer.metrics import TokenStats, batch_metrics, peak_memory, token_metrics
from headrace.trainer.options import LossOptions
from headrace.trainer.rows import PackedUpdate
from headrace.trainer.user_metrics import UserMetrics, averaged

N = math.nan


def stats(**changes: object) -> TokenStats:
    """Three tokens off-policy; the sampler did not say the last one's log-probability."""
    plain: dict[str, object] = {
        "new_N": [-0.5, -1.0, -2.0],
        "old_N": [-0.7, -0.8, N],
        "behaviour_N": [-0.7, -0.8, N],
        "reference_N": None,
        "ratio_N": [math.exp(0.2), math.exp(-0.2), 1.0],
        "clipped_N": [True, False, False],
        "entropy_N": [0.3, 0.6, 0.9],
        "advantages_N": [2.0, -1.0, 0.0],
        "weights_N": [0.1, 0.3, 0.6],
        "lags_N": [0, 1, -1],
    }
    arrays = {name: value if value is None else np.array(value) for name, value in (plain | changes).items()}
    return TokenStats(**arrays)  # type: ignore[arg-type]


def test_every_metric_of_the_tokens_is_its_closed_form():
    up, down = math.exp(0.2), math.exp(-0.2)
    ess = (up + down + 1) ** 2 / (up**2 + down**2 + 1)
    k3 = ((up - 1 - 0.2) + (down - 1 + 0.2)) / 2
    expected = {
        "ratio_mean": (up + down + 1) / 3,
        "ratio_min": down,
        "ratio_max": up,
        "clip_fraction": 1 / 3,
        "clip_fraction_high": 1 / 3,
        "clip_fraction_low": 0.0,
        "ess_tokens": ess,
        "ess": ess / 3,
        "kl_behaviour": k3,
        "kl_behaviour_k1": 0.0,
        "kl_old": k3,
        "entropy": 0.6,
        "probs_corr": 1.0,  # two points are a line
        "advantage_abs_mean": 1.0,
        "advantage_abs_weighted": 0.5,
        "logprobs_missing": 1.0,
        "lag_tokens_0": 1.0,
        "ratio_mean_lag_0": up,
        "ess_lag_0": 1.0,
        "lag_tokens_1": 1.0,
        "ratio_mean_lag_1": down,
        "ess_lag_1": 1.0,
        "lag_tokens_unknown": 1.0,
        "ratio_mean_lag_unknown": 1.0,
        "ess_lag_unknown": 1.0,
        "lag_mean": 0.5,
        "lag_max": 1.0,
    }
    assert token_metrics(stats()) == pytest.approx(expected, abs=1e-12)


def test_a_token_without_a_finite_entropy_and_a_log_probability_above_zero_are_counted():
    got = token_metrics(stats(entropy_N=[0.3, N, 0.9], behaviour_N=[-0.7, 1e-3, N]))
    assert (got["entropy"], got["entropy_missing"], got["logprobs_positive"]) == (pytest.approx(0.6), 1, 1)


def test_kl_to_the_reference_is_the_learners():
    got = token_metrics(stats(reference_N=[-0.4, -1.3, N]))
    assert got["kl_reference"] == pytest.approx(((math.exp(0.1) - 1 - 0.1) + (math.exp(-0.3) - 1 + 0.3)) / 2, abs=1e-12)
    assert got["kl_reference_k1"] == pytest.approx((-0.1 + 0.3) / 2, abs=1e-12)


def test_recomputed_old_log_probabilities_have_a_kl_of_their_own():
    got = token_metrics(stats(old_N=[-0.5, -1.0, -2.0]))
    assert got["kl_old"] == 0
    assert got["kl_behaviour"] > 0


def test_clip_fractions_are_parted_by_the_sign_of_the_advantage():
    got = token_metrics(stats(clipped_N=[True, True, True]))
    assert (got["clip_fraction"], got["clip_fraction_high"], got["clip_fraction_low"]) == pytest.approx((1, 1 / 3, 1 / 3))


@given(logprobs=st.lists(st.floats(-12, 0), min_size=1, max_size=40), level=st.sampled_from(["token", "sequence", "average"]))
def test_on_policy_the_ratio_is_one_and_the_effective_sample_size_is_the_number_of_tokens(logprobs: list[float], level: str):
    new_N = torch.tensor(logprobs, dtype=torch.float32)
    n = len(logprobs)
    tokens = LossTokens(
        old_N=new_N,
        behaviour_N=new_N,
        reference_N=None,
        advantages_N=torch.ones(n),
        weights_N=torch.full((n,), 1 / n),
        branches_N=torch.arange(n) // 3,
    )
    output = policy_loss(new_N, tokens, LossOptions(level=level))  # type: ignore[arg-type]
    one = np.ones(n)
    same = {"new_N": new_N.numpy().astype(float), "old_N": new_N.numpy().astype(float), "behaviour_N": new_N.numpy().astype(float)}
    plain = {"entropy_N": one, "advantages_N": one, "weights_N": one, "lags_N": np.zeros(n, int)}
    got = token_metrics(stats(**same, **plain, ratio_N=output.ratio_N.double().numpy(), clipped_N=output.clipped_N.numpy()))
    assert got["ratio_mean"] == pytest.approx(1, abs=1e-6)
    assert got["ess_tokens"] == pytest.approx(n, rel=1e-6)
    assert got["ess"] == got["ess_lag_0"] == pytest.approx(1, abs=1e-6)
    assert got["kl_behaviour"] == got["kl_behaviour_k1"] == got["clip_fraction"] == 0


def test_lags_have_buckets_of_their_own_to_fifteen_and_share_one_above():
    lags = [*range(16), 16, 17, 10**6]
    one = np.ones(len(lags))
    names = ("new_N", "old_N", "behaviour_N", "entropy_N", "advantages_N", "weights_N")
    got = token_metrics(stats(**dict.fromkeys(names, one), clipped_N=one > 2, ratio_N=np.arange(1.0, 20.0), lags_N=lags))
    counts = {name: value for name, value in got.items() if name.startswith("lag_tokens_")}
    assert counts == {f"lag_tokens_{k}": 1 for k in range(16)} | {"lag_tokens_16_up": 3}
    assert got["ratio_mean_lag_15"] == 16
    assert got["ratio_mean_lag_16_up"] == pytest.approx((17 + 18 + 19) / 3)
    assert got["ess_lag_16_up"] == pytest.approx((17 + 18 + 19) ** 2 / (17**2 + 18**2 + 19**2) / 3)
    assert got["lag_max"] == 1e6


def test_no_tokens_have_no_metrics():
    nothing = {name: np.zeros(0) for name in TokenStats.__slots__ if name != "reference_N"}  # type: ignore[attr-defined]
    assert token_metrics(stats(**nothing)) == {}


@pytest.mark.parametrize("odd", [-math.inf, math.inf, -9999.0, N])
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_every_metric_is_a_finite_number(odd: float):
    got = token_metrics(stats(behaviour_N=[odd] * 3, old_N=[odd, -1, -1], reference_N=[odd] * 3, ratio_N=[0.0, 0.0, 0.0]))
    assert all(isinstance(value, float) and math.isfinite(value) for value in got.values())
    assert "ess" not in got  # nothing weighs anything
    assert got["logprobs_missing"] == (3 if math.isnan(odd) else 0)


def test_what_rollouts_measured_is_averaged_over_those_that_have_it_within_bounds():
    one = sequence([1], [2])
    said: list[dict[str, float]] = [
        {"won": True, "turns": 3, "cost": 1.7e308},
        {"won": False, "cost": 1.7e308, "x" * 65: 1, "huge": 10**400},
        {},
    ]
    whole = group([0, 0, 0], [one] * 3)
    members = tuple(replace(member, metrics=UserMetrics.of(each)) for member, each in zip(whole.trajectories, said, strict=True))
    got = batch_metrics([replace(whole, trajectories=members)], [])
    found = {name: value for name, value in got.items() if name.startswith("user")}
    assert found == {"user/won": 0.5, "user/turns": 3.0, "user/cost": 1.7e308, "user_metrics_dropped": 2.0}
    many = [UserMetrics.of({f"{i}{j:03}": 1.0 for j in range(100)}) for i in "ba"]
    assert [len(each.values) for each in many] == [64, 64]
    assert list(averaged(many)) == [*(f"user/a{j:03}" for j in range(64)), "user_metrics_dropped"]
    assert averaged(many)["user_metrics_dropped"] == 2 * 36 + 64


def test_every_metric_of_the_batch_is_counted():
    whole = group([0, 1], [sequence([1], [2])] * 2)
    cut = tuple(replace(trajectory, truncated=7) for trajectory in whole.trajectories)
    lost = RejectedTrajectory(index=2, reason=RejectionReason.TOO_LONG, detail="long")
    groups = [
        replace(whole, trajectories=cut, rejected=(lost,), exceptions=3),
        group([5] * 2, [sequence([1], [2])] * 2),
        group([], []),
    ]
    updates = [
        PackedUpdate(micro_steps=((blank_row(60, 9, 100, 4), blank_row(40, 5, 60, 2)), (blank_row(20, 3, 20, 1), None)), capacity=64),
        PackedUpdate(micro_steps=((None, blank_row(30, 1, 30, 1)),), capacity=64),
    ]
    assert batch_metrics(groups, updates) == pytest.approx(
        {
            "groups": 3,
            "trajectories": 4,
            "groups_zero_variance": 1,
            "exceptions": 3,
            "trajectories_rejected": 1,
            "trajectories_truncated": 2,
            "turns_without_end": 0,
            "turns_as_context": 0,
            "updates": 2,
            "micro_steps": 3,
            "rows": 4,
            "dummy_passes": 2,
            "sequences": 8,
            "trainable_tokens": 18,
            "tokens": 150,
            "sequence_tokens": 210,
            "sharing": 210 / 150,
            "fill": 150 / (4 * 64),
            "rank_balance": 150 / (2 * 60 + 2 * 20 + 2 * 30),
            "padding_tokens": 0,
            "reward_mean": 11 / 4,
            "reward_std": math.sqrt(((0 - 2.75) ** 2 + (1 - 2.75) ** 2 + 2 * (5 - 2.75) ** 2) / 4),
            "reward_min": 0,
            "reward_max": 5,
            "reward_deviation": 0.25,
        },
        abs=1e-12,
    )


def test_a_step_without_anything_to_train_has_its_rewards_and_zeros():
    got = batch_metrics([group([2, 2], [sequence([1], [2])] * 2)], [])
    assert (got["reward_mean"], got["rows"], got["fill"], got["groups_zero_variance"]) == (2, 0, 0, 1)
    assert "sharing" not in got
    assert batch_metrics([], [])["groups"] == 0


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_huge_rewards_have_finite_metrics():
    got = batch_metrics([group([1.7e308, 1.7e308, -1.7e308], [sequence([1], [2])] * 3)], [])
    assert got["reward_mean"] == pytest.approx(1.7e308 / 3)
    assert math.isfinite(got["reward_std"])


def test_peak_memory_is_in_bytes():
    assert peak_memory() > (0 if torch.cuda.is_available() else 10 * 2**20)
