"""Presets of published methods: what their options become, and their losses by the papers' formulas."""

import math

import pytest
import torch

from headrace.core.presets import DAPO, GRPO, GSPO, MethodNotBuiltError, PresetError, preset
from headrace.trainer.loss import LossTokens, policy_loss
from headrace.trainer.options import AdvantageOptions, LossOptions, resolve


@pytest.mark.parametrize(
    ("name", "loss", "aggregation"),
    [
        ("GRPO", LossOptions(kind="ppo", epsilon=0.2, epsilon_high=0.2, kl_loss_coef=0.001), "token_mean"),
        ("METHOD_UNSPECIFIED", LossOptions(kind="ppo", epsilon=0.2, epsilon_high=0.2, kl_loss_coef=0.001), "token_mean"),
        ("dapo", LossOptions(kind="ppo", epsilon=0.2, epsilon_high=0.28), "token_mean"),
        ("gspo", LossOptions(kind="ppo", level="sequence", epsilon=0.0003, epsilon_high=0.0004), "sequence_mean_token_mean"),
        ("GSPO_TOKEN", LossOptions(kind="ppo", level="sequence", epsilon=0.0003, epsilon_high=0.0004), "sequence_mean_token_mean"),
    ],
)
def test_a_method_is_its_published_options(name: str, loss: LossOptions, aggregation: str):
    options = resolve(preset(name))
    assert (options.loss, options.aggregation) == (loss, aggregation)
    assert options.advantages == AdvantageOptions(rescale=False)
    assert options.needs_reference is (loss.kl_loss_coef > 0)
    assert options.warnings == ()


def test_grpo_takes_another_kl_coefficient_and_zero_means_its_own():
    assert preset("grpo", 0.04).kl_loss_coef == 0.04
    assert preset("grpo", 0.0).kl_loss_coef == 0.001


@pytest.mark.parametrize("name", ["DAPO", "GSPO_TOKEN", "GSPO"])
def test_a_kl_coefficient_with_a_method_without_kl_is_an_error_that_says_so(name: str):
    assert preset(name, 0.0).kl_loss_coef is None
    with pytest.raises(PresetError, match=f"kl_beta must be 0 or unset for method {name}"):
        preset(name, 0.001)


@pytest.mark.parametrize("kl_beta", [-0.1, math.nan, math.inf])
def test_a_kl_coefficient_that_is_no_coefficient_is_refused(kl_beta: float):
    with pytest.raises(PresetError, match="kl_beta must be a finite number"):
        preset("GRPO", kl_beta)


@pytest.mark.parametrize("name", ["DPO", "orpo"])
def test_methods_to_come_say_so(name: str):
    with pytest.raises(MethodNotBuiltError, match=f"{name.upper()} is not built yet"):
        preset(name)


def test_an_unknown_method_is_refused_with_those_there_are():
    with pytest.raises(PresetError, match=r"unknown method 'ppo2'; there are METHOD_UNSPECIFIED, GRPO, DAPO, GSPO"):
        preset("ppo2")


def test_nobody_changes_a_preset_for_the_others():
    preset("grpo").epsilon = 0.9
    assert (GRPO.epsilon, DAPO.epsilon, GSPO.epsilon) == (0.2, 0.2, 0.0003)


NEW, OLD, REFERENCE = [-0.3, -1.6, -0.9, -2.2], [-0.5, -1.2, -0.9001, -2.2002], [-0.4, -1.5, -1.0, -2.0]
A = [1.0, 1.0, -1.0, -1.0]
BRANCHES = [0, 0, 1, 1]


def loss_of(name: str, weights: list[float]) -> float:
    tokens = LossTokens(
        old_N=torch.tensor(OLD, dtype=torch.float64),
        behaviour_N=torch.tensor(OLD, dtype=torch.float64),
        reference_N=torch.tensor(REFERENCE, dtype=torch.float64),
        advantages_N=torch.tensor(A, dtype=torch.float64),
        weights_N=torch.tensor(weights, dtype=torch.float64),
        branches_N=torch.tensor(BRANCHES),
    )
    return policy_loss(torch.tensor(NEW, dtype=torch.float64), tokens, resolve(preset(name)).loss).total.item()


def test_grpo_and_dapo_are_token_means_of_the_clipped_surrogate_and_grpo_adds_kl():
    def clipped(low: float, high: float) -> float:
        ratios = [math.exp(n - o) for n, o in zip(NEW, OLD, strict=True)]
        return -sum(min(r * a, min(max(r, low), high) * a) for r, a in zip(ratios, A, strict=True)) / 4

    u = [r - n for n, r in zip(NEW, REFERENCE, strict=True)]
    kl = 0.001 * sum(math.exp(x) - 1 - x for x in u) / 4
    assert loss_of("GRPO", [1 / 4] * 4) == pytest.approx(clipped(0.8, 1.2) + kl, abs=1e-9)
    assert loss_of("DAPO", [1 / 4] * 4) == pytest.approx(clipped(0.8, 1.28), abs=1e-9)


def test_gspo_clips_the_geometric_mean_of_a_sequence():
    ratios = [math.exp((0.2 - 0.4) / 2), math.exp((0.0001 + 0.0002) / 2)]
    first = min(ratios[0], max(ratios[0], 0.9997))  # A = 1: below the clip, not clipped
    second = -max(ratios[1], min(max(ratios[1], 0.9997), 1.0004))  # A = -1: inside
    assert loss_of("GSPO", [1 / 4] * 4) == pytest.approx(-(first + second) / 2, abs=1e-9)
