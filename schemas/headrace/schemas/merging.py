"""A job's training config over its model's, and what the result asks for without effect. Pure.

Guarantees: what the door warns of and what the step does are one rule. Limitations: whether what a config names exists; the step knows.
"""

from headrace.schemas.training import KL_REFERENCES, UPDATE_SIZES, TrainConfig


def merged_config(model: TrainConfig, job: TrainConfig | None) -> TrainConfig:
    """The job's options over the model's. A null means "use the default", so it hides nothing of the model's, but for `epsilon_high`,
    where an explicit null has a meaning of its own (the same as `epsilon`).

    Example: model learning_rate 1e-3, job `{"learning_rate": null, "ppo": true}` gives learning_rate 1e-3 and ppo.
    """
    if job is None:
        return model
    chosen = {**model.model_dump(exclude_none=True), **job.model_dump(exclude_none=True)}
    for config in (model, job):
        if "epsilon_high" in config.model_fields_set and config.epsilon_high is None:
            chosen.setdefault("epsilon_high", None)
    # Where the job says one of several names for a thing, what the model said by another is no longer meant.
    for names in (("loss_fn", "ppo"), KL_REFERENCES, UPDATE_SIZES, ("loss_aggregation", "loss_aggregation_constant")):
        said = [name for name in names if getattr(job, name) is not None]
        for name in names:
            if said and name not in said:
                chosen.pop(name, None)
    return TrainConfig.model_validate(chosen)


def without_effect(config: TrainConfig) -> tuple[str, ...]:
    """What a config asks for and does not get, or may not mean; each a sentence for people."""
    found = []
    if config.truncated_importance_sampling and not config.precalculate_logprobs:
        found.append(
            "truncated_importance_sampling does nothing without precalculate_logprobs: the ratio to the sampler is in the loss already, "
            "and a second factor would apply it twice"
        )
    if config.kl_penalty_coef and config.kl_loss_coef:
        found.append("kl_penalty_coef and kl_loss_coef are both set: KL to the reference acts twice, on advantages and in the loss")
    if not (config.kl_penalty_coef or config.kl_loss_coef):
        named = [name for name in KL_REFERENCES if getattr(config, name) is not None]
        found.extend(f"{name} does nothing without kl_penalty_coef or kl_loss_coef" for name in named)
    return tuple(found)
