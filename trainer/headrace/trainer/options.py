"""From the job API's training config to what a step does: defaults filled in, and options that are not there yet refused by name.

Guarantees: `resolve` is pure and needs no torch, so the door (command line, worker) can refuse a model or a job at its creation, with
every option it would trip over. An option that would change nothing at its value (a KL coefficient of 0) passes.
Defaults are those of the reference service; `epsilon_high` said as null means "same as epsilon", absent it means the loss's own default.
"""

from dataclasses import dataclass
from typing import Literal

from headrace.core.errors import HeadraceError
from headrace.schemas.training import TrainConfig

LossKind = Literal["cispo", "ppo"]
RatioLevel = Literal["token", "sequence", "average", "geometric_average"]


class UnsupportedOptionError(HeadraceError):
    """Options were asked for that this release does not have.

    Args:
        options: Their names, in the order of the config.
    """

    def __init__(self, options: tuple[str, ...]) -> None:
        super().__init__(
            f"not there yet in this release: {', '.join(options)}. Leave {'it' if len(options) == 1 else 'them'} out or set to null."
        )
        self.options = options

    def __reduce__(self) -> tuple[type["UnsupportedOptionError"], tuple[tuple[str, ...]]]:
        # Default pickling would call the class with the message.
        return type(self), (self.options,)


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
    """`precalculate_logprobs`: the ratio's old policy is the learner before this step."""
    truncation_cap: float | None = None
    """`truncated_importance_sampling`: cap on exp(old - behaviour), which weighs the loss; needs `recompute_old`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageOptions:
    """From rewards to advantages."""

    scale_rewards: bool = True
    """Divide centred rewards by (population standard deviation + 1e-6)."""
    balance: float = 0.0
    """In [-1, 1]: above 0 shrinks advantages that are not positive by (1 - b), below 0 those that are not negative by (1 + b)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """All that a config says about one step."""

    learning_rate: float
    loss: LossOptions
    advantages: AdvantageOptions
    packed_sequence_length: int | None
    """Tokens of a packed row; None: the longest sequence, rounded up."""
    allow_training_without_logprobs: bool


def unsupported(config: TrainConfig) -> tuple[str, ...]:
    """Names of the options that are set in a way this release does not have."""
    asked = {
        "kl_penalty_coef": bool(config.kl_penalty_coef),
        "kl_penalty_reference_step": config.kl_penalty_reference_step is not None,
        "kl_penalty_step_lag": config.kl_penalty_step_lag is not None,
        "kl_ref_adapter_path": config.kl_ref_adapter_path is not None,
        "scale_learning_rate_by_reward_std_dev": bool(config.scale_learning_rate_by_reward_std_dev),
        "num_trajectories_learning_rate_multiplier_power": bool(config.num_trajectories_learning_rate_multiplier_power),
        "logprob_calculation_chunk_size": config.logprob_calculation_chunk_size is not None,
        "plot_tensors": bool(config.plot_tensors),
        "grad_accumulation_sequences": config.grad_accumulation_sequences is not None,
    }
    return tuple(name for name, is_asked in asked.items() if is_asked)


def resolve(config: TrainConfig) -> StepOptions:
    """Fill in the defaults.

    Raises:
        UnsupportedOptionError: naming every option that is not there yet.
    """
    missing = unsupported(config)
    if missing:
        raise UnsupportedOptionError(missing)
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
        ),
        advantages=AdvantageOptions(
            # normalize_advantages=true does not bring back a scaling that scale_rewards=false took away.
            scale_rewards=config.scale_rewards is not False and config.normalize_advantages is not False,
            balance=config.advantage_balance or 0.0,
        ),
        packed_sequence_length=config.packed_sequence_length,
        allow_training_without_logprobs=bool(config.allow_training_without_logprobs),
    )


def _epsilon_high(config: TrainConfig, kind: LossKind, epsilon: float) -> float:
    if config.epsilon_high is not None:
        return config.epsilon_high
    if kind == "ppo" or "epsilon_high" in config.model_fields_set:
        return epsilon
    return 4.0
