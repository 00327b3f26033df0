"""One train step of an RLOR job: its dataset becomes groups, training jobs (one an epoch) and the name of the result.

Guarantees: claims are in the store before the transaction, which contains everything else: a step is written whole or not at all.
Limitations: a committed epoch is not undone: each is a version of its own, and the output model names the last one.
"""

import asyncio
import hashlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import orjson
from pydantic import BaseModel

from headrace.core.lanes import lane_of
from headrace.core.settings import S3Settings
from headrace.gateway.facts import fact_record
from headrace.gateway.gate import Gate
from headrace.gateway.job_records import job_records
from headrace.gateway.log_writer import Sealed, Turn, sealed
from headrace.gateway.problems import FAILED_PRECONDITION, ProblemError
from headrace.gateway.rlor.dataset_files import S3_SECRET, parse_credentials, ready_dataset
from headrace.gateway.rlor.deployment_state import belongs_to_another, find_snapshot_folder
from headrace.gateway.rlor.job_fields import JobFields
from headrace.gateway.rlor.job_rules import reward_weights, step_config
from headrace.gateway.rlor.job_status import KIND, find_job
from headrace.gateway.rlor.resources import check_id, resource_id, resource_name
from headrace.gateway.rlor.step_data import StepData, stage_step
from headrace.gateway.tables import Tables
from headrace.gateway.tokens import SecretBox, SecretBoxError
from headrace.schemas.commands import Command
from headrace.schemas.gateway import GatewayJob
from headrace.schemas.jobs import TrainingJob
from headrace.schemas.rlor import ModelAlias, RlorJob, RlorStep, model_alias_key, rlor_job_key

_NAMESPACE = uuid.UUID("0c2a6f34-9b1f-5f0e-8f6b-6d2c9a1e7b55")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedStep:
    """A step that can be committed."""

    job: RlorJob
    """The job's record with the step."""
    records: tuple[Sealed, ...]
    """All other records of the transaction."""
    output_key: str
    """Of the output model's record."""
    output_before: BaseModel | None
    """The output model's record when the step was prepared."""


def check_output_model(tables: Tables, gate: Gate, account: str, name: str, field: str) -> str:
    """The id of a model that does not exist yet. Raises ProblemError (400: not an id; 409: the model exists)."""
    found = check_id(resource_id(account, "models", name, field), field)
    if model_alias_key(account, found) in tables.facts or found in gate.settings.base_models:
        raise ProblemError(409, f"{field}: {resource_name(account, 'models', found)} exists: delete it first, or take another id")
    return found


async def prepare_step(
    gate: Gate, tables: Tables, job: RlorJob, fields: JobFields, *, dataset: str, output: str, owner: str
) -> PreparedStep:
    """Stage a step of a job that has no running one. `dataset` is a name or an id, `output` the id of the resulting model.

    Raises ProblemError (400: the dataset is not READY or does not fit; 404: it does not exist).
    """
    account = job.account
    output_key = model_alias_key(account, output)
    output_before = tables.facts.get(output_key)
    data = StepData(
        store=gate.store,
        s3=_s3_access(gate, job),
        dataset=ready_dataset(tables, account, dataset, "dataset"),
        weights=reward_weights(fields.reward_weights),
        evaluation=ready_dataset(tables, account, fields.evaluation_dataset, "evaluationDataset") if fields.evaluation_dataset else None,
        carve_out=fields.eval_auto_carveout,
    )
    for found in (data.dataset, data.evaluation):
        if found is not None and any(file.format != "RL" for file in found.files):
            raise ProblemError(400, f"{found.name} has no samples with rewards: a dataset of format RL is needed")
    reference = _reference_logprobs(tables, account, fields)
    number = job.steps_before + (job.step is not None)
    ids = [
        str(uuid.uuid5(_NAMESPACE, orjson.dumps([account, job.id, job.nonce, number, output, epoch]).decode()))
        for epoch in range(fields.training_config.epochs)
    ]
    lane = lane_of(job.model_id, gate.view.lanes)
    staged = await asyncio.to_thread(stage_step, gate.settings, data, model_id=job.model_id, lane=lane, training_jobs=ids)
    config = step_config(fields, staged.size, staged.samples)
    if reference is not None:
        config = config.model_copy(update={"kl_ref_logprobs": reference})
    _check_deployments(tables, account, fields)
    snapshot_folder = find_snapshot_folder(tables, account, job.id, fields.hot_load_deployment_id)
    content = hashlib.sha256(orjson.dumps([data.dataset.record.incarnation, output])).hexdigest()
    records: list[Sealed] = []
    for job_id, groups, group_ids in zip(ids, staged.groups, staged.group_ids, strict=True):
        is_last = job_id == ids[-1]
        training = TrainingJob(
            job_id=job_id,
            group_ids=group_ids,
            config=config,
            evaluation=staged.evaluation,
            forward_only=fields.forward_only,
            rollout_deployments=(fields.rollout_deployment_name,) if fields.rollout_deployment_name and is_last else (),
            hot_load_deployment=snapshot_folder if is_last else None,
            node_count=fields.node_count,
        )
        about = GatewayJob(job_id=job_id, model_id=job.model_id, account=account, owner=owner, api="rlor", content=content)
        records += [*groups, *job_records(training, about, topics=gate.settings.topic_names, lane=lane)]
    alias = ModelAlias(account=account, id=output, job=job.id, model_id=job.model_id, training_job=ids[-1], owner=owner)
    records.append(fact_record(gate, alias))
    step = RlorStep(
        dataset=data.dataset.record.dataset,
        output_model=output,
        training_jobs=tuple(ids),
        groups=len(staged.group_ids[0]),
        evaluation_groups=0 if staged.evaluation is None else staged.evaluation.groups,
    )
    job = without_step(tables, job).model_copy(update={"step": step})
    return PreparedStep(job=job, records=tuple(records), output_key=output_key, output_before=output_before)


def without_step(tables: Tables, job: RlorJob) -> RlorJob:
    """The record with its last step, which has ended, added to the former ones."""
    if job.step is None:
        return job
    seconds = dict(job.seconds_before)
    for job_id in job.step.training_jobs:
        view = tables.job(job_id)
        for name, value in (view.document.accelerator_seconds if view is not None and view.document is not None else {}).items():
            seconds[name] = seconds.get(name, 0.0) + value
    return job.model_copy(update={"step": None, "steps_before": job.steps_before + 1, "seconds_before": seconds})


async def write_step(gate: Gate, step: PreparedStep, others: Sequence[Sealed] = (), *, before: BaseModel | None) -> None:
    """Commit a step with its job's record. Other than that as `write_job`."""
    await write_job(gate, step.job, [*others, *step.records], before=before, unchanged={step.output_key: step.output_before})


async def write_job(
    gate: Gate,
    job: RlorJob,
    records: Sequence[Sealed] = (),
    *,
    before: BaseModel | None,
    unchanged: Mapping[str, BaseModel | None] = MappingProxyType({}),
) -> None:
    """Commit a job's record and others in one transaction.

    The change is based on `before`, the record with this id (None: there was none), and on the records in `unchanged`, by key.
    Raises OvertakenError if one of these has changed meanwhile; then nothing is committed.
    """
    key = rlor_job_key(job.account, job.id)

    def is_committed() -> bool:
        now = gate.view.tables.facts.get(key)
        is_new = not isinstance(before, RlorJob) or before.nonce != job.nonce
        return now == job or (is_new and isinstance(now, RlorJob) and now.nonce == job.nonce)

    turn = Turn.while_unchanged(job.account, gate.view.tables.facts, {**unchanged, key: before})
    await gate.writer.commit([*records, fact_record(gate, job)], is_in=is_committed, turn=turn)


def seal_commands(gate: Gate, commands: Sequence[Command]) -> list[Sealed]:
    """The records of commands, on the lanes of their models."""
    topic, lanes = gate.settings.topic_names.commands, gate.view.lanes
    return [sealed(command, topic=topic, key=command.model_id, partition=lane_of(command.model_id, lanes)) for command in commands]


def _check_deployments(tables: Tables, account: str, fields: JobFields) -> None:
    """Reject a step that would publish into a deployment whose id another account has taken since the job was created."""
    for field, name in (("rolloutDeploymentName", fields.rollout_deployment_name), ("hotLoadDeploymentId", fields.hot_load_deployment_id)):
        if name and belongs_to_another(tables, account, name):
            raise ProblemError(
                400,
                f"{field}: {resource_name(account, 'deployments', name)} does not exist, and its id is taken: create a job that names "
                "another deployment",
                code=FAILED_PRECONDITION,
            )


def _s3_access(gate: Gate, job: RlorJob) -> S3Settings | None:
    """Access to datasets in S3, with the job's credentials."""
    secret = job.secrets.get(S3_SECRET)
    if secret is None:
        return None
    try:
        return parse_credentials(SecretBox(gate.settings.gateway.secrets_key).open(S3_SECRET, secret), gate.settings.s3)
    except SecretBoxError as error:
        raise ProblemError(400, str(error), code=FAILED_PRECONDITION) from None


def _reference_logprobs(tables: Tables, account: str, fields: JobFields) -> str | None:
    """URI of the log-probabilities that are the KL reference."""
    name = fields.loss_config.kl_reference_job
    if not name:
        return None
    job = find_job(tables, account, resource_id(account, KIND, name, "lossConfig.klReferenceJob"))
    logprobs = job.status.document.logprobs if job.status.document is not None else None
    if logprobs is None:
        raise ProblemError(
            400,
            f"lossConfig.klReferenceJob: {job.name} is JOB_STATE_{job.status.state} and has no log-probabilities: a job with forwardOnly "
            "whose step is committed is needed",
            code=FAILED_PRECONDITION,
        )
    return logprobs.uri
