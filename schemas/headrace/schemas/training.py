"""The training configuration: every option of the training-jobs API, and the settings of a model.

Null means "use the default". Ranges are checked here; which options the trainer can run is the trainer's to say
(`headrace.trainer.options`), with the field's name. Contradictory options are refused with both names.
"""

from typing import Literal, Self

from pydantic import Field, model_validator

from headrace.schemas.base import Open, Record


LossAggregation = Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant_norm"]
RateSchedule = Literal["constant", "linear", "cosine"]


class TrainConfig(Open):
    """`experimental_config` of a training job (union of all published revisions); units and defaults in each field."""

    learning_rate: float | None = Field(default=None, gt=0, le=10, description="Adam's rate, constant; 5e-6")
    ppo: bool | None = Field(default=None, description="true: PPO's clipped surrogate; false: CISPO")
    loss_fn: Literal["cispo", "ppo"] | None = Field(default=None, description="newer name for ppo")
    epsilon: float | None = Field(default=None, ge=0, description="ratio's lower bound is 1 - epsilon; ppo 0.2, cispo 1.0")
    epsilon_high: float | None = Field(
        default=None,
        ge=0,
        description="ratio's upper bound is 1 + epsilon_high; absent: ppo epsilon, cispo 4.0; explicit null: epsilon",
    )
    importance_sampling_level: Literal["token", "sequence", "average", "geometric_average"] | None = None
    max_negative_advantage_importance_sampling_weight: float | None = Field(
        default=None, ge=0, description="cap on the ratio where the advantage is negative; 0 or null: off"
    )
    mask_prob_ratio: bool | None = Field(default=None, description="a ratio outside the clip range weighs nothing")
    kimi_k2_tau: float | None = Field(default=None, description="A - tau * (new - old), detached; 0 or null: off")
    kl_penalty_coef: float | None = Field(default=None, ge=0)
    kl_penalty_source: Literal["current_learner", "sample"] | None = None
    kl_penalty_reference_step: int | None = Field(default=None, ge=0)
    kl_penalty_step_lag: int | None = Field(default=None, ge=1)
    kl_ref_adapter_path: str | None = None
    advantage_balance: float | None = Field(default=None, ge=-1, le=1)
    scale_rewards: bool | None = Field(default=None, description="divide centred rewards by (group std + 1e-6); true")
    normalize_advantages: bool | None = Field(default=None, description="false: centre only, as scale_rewards=false")
    scale_learning_rate_by_reward_std_dev: bool | None = None
    num_trajectories_learning_rate_multiplier_power: float | None = None
    packed_sequence_length: int | None = Field(default=None, ge=8, le=1 << 20, description="tokens in a packed row")
    logprob_calculation_chunk_size: int | None = Field(default=None, ge=1)
    precalculate_logprobs: bool | None = None
    truncated_importance_sampling: float | None = Field(default=None, ge=0)
    allow_training_without_logprobs: bool | None = None
    plot_tensors: bool | None = None
    grad_accumulation_sequences: int | None = Field(
        default=None, ge=1, description="packed rows of one optimizer update; null: all rows of the step in one update"
    )
    loss_aggregation: LossAggregation | None = Field(
        default=None,
        description="how token losses become one number; a sequence is a rollout, all its histories together. "
        "sequence_mean_token_mean, as the reference service weighs",
    )
    loss_aggregation_constant: float | None = Field(default=None, gt=0, description="tokens that constant_norm divides a sequence's sum by")
    rescale_advantages: bool | None = Field(
        default=None, description="scale advantages so that the batch's weighted mean of |A| is 1, as the reference service does; true"
    )
    kl_loss_coef: float | None = Field(
        default=None, ge=0, description="coefficient of the k3 estimate of KL to the reference, in the loss; 0"
    )

    @model_validator(mode="after")
    def _no_contradictions(self) -> Self:
        if self.loss_fn is not None and self.ppo is not None and (self.loss_fn == "ppo") != self.ppo:
            raise ValueError(f"loss_fn={self.loss_fn!r} contradicts ppo={self.ppo}: give one of them")
        if self.kl_penalty_reference_step is not None and self.kl_penalty_step_lag is not None:
            raise ValueError("kl_penalty_reference_step and kl_penalty_step_lag exclude each other: give one of them")
        return self


class LoraSettings(Record):
    """Low-rank adapters by peft: rank, scale (alpha / r) and which linear layers."""

    r: int = Field(default=16, ge=1, le=1024)
    alpha: int = Field(default=32, ge=1)
    dropout: Literal[0] = 0
    """Only 0: dropout would make a replay depend on the packing."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"


class OptimizerSettings(Record):
    """AdamW as the reference service runs it."""

    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.99, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    max_grad_norm: float = Field(default=0.1, gt=0)
    warmup_updates: int = Field(default=0, ge=0)
    """Optimizer updates over which the rate grows linearly from rate / (warmup_updates + 1) to the full rate."""
    schedule: RateSchedule = "constant"
    schedule_updates: int | None = Field(default=None, ge=1)
    """Updates, warm-up included, after which a linear or cosine schedule has come to `min_rate_ratio` of the rate and stays there."""
    min_rate_ratio: float = Field(default=0.0, ge=0, le=1)


class BatchPolicy(Record):
    """When the stream's bucket is complete; a job's bucket is complete with its full set of groups."""

    groups_per_step: int = Field(default=8, ge=1, le=65536)
    max_tokens_per_step: int | None = Field(default=None, ge=1)
    zero_variance: Literal["count", "refuse"] = "count"
    """`count`: a group of equal rewards fills its place in the batch and adds no gradient; `refuse`: it is rejected."""
    incomplete_groups: Literal["partial", "minimum", "complete"] = "partial"
    """A group that lost members (exceptions, rejected trajectories): `partial` trains on what is left, `minimum` where at least
    `minimum_group_size` are left, `complete` only where nobody is missing. The rest of the group is refused with it."""
    minimum_group_size: int | None = Field(default=None, ge=1)
    over_long: Literal["drop", "truncate"] = "drop"
    """A trajectory with a sequence longer than the model trains on: `drop` rejects the trajectory, `truncate` cuts the sequence."""


class ModelSettings(Record):
    """What a model is trained from and how; fixed at creation."""

    base_model: str = Field(min_length=1)
    adaptation: Literal["lora", "full"] = "lora"
    lora: LoraSettings = LoraSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    batch: BatchPolicy = BatchPolicy()
    train: TrainConfig = TrainConfig()
    max_policy_lag: int | None = Field(default=None, ge=0)
    max_sequence_tokens: int = Field(default=32768, ge=8)
    seed: int = Field(default=0, ge=0, lt=2**63)
    chat_template_kwargs: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Switches of the chat template (`enable_thinking`); the rollout engines must use the same."""


class SftConfig(Record):
    """Supervised fine-tuning as a job: several optimizer updates inside one committed step."""

    batch_size: int | Literal["auto"] = Field(default="auto")
    """Examples (trajectories) of one update; `auto`: 2."""
    epochs: int = Field(default=1, ge=1, le=100)
    learning_rate: float = Field(default=5e-5, gt=0, le=10)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    warmup_updates: int = Field(default=0, ge=0)
    schedule: RateSchedule = "constant"
    """Over the updates of this job."""
    min_rate_ratio: float = Field(default=0.0, ge=0, le=1)
