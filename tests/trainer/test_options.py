"""Defaults of the config, and refusals by name."""

import pickle

import pytest

from headrace.schemas.training import TrainConfig
from headrace.trainer.options import UnsupportedOptionError, resolve


@pytest.mark.parametrize(
    ("config", "bounds"),
    [
        ({}, (1.0, 4.0)),
        ({"epsilon_high": None}, (1.0, 1.0)),
        ({"epsilon": 0.2}, (0.2, 4.0)),
        ({"epsilon": None}, (1.0, 4.0)),
        ({"ppo": True}, (0.2, 0.2)),
        ({"loss_fn": "ppo", "epsilon": 0.1}, (0.1, 0.1)),
        ({"ppo": True, "epsilon_high": 0.28}, (0.2, 0.28)),
    ],
)
def test_clip_bounds(config: dict[str, object], bounds: tuple[float, float]):
    loss = resolve(TrainConfig.model_validate(config)).loss
    assert (loss.epsilon, loss.epsilon_high) == bounds


def test_a_null_epsilon_high_keeps_its_meaning_in_another_process():
    config = pickle.loads(pickle.dumps(TrainConfig.model_validate({"epsilon_high": None})))  # noqa: S301 - our own bytes
    assert resolve(config).loss.epsilon_high == 1.0


def test_zero_switches_off():
    loss = resolve(TrainConfig(kimi_k2_tau=0, max_negative_advantage_importance_sampling_weight=0)).loss
    assert (loss.kimi_k2_tau, loss.negative_cap) == (None, None)


@pytest.mark.parametrize(("scale", "normalize", "scaled"), [(None, None, True), (False, True, False), (True, False, False)])
def test_either_name_turns_reward_scaling_off(*, scale: bool | None, normalize: bool | None, scaled: bool):
    options = resolve(TrainConfig(scale_rewards=scale, normalize_advantages=normalize))
    assert options.advantages.scale_rewards is scaled


def test_truncation_needs_recomputed_log_probabilities():
    assert resolve(TrainConfig(truncated_importance_sampling=2)).loss.truncation_cap is None
    assert resolve(TrainConfig(truncated_importance_sampling=2, precalculate_logprobs=True)).loss.truncation_cap == 2


def test_every_missing_option_is_named_at_once():
    config = TrainConfig(kl_penalty_coef=0.1, kl_penalty_step_lag=2, plot_tensors=True, grad_accumulation_sequences=4)
    with pytest.raises(UnsupportedOptionError) as caught:
        resolve(config)
    assert caught.value.options == ("kl_penalty_coef", "kl_penalty_step_lag", "plot_tensors", "grad_accumulation_sequences")
    assert pickle.loads(pickle.dumps(caught.value)).options == caught.value.options  # noqa: S301 - our own bytes


def test_options_that_change_nothing_pass():
    resolve(TrainConfig(kl_penalty_coef=0, kl_penalty_source="sample", plot_tensors=False))
