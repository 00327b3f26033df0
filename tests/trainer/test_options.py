"""Defaults of the config, and what each option becomes."""

import pickle
from dataclasses import replace

import pytest

from headrace.schemas.training import TrainConfig
from headrace.trainer.options import AdvantageOptions, KlOptions, LossOptions, StepOptions, resolve

DEFAULTS = StepOptions(
    learning_rate=5e-6,
    loss=LossOptions(),
    advantages=AdvantageOptions(),
    kl=KlOptions(),
    aggregation="sequence_mean_token_mean",
    aggregation_constant=None,
    packed_sequence_length=None,
    rows_per_update=None,
    tokens_per_update=None,
    trajectories_per_update=None,
    logprob_chunk=1024,
    allow_training_without_logprobs=False,
    plot_tensors=False,
    scale_rate_by_reward_deviation=False,
    trajectories_power=0.0,
    warnings=(),
)


def test_nothing_said_is_the_reference_services_defaults():
    assert resolve(TrainConfig()) == DEFAULTS
    assert resolve(TrainConfig(**dict.fromkeys({*TrainConfig.model_fields} - {"epsilon_high"}))) == DEFAULTS


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"learning_rate": 1e-3}, {"learning_rate": 1e-3}),
        ({"packed_sequence_length": 2048}, {"packed_sequence_length": 2048}),
        ({"grad_accumulation_sequences": 3}, {"rows_per_update": 3}),
        ({"max_tokens_per_update": 64}, {"tokens_per_update": 64}),
        ({"max_trajectories_per_update": 3}, {"trajectories_per_update": 3}),
        ({"logprob_calculation_chunk_size": 77}, {"logprob_chunk": 77}),
        ({"allow_training_without_logprobs": True}, {"allow_training_without_logprobs": True}),
        ({"plot_tensors": True}, {"plot_tensors": True}),
        ({"scale_learning_rate_by_reward_std_dev": True}, {"scale_rate_by_reward_deviation": True}),
        ({"num_trajectories_learning_rate_multiplier_power": 0.5}, {"trajectories_power": 0.5}),
        (
            {"loss_aggregation": "constant_norm", "loss_aggregation_constant": 900},
            {"aggregation": "constant_norm", "aggregation_constant": 900},
        ),
        ({"advantage_balance": -0.5}, {"advantages": AdvantageOptions(balance=-0.5)}),
        ({"rescale_advantages": False}, {"advantages": AdvantageOptions(rescale=False)}),
        ({"kl_penalty_coef": 0.1}, {"kl": KlOptions(coef=0.1)}),
        (
            {"kl_penalty_coef": 0.1, "kl_penalty_source": "sample", "kl_penalty_step_lag": 4},
            {"kl": KlOptions(coef=0.1, source="sample", step_lag=4)},
        ),
        ({"kl_penalty_coef": 0.1, "kl_penalty_reference_step": 0}, {"kl": KlOptions(coef=0.1, reference_step=0)}),
        ({"kl_penalty_coef": 0.1, "kl_ref_adapter_path": "s3://b/a"}, {"kl": KlOptions(coef=0.1, adapter_uri="s3://b/a")}),
        ({"kl_loss_coef": 0.001}, {"loss": LossOptions(kl_loss_coef=0.001)}),
        ({"importance_sampling_level": "sequence"}, {"loss": LossOptions(level="sequence")}),
        ({"mask_prob_ratio": True}, {"loss": LossOptions(mask_prob_ratio=True)}),
        ({"max_negative_advantage_importance_sampling_weight": 2}, {"loss": LossOptions(negative_cap=2)}),
        ({"kimi_k2_tau": 0.1}, {"loss": LossOptions(kimi_k2_tau=0.1)}),
        ({"precalculate_logprobs": True}, {"loss": LossOptions(recompute_old=True)}),
        (
            {"truncated_importance_sampling": 2, "precalculate_logprobs": True},
            {"loss": LossOptions(recompute_old=True, truncation_cap=2)},
        ),
        ({"kimi_k2_tau": 0, "max_negative_advantage_importance_sampling_weight": 0, "truncated_importance_sampling": 0}, {}),
        ({"kl_penalty_coef": 0, "kl_loss_coef": 0, "kl_penalty_source": "sample"}, {"kl": KlOptions(source="sample")}),
    ],
    ids=str,
)
def test_each_option_changes_what_it_names_and_nothing_else(config: dict[str, object], expected: dict[str, object]):
    assert resolve(TrainConfig.model_validate(config)) == replace(DEFAULTS, **expected)  # type: ignore[arg-type]


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


@pytest.mark.parametrize(("scale", "normalize", "scaled"), [(None, None, True), (False, True, False), (True, False, False)])
def test_either_name_turns_reward_scaling_off(*, scale: bool | None, normalize: bool | None, scaled: bool):
    options = resolve(TrainConfig(scale_rewards=scale, normalize_advantages=normalize))
    assert options.advantages.scale_rewards is scaled


def test_truncation_without_recomputed_log_probabilities_is_no_factor_and_one_warning():
    options = resolve(TrainConfig(truncated_importance_sampling=2))
    assert options.loss.truncation_cap is None
    (warning,) = options.warnings
    assert warning.startswith("truncated_importance_sampling does nothing without precalculate_logprobs")


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"kl_penalty_coef": 0.1, "kl_loss_coef": 0.1}, "kl_penalty_coef and kl_loss_coef are both set"),
        ({"kl_penalty_step_lag": 2}, "kl_penalty_step_lag does nothing without kl_penalty_coef"),
        ({"kl_penalty_reference_step": 0, "kl_penalty_coef": 0}, "kl_penalty_reference_step does nothing without kl_penalty_coef"),
    ],
)
def test_what_may_not_be_meant_is_said(config: dict[str, float], named: str):
    (warning,) = resolve(TrainConfig.model_validate(config)).warnings
    assert warning.startswith(named)


@pytest.mark.parametrize(
    ("config", "needed"),
    [({}, False), ({"kl_penalty_step_lag": 2}, False), ({"kl_penalty_coef": 0.1}, True), ({"kl_loss_coef": 0.1}, True)],
)
def test_the_reference_is_needed_where_a_coefficient_is_above_zero(*, config: dict[str, float], needed: bool):
    assert resolve(TrainConfig.model_validate(config)).needs_reference is needed
