"""What a training config refuses at the door, with the names that contradict each other."""

import math
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError

from headrace.schemas.training import BatchPolicy, LoraSettings, ModelSettings, OptimizerSettings, SftConfig, TrainConfig

CLASSES: dict[str, type[BaseModel]] = {c.__name__: c for c in (TrainConfig, OptimizerSettings, BatchPolicy, ModelSettings, SftConfig)}


@pytest.mark.parametrize(
    ("which", "fields", "named"),
    [
        ("TrainConfig", {"loss_fn": "cispo", "ppo": True}, ["loss_fn", "ppo"]),
        ("TrainConfig", {"loss_fn": "ppo", "ppo": False}, ["loss_fn", "ppo"]),
        (
            "TrainConfig",
            {"kl_penalty_reference_step": 0, "kl_penalty_step_lag": 2},
            ["kl_penalty_reference_step", "kl_penalty_step_lag"],
        ),
        (
            "TrainConfig",
            {"kl_ref_adapter_path": "s3://b/a", "kl_penalty_reference_step": 3},
            ["kl_ref_adapter_path", "kl_penalty_reference_step"],
        ),
        ("TrainConfig", {"kl_ref_adapter_path": "s3://b/a", "kl_penalty_step_lag": 3}, ["kl_ref_adapter_path", "kl_penalty_step_lag"]),
        ("TrainConfig", {"loss_aggregation": "constant_norm"}, ["loss_aggregation=", "loss_aggregation_constant"]),
        ("TrainConfig", {"loss_aggregation_constant": 100}, ["loss_aggregation=", "loss_aggregation_constant"]),
        (
            "TrainConfig",
            {"loss_aggregation": "token_mean", "loss_aggregation_constant": 100},
            ["loss_aggregation=", "loss_aggregation_constant"],
        ),
        ("BatchPolicy", {"minimum_group_size": 3}, ["incomplete_groups", "minimum_group_size"]),
        ("BatchPolicy", {"minimum_group_size": 3, "incomplete_groups": "complete"}, ["incomplete_groups", "minimum_group_size"]),
        ("BatchPolicy", {"incomplete_groups": "minimum"}, ["incomplete_groups", "minimum_group_size"]),
        ("OptimizerSettings", {"schedule": "linear"}, ["schedule=", "schedule_updates"]),
        ("OptimizerSettings", {"schedule": "cosine"}, ["schedule=", "schedule_updates"]),
        ("OptimizerSettings", {"schedule_updates": 10}, ["schedule=", "schedule_updates"]),
        ("OptimizerSettings", {"schedule": "linear", "schedule_updates": 5, "warmup_updates": 5}, ["warmup_updates", "schedule_updates"]),
        ("OptimizerSettings", {"min_rate_ratio": 0.1}, ["min_rate_ratio", "schedule="]),
        ("SftConfig", {"min_rate_ratio": 0.1}, ["min_rate_ratio", "schedule="]),
        (
            "ModelSettings",
            {"base_model": "m", "max_sequence_tokens": 100, "train": {"packed_sequence_length": 101}},
            ["packed_sequence_length", "max_sequence_tokens"],
        ),
    ],
    ids=str,
)
def test_contradictions_are_refused_with_both_names(which: str, fields: dict[str, Any], named: list[str]):
    with pytest.raises(ValidationError) as caught:
        CLASSES[which].model_validate(fields)
    assert caught.value.error_count() == 1
    for name in named:
        assert name in caught.value.errors()[0]["msg"]


@pytest.mark.parametrize(
    ("which", "fields"),
    [
        ("TrainConfig", {"loss_fn": "ppo", "ppo": True}),
        ("TrainConfig", {"loss_fn": None, "ppo": True, "kl_penalty_reference_step": None, "kl_penalty_step_lag": 1}),
        ("TrainConfig", {"loss_aggregation": "constant_norm", "loss_aggregation_constant": 1000}),
        ("TrainConfig", {"kl_ref_adapter_path": "file:///store/models/a"}),
        ("BatchPolicy", {"incomplete_groups": "minimum", "minimum_group_size": 4}),
        ("OptimizerSettings", {"schedule": "cosine", "schedule_updates": 6, "warmup_updates": 5, "min_rate_ratio": 0.1}),
        ("OptimizerSettings", {"warmup_updates": 5}),
        ("SftConfig", {"schedule": "linear", "min_rate_ratio": 0.1, "batch_size": 1}),
        ("SftConfig", {"batch_size": "auto"}),
        ("ModelSettings", {"base_model": "m", "max_sequence_tokens": 100, "train": {"packed_sequence_length": 100}}),
    ],
    ids=str,
)
def test_options_that_fit_together_pass_and_survive_the_log(which: str, fields: dict[str, Any]):
    made = CLASSES[which].model_validate(fields)
    assert CLASSES[which].model_validate_json(made.model_dump_json()) == made


@pytest.mark.parametrize(
    "path",
    [
        "/home/me/adapter",
        "adapter",
        "~/adapter",
        "C:\\adapters\\a",
        "http://host/adapter",
        "wandb-artifact:///e/p/a:v0",
        "",
    ],
)
def test_a_reference_adapter_on_a_clients_disk_is_refused_with_the_reason(path: str):
    with pytest.raises(ValidationError, match=r"kl_ref_adapter_path\n.*the trainer does not see a client's files"):
        TrainConfig(kl_ref_adapter_path=path)


@pytest.mark.parametrize(
    "uri",
    ["s3://", "s3://bucket", "s3:///key", "file://", "file:///", "file://host/a", "file:///store/../etc", "s3://b/../c/a", "s3://[b/a"],
)
def test_a_uri_that_names_no_object_of_the_store_is_refused(uri: str):
    with pytest.raises(ValidationError, match=r"kl_ref_adapter_path\n.*(names no object|is no URI)"):
        TrainConfig(kl_ref_adapter_path=uri)


def float_fields() -> list[tuple[str, str]]:
    def has_float(annotation: object) -> bool:
        return annotation is float or any(has_float(inner) for inner in get_args(annotation))

    return [(name, field) for name, c in CLASSES.items() for field, info in c.model_fields.items() if has_float(info.annotation)]


@pytest.mark.parametrize(("which", "field"), float_fields())
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_field_takes_nan_or_infinity(which: str, field: str, value: float):
    given = {"enable_thinking": value} if field == "chat_template_kwargs" else value
    with pytest.raises(ValidationError) as caught:
        CLASSES[which].model_validate({"base_model": "m", field: given})
    assert all(error["loc"][0] == field for error in caught.value.errors())


@pytest.mark.parametrize(
    ("which", "field", "value"),
    [
        ("TrainConfig", "num_trajectories_learning_rate_multiplier_power", 4.1),
        ("TrainConfig", "num_trajectories_learning_rate_multiplier_power", -4.1),
        ("TrainConfig", "kl_penalty_step_lag", 0),
        ("TrainConfig", "kl_penalty_reference_step", -1),
        ("TrainConfig", "kl_penalty_coef", -0.1),
        ("TrainConfig", "advantage_balance", 1.1),
        ("TrainConfig", "loss_aggregation_constant", 0),
        ("TrainConfig", "learning_rate", -1e-9),
        ("SftConfig", "batch_size", 0),
        ("SftConfig", "batch_size", "all"),
        ("SftConfig", "learning_rate", -1e-9),
        ("OptimizerSettings", "beta2", 1.0),
        ("OptimizerSettings", "min_rate_ratio", 1.1),
    ],
)
def test_values_outside_of_their_range_are_refused_by_name(which: str, field: str, value: object):
    with pytest.raises(ValidationError) as caught:
        CLASSES[which].model_validate({field: value})
    assert {error["loc"][0] for error in caught.value.errors()} == {field}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epsilon", 1e10),
        ("epsilon_high", 1e300),
        ("max_negative_advantage_importance_sampling_weight", 1e300),
        ("truncated_importance_sampling", 1e300),
        ("kimi_k2_tau", 1e30),
        ("kimi_k2_tau", -1e30),
        ("kl_penalty_coef", 1e300),
        ("kl_loss_coef", 1e300),
        ("loss_aggregation_constant", 5e-324),
        ("loss_aggregation_constant", 1e300),
    ],
)
def test_a_number_that_float32_could_not_compute_with_is_refused_by_name(field: str, value: float):
    aggregation = {"loss_aggregation": "constant_norm"} if field == "loss_aggregation_constant" else {}
    with pytest.raises(ValidationError, match=field):
        TrainConfig.model_validate({field: value} | aggregation)


def test_an_optimizer_whose_eps_is_zero_in_float32_is_refused():
    with pytest.raises(ValidationError, match="eps"):
        OptimizerSettings(eps=1e-46)


@pytest.mark.parametrize("targets", [[], [""], ["q_proj", ""]])
def test_lora_without_a_target_is_refused(targets: list[str]):
    with pytest.raises(ValidationError, match="target_modules"):
        LoraSettings.model_validate({"target_modules": targets})


@pytest.mark.parametrize(
    ("said", "fields_set"), [({}, False), ({"epsilon_high": None}, True), ({"epsilon_high": 0.3}, True), ({"ppo": True}, False)]
)
def test_a_null_that_was_said_is_told_from_one_that_was_not_also_behind_the_log(said: dict[str, Any], *, fields_set: bool):
    """`epsilon_high`: null means "as epsilon", absent means the loss's own default; models and steps come back from records."""
    config = TrainConfig.model_validate(said)
    settings = ModelSettings(base_model="tiny", train=config)
    for read in (
        TrainConfig.model_validate_json(config.model_dump_json()),
        ModelSettings.model_validate(settings.model_dump(mode="json")).train,
    ):
        assert ("epsilon_high" in read.model_fields_set) is fields_set
        assert read == config
