"""The training configuration: every option of the training-jobs API, and the settings of a model.

Guarantees: null means "use the default"; a value outside its range, NaN or infinity is refused with the field's name, and two options that
contradict each other with both names, so that nothing of it reaches a step. Limitations: what depends on the place (whether a step or an
adapter exists is known when the step is prepared), and what merely has no effect (`headrace.trainer.options` warns of that).
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from headrace.schemas.base import Open, Record

LossAggregation = Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant_norm"]
RateSchedule = Literal["constant", "linear", "cosine"]

# Each names the reference of the KL term, so a config holds at most one of them.
KL_REFERENCES = ("kl_penalty_reference_step", "kl_penalty_step_lag", "kl_ref_adapter_path", "kl_ref_logprobs")
# Each says how much of a step is one optimizer update; the last two may go together.
UPDATE_SIZES = ("grad_accumulation_sequences", "max_tokens_per_update", "max_trajectories_per_update")


# A ratio is at most e^20 = 4.9e8 (`headrace.trainer.loss`): no bound above this does anything, and float32 holds it.
_LARGEST_RATIO = 10**9
# Advantages are of the order of 1: what is far beyond it would only overflow float32 in the middle of a step.
_LARGEST_COEFFICIENT = 10**6


class TrainConfig(Open):
    """`experimental_config` of a training job (union of all published revisions); units and defaults in each field."""

    learning_rate: float | None = Field(
        default=None, ge=0, le=10, description="Adam's rate, before warm-up, schedule and multipliers; 0 leaves the weights; 5e-6"
    )
    ppo: bool | None = Field(default=None, description="true: PPO's clipped surrogate; false: CISPO")
    loss_fn: Literal["cispo", "ppo"] | None = Field(default=None, description="newer name for ppo")
    epsilon: float | None = Field(
        default=None, ge=0, le=_LARGEST_RATIO, description="ratio's lower bound is 1 - epsilon; ppo 0.2, cispo 1.0"
    )
    epsilon_high: float | None = Field(
        default=None,
        ge=0,
        le=_LARGEST_RATIO,
        description="ratio's upper bound is 1 + epsilon_high; absent: ppo epsilon, cispo 4.0; explicit null: epsilon",
    )
    importance_sampling_level: Literal["token", "sequence", "average", "geometric_average"] | None = None
    max_negative_advantage_importance_sampling_weight: float | None = Field(
        default=None, ge=0, le=_LARGEST_RATIO, description="cap on the ratio where the advantage is negative; 0 or null: off"
    )
    mask_prob_ratio: bool | None = Field(default=None, description="a ratio outside the clip range weighs nothing")
    kimi_k2_tau: float | None = Field(
        default=None, ge=-_LARGEST_COEFFICIENT, le=_LARGEST_COEFFICIENT, description="A - tau * (new - old), detached; 0 or null: off"
    )
    kl_penalty_coef: float | None = Field(
        default=None, ge=0, le=_LARGEST_COEFFICIENT, description="coefficient of the KL change of advantages; 0"
    )
    kl_penalty_source: Literal["current_learner", "sample"] | None = Field(
        default=None, description="whose log-probabilities are compared with the reference; current_learner"
    )
    kl_penalty_reference_step: int | None = Field(
        default=None, ge=0, description="version of this model that is the reference; null: the base model"
    )
    kl_penalty_step_lag: int | None = Field(default=None, ge=1, description="the reference is the version this many before, but at least 0")
    kl_ref_adapter_path: str | None = Field(
        default=None,
        description="URI in the object store (file:///… or s3://…) of an adapter that is the reference; never a path of a client",
    )
    kl_ref_logprobs: str | None = Field(
        default=None,
        description="URI in the object store of the log-probabilities that a forward-only job wrote (`logprobs` of its document): "
        "they are the reference",
    )
    advantage_balance: float | None = Field(default=None, ge=-1, le=1)
    scale_rewards: bool | None = Field(default=None, description="divide centred rewards by (group std + 1e-6); true")
    normalize_advantages: bool | None = Field(default=None, description="false: centre only, as scale_rewards=false")
    scale_learning_rate_by_reward_std_dev: bool | None = None
    num_trajectories_learning_rate_multiplier_power: float | None = Field(
        default=None, ge=-4, le=4, description="the rate times k ** power, k trajectories that train in the update; 0"
    )
    packed_sequence_length: int | None = Field(default=None, ge=8, le=1 << 20, description="tokens in a packed row")
    logprob_calculation_chunk_size: int | None = Field(default=None, ge=1)
    precalculate_logprobs: bool | None = None
    truncated_importance_sampling: float | None = Field(default=None, ge=0, le=_LARGEST_RATIO)
    allow_training_without_logprobs: bool | None = None
    plot_tensors: bool | None = None
    grad_accumulation_sequences: int | None = Field(
        default=None, ge=1, description="packed rows of one optimizer update; null: all rows of the step in one update"
    )
    max_tokens_per_update: int | None = Field(
        default=None,
        ge=8,
        lt=2**31,
        description="most tokens of the packed rows of one optimizer update, but at least one row a rank; null: all rows of the step",
    )
    max_trajectories_per_update: int | None = Field(
        default=None, ge=1, lt=2**31, description="most trajectories of one optimizer update, in the order of the groups; null: all"
    )
    loss_aggregation: LossAggregation | None = Field(
        default=None,
        description="how token losses become one number; a sequence is a rollout, all its histories together. "
        "sequence_mean_token_mean, as the reference service weighs",
    )
    loss_aggregation_constant: float | None = Field(
        default=None, ge=0.001, le=10**12, description="tokens that constant_norm divides a sequence's sum by"
    )
    rescale_advantages: bool | None = Field(
        default=None, description="scale advantages so that the batch's weighted mean of |A| is 1, as the reference service does; true"
    )
    kl_loss_coef: float | None = Field(
        default=None, ge=0, le=_LARGEST_COEFFICIENT, description="coefficient of the k3 estimate of KL to the reference, in the loss; 0"
    )

    @field_validator("kl_ref_adapter_path", "kl_ref_logprobs")
    @classmethod
    def _in_the_store(cls, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            uri = urlsplit(value)
        except ValueError as error:
            raise ValueError(f"{value!r} is no URI: {error}") from error
        where = "the trainer does not see a client's files: put it into the object store and give its URI (file:///… or s3://…)"
        if uri.scheme not in {"file", "s3"}:
            raise ValueError(f"{value!r} is not an object-store URI; {where}")
        if ".." in uri.path.split("/") or not uri.path.strip("/") or (uri.scheme == "s3") != bool(uri.netloc):
            raise ValueError(
                f"{value!r} names no object: an absolute URI without '..' is needed, as file:///store/adapter or s3://bucket/adapter"
            )
        return value

    @model_serializer(mode="wrap")
    def _what_was_said(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """An explicit null of `epsilon_high` has a meaning of its own: a reader must not take one for it that no one said."""
        written: dict[str, Any] = write(self)
        if "epsilon_high" not in self.model_fields_set:
            written.pop("epsilon_high", None)
        return written

    @model_validator(mode="after")
    def _no_contradictions(self) -> Self:
        found = contradictions({name: getattr(self, name) for name in type(self).model_fields})
        if found:
            raise ValueError("; ".join(message for _names, message in found))
        return self


def contradictions(said: Mapping[str, object]) -> list[tuple[tuple[str, ...], str]]:
    """Options of a training config that contradict each other: their names, and why. Whether each has a fitting value is not looked at.

    Args:
        said: Options by name; null is as not said.
    """
    found: list[tuple[tuple[str, ...], str]] = []
    loss_fn, ppo = said.get("loss_fn"), said.get("ppo")
    if loss_fn is not None and ppo is not None and (loss_fn == "ppo") != ppo:
        found.append((("loss_fn", "ppo"), f"loss_fn={loss_fn!r} contradicts ppo={ppo}: give one of them"))
    sizes = tuple(name for name in UPDATE_SIZES if said.get(name) is not None)
    if len(sizes) > 1 and UPDATE_SIZES[0] in sizes:
        found.append((sizes, f"{' and '.join(sizes)} exclude each other, each says how large an update is: leave {UPDATE_SIZES[0]} out"))
    references = tuple(name for name in KL_REFERENCES if said.get(name) is not None)
    if len(references) > 1:
        message = f"{' and '.join(references)} exclude each other, each names the reference of the KL term: give one of them"
        found.append((references, message))
    aggregation, constant = said.get("loss_aggregation"), said.get("loss_aggregation_constant")
    if (aggregation == "constant_norm") != (constant is not None):
        message = (
            f"loss_aggregation={aggregation!r} contradicts loss_aggregation_constant={constant}: "
            "constant_norm needs a constant, and the others have none"
        )
        found.append((("loss_aggregation", "loss_aggregation_constant"), message))
    return found


def row_length_problem(train: TrainConfig, max_sequence_tokens: int) -> str | None:
    """Why a config's packed rows don't fit a model; None if they do. A job's config is merged over its model's, so both doors ask."""
    length = train.packed_sequence_length
    if length is None or length <= max_sequence_tokens:
        return None
    return (
        f"train.packed_sequence_length={length} is above max_sequence_tokens={max_sequence_tokens}: "
        "as in the reference service, a row is at most as long as a sequence may be"
    )


class LoraSettings(Record):
    """Low-rank adapters by peft: rank, scale (alpha / r) and which linear layers."""

    r: int = Field(default=16, ge=1, le=1024)
    alpha: int = Field(default=32, ge=1)
    dropout: Literal[0] = 0
    """Only 0: dropout would make a replay depend on the packing."""
    target_modules: Literal["all-linear"] | Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)] = "all-linear"
    """Names of linear layers, as `q_proj` for those of all blocks or `layers.0.self_attn.q_proj` for one."""


def _check_min_rate(schedule: RateSchedule, min_rate_ratio: float) -> None:
    if schedule == "constant" and min_rate_ratio:
        raise ValueError(f"min_rate_ratio={min_rate_ratio} contradicts schedule='constant': only linear and cosine come to it")


class OptimizerSettings(Record):
    """AdamW as the reference service runs it."""

    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.99, ge=0, lt=1)
    eps: float = Field(default=1e-8, ge=1e-30)
    """Smaller numbers are 0 in float32, and a weight without gradient would become 0 / 0."""
    weight_decay: float = Field(default=0.1, ge=0)
    max_grad_norm: float = Field(default=0.1, gt=0)
    max_weight_growth: float = Field(default=4.0, gt=1)
    """How many times larger one update may make the weights' norm; the model is stopped as diverged instead of beyond it."""
    warmup_updates: int = Field(default=0, ge=0)
    """Optimizer updates over which the rate grows linearly from rate / (warmup_updates + 1) to the full rate."""
    schedule: RateSchedule = "constant"
    schedule_updates: int | None = Field(default=None, ge=1)
    """Updates, warm-up included, after which a linear or cosine schedule has come to `min_rate_ratio` of the rate and stays there."""
    min_rate_ratio: float = Field(default=0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _no_contradictions(self) -> Self:
        if (self.schedule == "constant") != (self.schedule_updates is None):
            raise ValueError(
                f"schedule={self.schedule!r} contradicts schedule_updates={self.schedule_updates}: "
                "linear and cosine need the number of updates, constant has none"
            )
        if self.schedule_updates is not None and self.warmup_updates >= self.schedule_updates:
            raise ValueError(
                f"warmup_updates={self.warmup_updates} leaves nothing of schedule_updates={self.schedule_updates}: "
                "schedule_updates counts the warm-up too, so it must be larger"
            )
        _check_min_rate(self.schedule, self.min_rate_ratio)
        return self


class BatchPolicy(Record):
    """When the stream's bucket is complete; a job's bucket is complete with its full set of groups."""

    groups_per_step: int = Field(default=8, ge=1, le=65536)
    max_tokens_per_step: int | None = Field(default=None, ge=1)
    linger_seconds: float | None = Field(default=None, gt=0)
    """The stream's groups that have waited so long train although they are fewer; null: they wait for more."""
    zero_variance: Literal["count", "refuse"] = "count"
    """`count`: a group of equal rewards fills its place in the batch and adds no gradient; `refuse`: it is rejected."""
    incomplete_groups: Literal["partial", "minimum", "complete"] = "partial"
    """A group that lost members (exceptions, rejected trajectories): `partial` trains on what is left, `minimum` where at least
    `minimum_group_size` are left, `complete` only where no one is missing. The rest of the group is refused with it."""
    minimum_group_size: int | None = Field(default=None, ge=1)
    over_long: Literal["drop", "truncate"] = "drop"
    """A trajectory with a sequence longer than the model trains on: `drop` rejects the trajectory, `truncate` cuts the sequence."""

    @model_validator(mode="after")
    def _no_contradictions(self) -> Self:
        if (self.incomplete_groups == "minimum") != (self.minimum_group_size is not None):
            raise ValueError(
                f"incomplete_groups={self.incomplete_groups!r} contradicts minimum_group_size={self.minimum_group_size}: "
                "minimum needs a size, partial and complete have none"
            )
        return self


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

    @model_validator(mode="after")
    def _no_contradictions(self) -> Self:
        if (problem := row_length_problem(self.train, self.max_sequence_tokens)) is not None:
            raise ValueError(problem)
        return self


class SftConfig(Record):
    """Supervised fine-tuning as a job: several optimizer updates inside one committed step."""

    batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Examples (trajectories) of one update; `auto`: 2."""
    assistant_turns: Literal["all", "last"] = "all"
    """Which assistant messages of an example train: all of them, or only the last message, which then must be the assistant's."""
    epochs: int = Field(default=1, ge=1, le=100)
    learning_rate: (
        Annotated[float, Field(ge=0, le=10)] | Annotated[tuple[Annotated[float, Field(ge=0, le=10)], ...], Field(min_length=1)]
    ) = 5e-5
    """One rate, or one for each update (batch) in order: the last continues where there are more updates than rates."""
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    warmup_updates: int = Field(default=0, ge=0)
    schedule: RateSchedule = "constant"
    """Over the updates of this job."""
    min_rate_ratio: float = Field(default=0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _no_contradictions(self) -> Self:
        _check_min_rate(self.schedule, self.min_rate_ratio)
        return self
