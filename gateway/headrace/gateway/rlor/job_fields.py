"""The fields of an RLOR trainer job with their ranges, one class for each object of the API.

Guarantees: a value out of range is rejected with the field's name; `job_rules` has the rules between fields. The status of a job names the
fields that are accepted and have no effect (`WITHOUT_EFFECT`).
"""

import typing
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BaseModel, Field, field_validator
from pydantic.alias_generators import to_camel

from headrace.gateway.rlor.resources import Duration, Int32, Wire

_REGION_FAMILIES = {
    "US": {
        "IOWA": 1, "VIRGINIA": 2, "ILLINOIS": 2, "ARIZONA": 3, "TEXAS": 3, "NEVADA": 1, "WASHINGTON": 4, "CALIFORNIA": 1, "MISSOURI": 1,
        "UTAH": 1, "GEORGIA": 4, "OHIO": 1, "NEWYORK": 1,
    },
    "AP": {"TOKYO": 2},
    "EU": {"LONDON": 1, "FRANKFURT": 1, "PARIS": 1, "HELSINKI": 1, "ICELAND": 3, "ICELAND_DEV": 1},
    "NA": {"BRITISHCOLUMBIA": 1},
}  # fmt: skip
REGIONS = (
    "REGION_UNSPECIFIED",
    *(f"{part}_{place}_{n}" for part, places in _REGION_FAMILIES.items() for place, count in places.items() for n in range(1, count + 1)),
)
_MAX_NAMES = 50
MAX_INACTIVITY = 3 * 3600.0
Ratio = Annotated[float, Field(ge=0, le=1)]


class ConstantRate(Wire):
    """The rate is constant."""


class FallingRate(Wire):
    """The rate falls to `min_lr_ratio` of its start."""

    min_lr_ratio: Ratio | None = None
    decay_ratio: Ratio | None = None


class LrScheduler(Wire):
    """Exactly one is set."""

    constant: ConstantRate | None = None
    linear: FallingRate | None = None
    cosine: FallingRate | None = None


class TrainerShardingScheme(Wire):
    """Layout of a trainer of the hosted service."""

    tensor_parallelism: Int32 | None = None
    pipeline_parallelism: Int32 | None = None
    context_parallelism: Int32 | None = None
    expert_parallelism: Int32 | None = None
    sequence_parallelism: bool | None = None


class TrainingConfig(Wire):
    """What a job starts from, and how it trains."""

    zero_is_unset = frozenset(
        (
            *("learning_rate", "max_context_length", "lora_alpha", "epochs", "batch_size", "batch_size_samples"),
            *("gradient_accumulation_steps", "optimizer_weight_decay"),
        )
    )

    output_model: str = ""
    """Id or name of the resulting model; empty: the job's id."""
    base_model: str = ""
    """Name in the catalogue of base models, or a resource name that ends with it."""
    warm_start_from: str = ""
    """An output model to start from, instead of a base model."""
    jinja_template: str = ""
    learning_rate: float | None = Field(default=None, gt=0, le=1)
    max_context_length: int | None = Field(default=None, ge=16, le=1 << 20, multiple_of=16)
    lora_rank: int | None = None
    """A power of two from 4 to 32; 0 trains all parameters."""
    lora_alpha: int | None = Field(default=None, ge=1, le=1 << 16)
    lora_dropout: float | None = Field(default=None, ge=0, lt=1)
    lora_target_modules: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    region: str = REGIONS[0]
    epochs: int = Field(default=1, ge=1, le=10)
    batch_size: int | None = Field(default=None, ge=16, lt=2**31)
    """Tokens of one optimizer update, at most."""
    batch_size_samples: int | None = Field(default=None, ge=1, lt=2**31)
    """Samples (trajectories) of one optimizer update, at most."""
    gradient_accumulation_steps: int = Field(default=1, ge=1, le=1)
    learning_rate_warmup_steps: int = Field(default=0, ge=0, lt=2**31)
    optimizer_weight_decay: float | None = Field(default=None, ge=0, le=1000)
    sampler_checkpoint_save_interval_steps: int = Field(default=0, ge=0, lt=2**31)
    lr_scheduler: LrScheduler | None = None
    trainer_sharding_scheme: TrainerShardingScheme | None = None
    projection_head_dim: Int32 | None = None
    custom_image_tag: str = ""
    accelerator_type: str = ""
    accelerator_count: int | None = Field(default=None, ge=0, lt=2**31)
    base_model_weight_precision: str = ""
    is_intermediate: bool = False

    @field_validator("lora_rank")
    @classmethod
    def _power_of_two(cls, rank: int | None) -> int | None:
        if rank not in {None, 0, 4, 8, 16, 32}:
            raise ValueError(f"{rank} is not possible: 4, 8, 16 or 32; 0 trains all parameters")
        return rank

    @field_validator("region")
    @classmethod
    def _known_region(cls, region: str) -> str:
        if region not in REGIONS:
            raise ValueError(f"{region[:80]!r} is no region; there are {', '.join(REGIONS)}")
        return region


class DpoConfig(Wire):
    """Settings of the method DPO."""

    zero_is_unset = frozenset({"beta"})

    beta: float | None = Field(default=None, gt=0, lt=0.5)
    ref_cache_concurrency: Int32 | None = None
    ref_cache_batch_size: Int32 | None = None


class OrpoConfig(Wire):
    """Settings of the method ORPO."""


class LossConfig(Wire):
    """How rewards become a loss."""

    method: Literal["METHOD_UNSPECIFIED", "GRPO", "DAPO", "DPO", "ORPO", "GSPO_TOKEN"] = "METHOD_UNSPECIFIED"
    kl_beta: float = Field(default=0.0, ge=0, le=10**6)
    """Coefficient of KL in the loss; 0: the method's own."""
    dpo: DpoConfig | None = None
    orpo: OrpoConfig | None = None
    kl_reference_job: str = ""
    """Ours: a job with `forwardOnly` whose log-probabilities are the KL reference, instead of the model that it started with."""


class WandbConfig(Wire):
    """The Weights & Biases run that metrics are also written to."""

    enabled: bool = False
    api_key: str | None = Field(default=None, repr=False)
    """Input only."""
    project: str = ""
    entity: str = ""
    run_id: str = ""


class AwsS3Config(Wire):
    """Access to a dataset in S3: one of the two."""

    credentials_secret: str | None = Field(default=None, repr=False)
    """Input only."""
    iam_role_arn: str = Field(default="", pattern=r"^(arn:aws[a-z-]*:iam::\d{12}:role/[\w+=,.@/-]+)?$")


class AzureBlobStorageConfig(Wire):
    """Access to a dataset in Azure."""

    credentials_secret: str | None = Field(default=None, repr=False)
    managed_identity_client_id: str = ""
    tenant_id: str = ""


class JobFields(Wire):
    """All that a client can set on a job."""

    zero_is_unset = frozenset({"node_count", "trainer_replica_count", "inactivity_timeout"})

    display_name: str = Field(default="", max_length=63)
    dataset: str = ""
    evaluation_dataset: str = ""
    eval_auto_carveout: bool = False
    training_config: TrainingConfig = TrainingConfig()
    reward_weights: tuple[str, ...] = ()
    wandb_config: WandbConfig | None = None
    aws_s3_config: AwsS3Config | None = None
    azure_blob_storage_config: AzureBlobStorageConfig | None = None
    keep_alive: bool = False
    rollout_deployment_name: str = ""
    loss_config: LossConfig = LossConfig()
    node_count: int = Field(default=1, ge=1, le=100_000)
    service_mode: bool = False
    hot_load_deployment_id: str = ""
    use_purpose: Literal["", "pilot"] = ""
    purpose: Literal["PURPOSE_UNSPECIFIED", "PURPOSE_PILOT"] = "PURPOSE_UNSPECIFIED"
    forward_only: bool = False
    inactivity_timeout: Annotated[Duration, Field(gt=0, le=MAX_INACTIVITY)] = 600.0
    disable_inactivity_cleanup: bool = False
    trainer_replica_count: int = Field(default=1, ge=1, lt=2**31)
    use_reservation: bool = False
    reservation_target: str = ""
    preemptible: bool = False
    managed_by: str = ""


WITHOUT_EFFECT = (
    *("training_config.region", "training_config.sampler_checkpoint_save_interval_steps", "training_config.trainer_sharding_scheme"),
    *("training_config.projection_head_dim", "training_config.custom_image_tag", "training_config.accelerator_type"),
    *("training_config.accelerator_count", "training_config.base_model_weight_precision", "training_config.is_intermediate"),
    *("trainer_replica_count", "use_reservation", "reservation_target", "preemptible", "managed_by"),
)
"""Stored and returned, without any effect."""
OUTPUT_ONLY = frozenset(
    {
        *("name", "create_time", "completed_time", "state", "status", "created_by", "accelerator_seconds", "direct_route_handle"),
        *("job_progress", "encryption_state", "reinforcement_fine_tuning_epoch_id", "wandb_config.url", "update_time"),
        *("evaluation", "metrics", "logprobs", "waiting_for", "steps"),
    }
)
"""Ignored without a notice: a client may send back the job that it got."""


def without_effect(raw: object, fields: JobFields) -> tuple[str, ...]:
    """The keys of a body that have no effect, in camelCase: unknown ones, and those of `WITHOUT_EFFECT` that are set."""
    unknown = [path for path in _unknown(raw, JobFields, "") if path not in OUTPUT_ONLY]
    idle = [path for path in WITHOUT_EFFECT if _differs(fields, path)]
    names = sorted({".".join(to_camel(part) for part in path.split(".")) for path in (*unknown, *idle)})
    return (*names[:_MAX_NAMES], "…") if len(names) > _MAX_NAMES else tuple(names)


def _unknown(raw: object, model: type[BaseModel], at: str) -> Iterator[str]:
    if not isinstance(raw, dict):
        return
    names = {to_camel(name): name for name in model.model_fields} | {name: name for name in model.model_fields}
    for key, value in raw.items():
        name = names.get(key)
        path = f"{at}{_snake(str(key)[:80]) if name is None else name}"
        if name is None:
            yield path
            continue
        annotation = model.model_fields[name].annotation
        for kind in (annotation, *typing.get_args(annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _unknown(value, kind, f"{path}.")


def _snake(key: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in key)


def _differs(fields: BaseModel, path: str) -> bool:
    first, _, rest = path.partition(".")
    value = getattr(fields, first)
    if rest:
        return _differs(value, rest)
    return bool(value != type(fields).model_fields[first].default)
