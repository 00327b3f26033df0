"""Rules between the fields of an RLOR job, its defaults, and the settings of its model and its steps that follow from them.

Guarantees: some worker can train every job that passes. Contradictions are rejected with the names of both fields (400).
Limitations: `serviceMode`, Azure, DPO, ORPO, custom templates and falling rates are not built; each is rejected with 501. A warm start
needs the ledger of the job that made the weights: if that job was deleted and created again, its output models cannot be a start.
"""

import math
from dataclasses import dataclass

from pydantic.alias_generators import to_camel

from headrace.core.models import ModelRefusedError, check_base_model
from headrace.core.presets import MethodNotBuiltError, PresetError, preset
from headrace.core.settings import Settings
from headrace.gateway.problems import FAILED_PRECONDITION, ProblemError
from headrace.gateway.rlor.job_fields import JobFields, TrainingConfig, WandbConfig
from headrace.gateway.rlor.models import find_step
from headrace.gateway.rlor.resources import resource_id, resource_name
from headrace.gateway.tables import Tables
from headrace.schemas.rlor import ModelAlias, RlorJob, model_alias_key, rlor_job_key
from headrace.schemas.training import LoraSettings, ModelSettings, OptimizerSettings, TrainConfig
from headrace.schemas.weights import WeightsRef

_RATE = 1e-4
_CONTEXT = 8192
_BATCH = 32768
_RANK = 8
_INHERITED = ("lora_rank", "learning_rate", "max_context_length", "epochs", "batch_size", "batch_size_samples")


def check_fields(fields: JobFields) -> None:
    """Raise `ProblemError` if fields contradict each other (400) or ask for something that is not built (501)."""
    config = fields.training_config
    if bool(config.base_model) == bool(config.warm_start_from):
        given = "both are given" if config.base_model else "neither is given"
        raise ProblemError(400, f"trainingConfig.baseModel and trainingConfig.warmStartFrom: {given}; exactly one says what to begin with")
    if fields.azure_blob_storage_config is not None:
        raise ProblemError(501, "azureBlobStorageConfig: Azure storage is not supported: upload the dataset, or put it into S3")
    if fields.wandb_config is not None:
        _check_tracking(fields.wandb_config)
    _check_mode(fields)
    _check_data(fields)
    _check_loss(fields)
    _check_adapter(config)


def _check_tracking(config: WandbConfig) -> None:
    for field, value in (
        ("project", config.project),
        ("entity", config.entity),
        ("runId", config.run_id),
        ("apiKey", config.api_key or ""),
    ):
        if len(value) > 256 or not value.isprintable() or (field != "apiKey" and set(value) & set("/\\#?%:")):
            raise ProblemError(400, f"wandbConfig.{field}: at most 256 printable characters, without / \\ # ? % : in names, are possible")


def reward_weights(entries: tuple[str, ...]) -> dict[str, float]:
    """`["accuracy=0.8", "format"]` as `{"accuracy": 0.8, "format": 1.0}`. Raises ProblemError (400: invalid, or named twice)."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart:
    """The start of a job that continues from an output model."""

    weights: WeightsRef
    base_model: str
    """Name in the catalogue."""
    original: TrainingConfig
    """Of the job that made the weights."""


def warm_start(tables: Tables, account: str, name: str) -> WarmStart:
    """The weights that an output model stands for, by digest.

    Raises ProblemError (404: there is no such model; 400: it is not committed, no adapter, or its weights are no longer known).
    """
    field = "trainingConfig.warmStartFrom"
    model_id = resource_id(account, "models", name, field)
    model = resource_name(account, "models", model_id)
    alias = tables.facts.get(model_alias_key(account, model_id))
    if not isinstance(alias, ModelAlias):
        raise ProblemError(404, f"{field}: {model} does not exist: name the output model of a job; a base model is a baseModel")
    job, entry, model_view = tables.facts.get(rlor_job_key(account, alias.job)), find_step(tables, alias), tables.model(alias.model_id)
    if entry is None:
        view = tables.job(alias.training_job) if alias.training_job else None
        if view is not None and not view.final:
            raise ProblemError(400, f"{field}: {model} is not READY: its step is {view.state}", code=FAILED_PRECONDITION)
        raise ProblemError(400, f"{field}: {model} has no weights: its step was not committed", code=FAILED_PRECONDITION)
    if not isinstance(job, RlorJob) or job.created_at > alias.created_at or model_view is None:
        message = f"{field}: the job that made {model} was deleted and created again: its settings are no longer known"
        raise ProblemError(400, message, code=FAILED_PRECONDITION)
    original = JobFields.model_validate(job.request).training_config
    if not original.lora_rank:
        raise ProblemError(400, f"{field}: {model} has no adapter (loraRank is 0): a warm start continues an adapter")
    return WarmStart(weights=entry.weights, base_model=model_view.settings.base_model, original=original)


def fill_defaults(fields: JobFields, settings: Settings, original: TrainingConfig | None = None) -> JobFields:
    """The fields with the defaults of those that were not set; of a warm start, the values of its original.

    Raises ProblemError (400: a value that differs from the original's).
    """
    config = fields.training_config
    if original is not None:
        for name in _INHERITED:
            value, was = getattr(config, name), getattr(original, name)
            if name in config.model_fields_set and value is not None and value != was:
                raise ProblemError(
                    400,
                    f"trainingConfig.{to_camel(name)}: {value} differs from {was}, with which {config.warm_start_from} was "
                    "trained: a warm start keeps the values; leave it out, or start from a baseModel",
                )
        inherited = {name: getattr(original, name) for name in (*_INHERITED, "lora_alpha", "lora_target_modules")}
        return fields.model_copy(update={"training_config": config.model_copy(update=inherited)})
    entry = settings.base_models.get(base_model_name(config.base_model))
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
    """The settings of the job's model, from fields with defaults. Raises ProblemError (400: not in the catalogue, or not allowed)."""
    config = fields.training_config
    context, batch = config.max_context_length or _CONTEXT, config.batch_size or _BATCH
    method: TrainConfig = preset(fields.loss_config.method, fields.loss_config.kl_beta)
    train = {
        "learning_rate": config.learning_rate,
        "packed_sequence_length": min(context, batch),
        "allow_training_without_logprobs": True,
    }
    optimizer: dict[str, object] = {"warmup_updates": config.learning_rate_warmup_steps}
    if config.optimizer_weight_decay is not None:
        optimizer["weight_decay"] = config.optimizer_weight_decay
    lora: dict[str, object] = {"r": config.lora_rank, "alpha": config.lora_alpha} if config.lora_rank else {}
    if config.lora_rank and config.lora_target_modules:
        lora["target_modules"] = config.lora_target_modules
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
    """The settings of a step's training jobs that are not the model's: the size of an update.

    `batchSize` is the most tokens of one update, `batchSizeSamples` the most samples. A dataset has at most one token a byte, so a small
    one is one update. With several updates, the importance ratio needs the log-probabilities of the policy before the first.
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
            raise ProblemError(400, "trainingConfig.warmStartFrom: a job with serviceMode starts from a baseModel")
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
        raise ProblemError(501, "trainingConfig.loraDropout: only 0, since a rerun of a step must give the same bits")
    if config.lr_scheduler is not None:
        named = sorted(config.lr_scheduler.model_fields_set)
        if len(named) != 1:
            raise ProblemError(400, "trainingConfig.lrScheduler: exactly one of constant, linear and cosine")
        if named != ["constant"]:
            raise ProblemError(501, f"trainingConfig.lrScheduler.{named[0]}: only constant; with keepAlive, the last step is not known")
