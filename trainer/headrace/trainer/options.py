"""From the job API's training config to what a step does: all defaults filled in.

Guarantees: `resolve` is pure and needs no torch; every option of the config is in its result, and what an option can't do in this config
is said in `warnings` (contradictions never come this far: `headrace.schemas.training` refuses them). Defaults are those of the
reference service; `epsilon_high` said as null means "same as epsilon", absent it means the loss's own default.
"""

from dataclasses import dataclass
from typing import Literal

from headrace.schemas.merging import merged_config as merged_config  # noqa: PLC0414 - the process that resolves a config merged it before
from headrace.schemas.merging import without_effect
from headrace.schemas.training import LossAggregation, TrainConfig

LossKind = Literal["cispo", "ppo"]
RatioLevel = Literal["token", "sequence", "average", "geometric_average"]
KlSource = Literal["current_learner", "sample"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOptions:
    """The policy loss. Example: `LossOptions(kind="ppo", epsilon=0.2, epsilon_high=0.2)`."""

    kind: LossKind = "cispo"
    epsilon: float = 1.0
    """Lower bound of the ratio is 1 - epsilon."""
    epsilon_high: float = 4.0
    """Upper bound of the ratio is 1 + epsilon_high."""
    level: RatioLevel = "token"
    mask_prob_ratio: bool = False
    """A ratio that is not strictly inside its bounds becomes 0, before it is clipped."""
    negative_cap: float | None = None
    """Largest ratio where the advantage is negative."""
    kimi_k2_tau: float | None = None
    """A := A - tau * (new - old), detached."""
    recompute_old: bool = False
    """`precalculate_logprobs`: the ratio's old policy is the learner before this step; the engine computes its log-probabilities."""
    truncation_cap: float | None = None
    """`truncated_importance_sampling`: cap on exp(old - behaviour), which weighs the loss; only with `recompute_old`."""
    kl_loss_coef: float = 0.0
    """Coefficient of the k3 estimate of KL to the reference, added to each token's loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageOptions:
    """From rewards to advantages."""

    scale_rewards: bool = True
    """Divide centred rewards by (population standard deviation + 1e-6)."""
    balance: float = 0.0
    """In [-1, 1]: above 0 shrinks advantages that are not positive by (1 - b), below 0 those that are not negative by (1 + b)."""
    rescale: bool = True
    """Make the batch's weighted mean of |A| 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KlOptions:
    """KL to a reference policy as a change of advantages, and which policy that is; at most one of the four says so, none: the base."""

    coef: float = 0.0
    source: KlSource = "current_learner"
    """Whose log-probabilities are compared with the reference's: the learner's in this update, or the sampler's."""
    reference_step: int | None = None
    step_lag: int | None = None
    """The reference is the version `max(0, current - step_lag)`."""
    adapter_uri: str | None = None
    """Of an adapter in the object store."""
    logprobs_uri: str | None = None
    """Of log-probabilities in the object store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """All that a config says about one step."""

    learning_rate: float
    loss: LossOptions
    advantages: AdvantageOptions
    kl: KlOptions
    aggregation: LossAggregation
    aggregation_constant: float | None
    """Tokens that `constant_norm` divides by; None for the others."""
    packed_sequence_length: int | None
    """Tokens of a packed row; None: as many as the device's budget says."""
    rows_per_update: int | None
    """`grad_accumulation_sequences`; None: all rows of the step in one update."""
    tokens_per_update: int | None
    """`max_tokens_per_update`: instead of a number of rows."""
    trajectories_per_update: int | None
    """`max_trajectories_per_update`: instead of a number of rows, perhaps next to one of tokens."""
    logprob_chunk: int
    """Positions that go through the vocabulary projection at once."""
    allow_training_without_logprobs: bool
    plot_tensors: bool
    scale_rate_by_reward_deviation: bool
    trajectories_power: float
    """The rate is multiplied by (trajectories that train in the update) ** this."""
    warnings: tuple[str, ...]
    """What the config asks for and does not get, or may not mean; each a sentence for people."""

    @property
    def needs_reference(self) -> bool:
        """Whether the reference's log-probabilities are computed."""
        return self.kl.coef > 0 or self.loss.kl_loss_coef > 0


def resolve(config: TrainConfig) -> StepOptions:
    """Fill in the defaults."""
    kind: LossKind = "ppo" if config.ppo or config.loss_fn == "ppo" else "cispo"
    epsilon = config.epsilon if config.epsilon is not None else {"ppo": 0.2, "cispo": 1.0}[kind]
    recompute = bool(config.precalculate_logprobs)
    return StepOptions(
        learning_rate=5e-6 if config.learning_rate is None else config.learning_rate,
        loss=LossOptions(
            kind=kind,
            epsilon=epsilon,
            epsilon_high=_epsilon_high(config, kind, epsilon),
            level=config.importance_sampling_level or "token",
            mask_prob_ratio=bool(config.mask_prob_ratio),
            negative_cap=config.max_negative_advantage_importance_sampling_weight or None,
            kimi_k2_tau=config.kimi_k2_tau or None,
            recompute_old=recompute,
            # Without recomputed log-probabilities there is no second ratio to truncate; the peer then used the first one twice.
            truncation_cap=(config.truncated_importance_sampling or None) if recompute else None,
            kl_loss_coef=config.kl_loss_coef or 0.0,
        ),
        advantages=AdvantageOptions(
            # normalize_advantages=true does not bring back a scaling that scale_rewards=false took away.
            scale_rewards=config.scale_rewards is not False and config.normalize_advantages is not False,
            balance=config.advantage_balance or 0.0,
            rescale=config.rescale_advantages is not False,
        ),
        kl=KlOptions(
            coef=config.kl_penalty_coef or 0.0,
            source=config.kl_penalty_source or "current_learner",
            reference_step=config.kl_penalty_reference_step,
            step_lag=config.kl_penalty_step_lag,
            adapter_uri=config.kl_ref_adapter_path,
            logprobs_uri=config.kl_ref_logprobs,
        ),
        aggregation=config.loss_aggregation or "sequence_mean_token_mean",
        aggregation_constant=config.loss_aggregation_constant,
        packed_sequence_length=config.packed_sequence_length,
        rows_per_update=config.grad_accumulation_sequences,
        tokens_per_update=config.max_tokens_per_update,
        trajectories_per_update=config.max_trajectories_per_update,
        logprob_chunk=config.logprob_calculation_chunk_size or 1024,
        allow_training_without_logprobs=bool(config.allow_training_without_logprobs),
        plot_tensors=bool(config.plot_tensors),
        scale_rate_by_reward_deviation=bool(config.scale_learning_rate_by_reward_std_dev),
        trajectories_power=config.num_trajectories_learning_rate_multiplier_power or 0.0,
        warnings=without_effect(config),
    )


def _epsilon_high(config: TrainConfig, kind: LossKind, epsilon: float) -> float:
    if config.epsilon_high is not None:
        return config.epsilon_high
    if kind == "ppo" or "epsilon_high" in config.model_fields_set:
        return epsilon
    return 4.0
