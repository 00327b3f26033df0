"""Rules between the fields of an RLOR job, and the form that it is kept in.

Guarantees: what passes can be trained by some worker: contradictions are refused with both names (400), what is not built with 501. Gives
up: `serviceMode`, Azure, DPO and ORPO, templates of one's own, falling rates; each says so.
"""

import math
from collections.abc import Mapping

from pydantic.alias_generators import to_camel

from headrace.core.models import ModelRefusedError, check_base_model
from headrace.core.presets import MethodNotBuiltError, PresetError, preset
from headrace.core.settings import Settings
from headrace.gateway.problems import ProblemError
from headrace.gateway.rlor.job_fields import JobFields, TrainingConfig, WandbConfig
from headrace.schemas.training import LoraSettings, ModelSettings, OptimizerSettings, TrainConfig

_RATE = 1e-4
_CONTEXT = 8192
_BATCH = 32768
_RANK = 8
_OF_A_WARM_START = ("lora_rank", "learning_rate", "max_context_length", "epochs", "batch_size", "batch_size_samples")


def check(fields: JobFields) -> None:
    """Raise `ProblemError` unless the fields go together: 400, or 501 for what is not built."""
    config = fields.training_config
    if bool(config.base_model) == bool(config.warm_start_from):
        said = "both are given" if config.base_model else "neither is given"
        raise ProblemError(400, f"trainingConfig.baseModel and trainingConfig.warmStartFrom: {said}; exactly one says what to begin with")
    if fields.azure_blob_storage_config is not None:
        raise ProblemError(501, "azureBlobStorageConfig: Azure storage is not supported: upload the dataset, or put it into S3")
    if fields.wandb_config is not None:
        _check_tracking(fields.wandb_config)
    _check_mode(fields)
    _check_data(fields)
    _check_loss(fields)
    _check_adapter(config)


def _check_tracking(config: WandbConfig) -> None:
    """Names that the service has."""
    for field, value in (
        ("project", config.project),
        ("entity", config.entity),
        ("runId", config.run_id),
        ("apiKey", config.api_key or ""),
    ):
        if len(value) > 256 or not value.isprintable() or (field != "apiKey" and set(value) & set("/\\#?%:")):
            raise ProblemError(400, f"wandbConfig.{field}: at most 256 printable characters, without / \\ # ? % : in names, are possible")


def reward_weights(entries: tuple[str, ...]) -> dict[str, float]:
    """`["accuracy=0.8", "format"]` as `{"accuracy": 0.8, "format": 1.0}`.

    Raises:
        ProblemError: 400: an entry that is no `name=weight`, or a metric that is there twice.
    """
    found: dict[str, float] = {}
    for index, entry in enumerate(entries):
        where = f"rewardWeights[{index}]: {entry[:80]!r}"
        name, equals, text = entry.rpartition("=")
        name = (name if equals else entry).strip()
        try:
            weight = float(text) if equals else 1.0
        except ValueError:
            raise ProblemError(400, f"{where}: a metric's name is needed, or name=weight with a number, such as accuracy=0.8") from None
        if not name or not math.isfinite(weight):
            raise ProblemError(400, f"{where}: a metric's name and a finite weight are needed, such as accuracy=0.8")
        if name in found:
            raise ProblemError(400, f"{where}: the metric {name!r} is there twice")
        found[name] = weight
    return found


def filled(fields: JobFields, settings: Settings, original: TrainingConfig | None = None) -> JobFields:
    """The fields with defaults in place of what was left out, as the job is kept.

    Args:
        fields: As asked.
        settings: Say what the base model can be trained as.
        original: Of the job that a warm start goes on from: its values, which must not differ.

    Raises:
        ProblemError: 400: a value that differs from the original's.
    """
    config = fields.training_config
    if original is not None:
        for name in _OF_A_WARM_START:
            asked, was = getattr(config, name), getattr(original, name)
            if name in config.model_fields_set and asked is not None and asked != was:
                raise ProblemError(
                    400,
                    f"trainingConfig.{to_camel(name)}: {asked} differs from {was}, with which {config.warm_start_from} was "
                    "trained: a warm start goes on with the same values; leave it out, or begin with a baseModel",
                )
        inherited = {name: getattr(original, name) for name in (*_OF_A_WARM_START, "lora_alpha", "lora_target_modules")}
        return fields.model_copy(update={"training_config": config.model_copy(update=inherited)})
    base = base_model_name(config.base_model)
    entry = settings.base_models.get(base)
    only_full = entry is not None and "lora" not in entry.trainable
    rank = config.lora_rank if config.lora_rank is not None else 0 if only_full else _RANK
    defaults = {
        "learning_rate": config.learning_rate or _RATE,
        "max_context_length": config.max_context_length or _CONTEXT,
        "batch_size": config.batch_size or _BATCH,
        "lora_rank": rank,
        "lora_alpha": (config.lora_alpha or 2 * rank) if rank else None,
    }
    return fields.model_copy(update={"training_config": config.model_copy(update=defaults)})


def base_model_name(name: str) -> str:
    """The name in the catalogue: the last segment of a resource name."""
    return name.rpartition("/")[2]


def model_settings(fields: JobFields, settings: Settings, base_model: str) -> ModelSettings:
    """How the job's model is trained.

    Args:
        fields: Filled.
        settings: With the catalogue.
        base_model: Name in the catalogue.

    Raises:
        ProblemError: 400: the catalogue has no such base model, or it can't be trained that way.
    """
    config = fields.training_config
    context, batch = config.max_context_length or _CONTEXT, config.batch_size or _BATCH
    method: TrainConfig = preset(fields.loss_config.method, fields.loss_config.kl_beta)
    train = {
        "learning_rate": config.learning_rate,
        "packed_sequence_length": min(context, batch),
        "allow_training_without_logprobs": True,
    }
    optimizer = {"warmup_updates": config.learning_rate_warmup_steps}
    if config.optimizer_weight_decay is not None:
        optimizer["weight_decay"] = config.optimizer_weight_decay  # type: ignore[assignment]
    lora: Mapping[str, object] = {"r": config.lora_rank, "alpha": config.lora_alpha} if config.lora_rank else {}
    if config.lora_rank and config.lora_target_modules:
        lora = {**lora, "target_modules": config.lora_target_modules}
    found = ModelSettings(
        base_model=base_model,
        adaptation="lora" if config.lora_rank else "full",
        lora=LoraSettings.model_validate(lora),
        optimizer=OptimizerSettings.model_validate(optimizer),
        train=TrainConfig.model_validate({**method.model_dump(exclude_unset=True), **train}),
        max_sequence_tokens=context,
    )
    try:
        check_base_model(settings, found)
    except ModelRefusedError as error:
        raise ProblemError(400, f"trainingConfig.baseModel: {error}") from None
    return found


def step_config(fields: JobFields, dataset_bytes: int, samples: int) -> TrainConfig:
    """What a step's job says beside its model's settings: in how many updates it trains.

    `batchSize` is the most tokens of one update, `batchSizeSamples` the most samples. A dataset of at most so many bytes has at most so
    many tokens: one update then. Several updates need the policy as it was before the first, for the ratio.
    """
    if fields.forward_only:
        return TrainConfig(allow_training_without_logprobs=True)
    batch = fields.training_config.batch_size or _BATCH
    most = fields.training_config.batch_size_samples
    several = dataset_bytes > batch or (most is not None and samples > most)
    return TrainConfig(
        allow_training_without_logprobs=True,
        max_tokens_per_update=batch,
        max_trajectories_per_update=most,
        precalculate_logprobs=several or None,
    )


def _check_mode(fields: JobFields) -> None:
    config = fields.training_config
    if fields.service_mode:
        if fields.keep_alive:
            raise ProblemError(400, "serviceMode and keepAlive exclude each other: a service is driven by its client, not by steps")
        if fields.dataset:
            raise ProblemError(400, "dataset: a job with serviceMode has none; leave it out")
        if config.lora_rank:
            raise ProblemError(400, f"trainingConfig.loraRank: {config.lora_rank} with serviceMode: it must be 0 there (all parameters)")
        if config.warm_start_from:
            raise ProblemError(400, "trainingConfig.warmStartFrom: a job with serviceMode begins with a baseModel")
        raise ProblemError(501, "serviceMode is not built yet: use keepAlive and :executeTrainStep, or one job a step")
    if fields.hot_load_deployment_id and not fields.keep_alive:
        raise ProblemError(400, "hotLoadDeploymentId: only with keepAlive or serviceMode; of one step, rolloutDeploymentName can load it")
    if not fields.keep_alive and not fields.dataset:
        raise ProblemError(400, "dataset: a job of one step needs one; with keepAlive, :executeTrainStep names one for each step")


def _check_data(fields: JobFields) -> None:
    if fields.eval_auto_carveout and fields.evaluation_dataset:
        raise ProblemError(400, "evalAutoCarveout and evaluationDataset exclude each other: both say what to evaluate on")
    reward_weights(fields.reward_weights)
    s3 = fields.aws_s3_config
    if s3 is not None and s3.credentials_secret and s3.iam_role_arn:
        raise ProblemError(400, "awsS3Config.credentialsSecret and awsS3Config.iamRoleArn exclude each other: give one of them")
    if s3 is not None and s3.iam_role_arn:
        raise ProblemError(501, "awsS3Config.iamRoleArn: this gateway takes no roles: give credentialsSecret, or upload the dataset")


def _check_loss(fields: JobFields) -> None:
    try:
        preset(fields.loss_config.method, fields.loss_config.kl_beta)
    except MethodNotBuiltError as error:
        raise ProblemError(501, f"lossConfig.method: {error}") from None
    except PresetError as error:
        raise ProblemError(400, f"lossConfig: {error}") from None
    if fields.loss_config.kl_reference_job and fields.forward_only:
        raise ProblemError(400, "lossConfig.klReferenceJob: a job with forwardOnly computes a reference and needs none")


def _check_adapter(config: TrainingConfig) -> None:
    if config.jinja_template:
        raise ProblemError(501, "trainingConfig.jinjaTemplate: the base model's own chat template is used; leave it out")
    if config.lora_dropout:
        raise ProblemError(501, "trainingConfig.loraDropout: only 0, since a step must give the same bits when it is run again")
    if config.lr_scheduler is not None:
        named = sorted(config.lr_scheduler.model_fields_set)
        if len(named) != 1:
            raise ProblemError(400, "trainingConfig.lrScheduler: exactly one of constant, linear and cosine")
        if named != ["constant"]:
            raise ProblemError(501, f"trainingConfig.lrScheduler.{named[0]}: only constant; with keepAlive, nobody knows the last step")
