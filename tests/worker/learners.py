"""The model that most tests train."""

from headrace.schemas.training import BatchPolicy, ModelSettings, OptimizerSettings, TrainConfig


def learner_settings(*, learning_rate: float = 1e-3, max_policy_lag: int | None = None, **batch: object) -> ModelSettings:
    """All parameters of the tiny base model, two groups a step; `batch` is the rest of its policy."""
    return ModelSettings(
        base_model="tiny",
        adaptation="full",
        batch=BatchPolicy.model_validate({"groups_per_step": 2, **batch}),
        train=TrainConfig(learning_rate=learning_rate),
        optimizer=OptimizerSettings(max_grad_norm=1.0),
        max_policy_lag=max_policy_lag,
    )
