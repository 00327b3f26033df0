"""One train step of an RLOR job: its dataset becomes groups, training jobs (one an epoch) and the name of what comes of it, in one go.

Guarantees: claims are in the store before the transaction; it holds everything else, so that a step is there whole or not at all. Gives
up: undoing an epoch; each is a version of its own, and the last one is what the output model names.
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
from headrace.gateway.log_writer import Sealed, Turn
from headrace.gateway.problems import FAILED_PRECONDITION, ProblemError
from headrace.gateway.rlor.dataset_facts import ready_dataset
from headrace.gateway.rlor.deployment_facts import is_of_another, snapshot_folder
from headrace.gateway.rlor.job_facts import find_job
from headrace.gateway.rlor.job_fields import JobFields
from headrace.gateway.rlor.job_rules import reward_weights, step_config
from headrace.gateway.rlor.names import check_id, id_in, name_of
from headrace.gateway.rlor.s3_datasets import S3_SECRET, credentials
from headrace.gateway.rlor.staging import StepData, stage
from headrace.gateway.secret_box import SecretBox, SecretBoxError
from headrace.gateway.tables import Tables
from headrace.schemas.gateway import GatewayJob
from headrace.schemas.jobs import TrainingJob
from headrace.schemas.rlor import RlorJob, RlorStep, rlor_job_key
from headrace.schemas.rlor_resources import ModelAlias, model_alias_key

_NAMESPACE = uuid.UUID("0c2a6f34-9b1f-5f0e-8f6b-6d2c9a1e7b55")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A step, ready to be committed."""

    fact: RlorJob
    records: tuple[Sealed, ...]
    """All but the job's own fact."""
    output: str
    """Key of the name of what comes of it."""
    named: BaseModel | None
    """What that name was when this was decided; None: nothing."""


def output_model(tables: Tables, gate: Gate, account: str, name: str, field: str) -> str:
    """The id of a model that is to be made.

    Raises:
        ProblemError: 400: no id; 409: there is such a model.
    """
    found = check_id(id_in(account, "models", name, field), field)
    if model_alias_key(account, found) in tables.facts or found in gate.settings.base_models:
        raise ProblemError(409, f"{field}: {name_of(account, 'models', found)} exists: delete it first, or take another id")
    return found


async def prepare(gate: Gate, tables: Tables, fact: RlorJob, fields: JobFields, *, dataset: str, output: str, owner: str) -> Prepared:
    """Stage a step.

    Args:
        gate: The gateway's.
        tables: Of now.
        fact: The job, with no step that has not ended.
        fields: What it asks for.
        dataset: Name or id.
        output: Id of the resulting model.
        owner: Who asks.

    Raises:
        ProblemError: 400: a dataset that is not READY or does not fit; 404: there is none.
        StoreUnavailableError: the store.
    """
    account = fact.account
    output_key = model_alias_key(account, output)
    named = tables.facts.get(output_key)
    data = StepData(
        store=gate.store,
        access=_access(gate, fact),
        dataset=ready_dataset(tables, account, dataset, "dataset"),
        weights=reward_weights(fields.reward_weights),
        evaluation=ready_dataset(tables, account, fields.evaluation_dataset, "evaluationDataset") if fields.evaluation_dataset else None,
        carve_out=fields.eval_auto_carveout,
    )
    for found in (data.dataset, data.evaluation):
        if found is not None and any(file.format != "RL" for file in found.files):
            raise ProblemError(400, f"{found.name} has no samples with rewards: a dataset of format RL is needed")
    reference = _reference(tables, account, fields)
    number = fact.steps_before + (fact.step is not None)
    ids = [
        str(uuid.uuid5(_NAMESPACE, orjson.dumps([account, fact.id, fact.nonce, number, output, epoch]).decode()))
        for epoch in range(fields.training_config.epochs)
    ]
    lane = lane_of(fact.model_id, gate.view.lanes)
    staged = await asyncio.to_thread(stage, gate.settings, data, model_id=fact.model_id, lane=lane, training_jobs=ids)
    config = step_config(fields, staged.size, staged.samples)
    if reference is not None:
        config = config.model_copy(update={"kl_ref_logprobs": reference})
    _check_deployments(tables, account, fields)
    snapshots = snapshot_folder(tables, account, fact.id, fields.hot_load_deployment_id)
    content = hashlib.sha256(orjson.dumps([data.dataset.fact.incarnation, output])).hexdigest()
    records: list[Sealed] = []
    topics = gate.settings.topic_names
    for job_id, groups, group_ids in zip(ids, staged.groups, staged.group_ids, strict=True):
        is_last = job_id == ids[-1]
        training = TrainingJob(
            job_id=job_id,
            group_ids=group_ids,
            config=config,
            evaluation=staged.evaluation,
            forward_only=fields.forward_only,
            rollout_deployments=(fields.rollout_deployment_name,) if fields.rollout_deployment_name and is_last else (),
            hot_load_deployment=snapshots if is_last else None,
            node_count=fields.node_count,
        )
        about = GatewayJob(job_id=job_id, model_id=fact.model_id, account=account, owner=owner, api="rlor", content=content)
        records += [*groups, *job_records(training, about, topics=topics, lane=lane)]
    alias = ModelAlias(account=account, id=output, job=fact.id, model_id=fact.model_id, training_job=ids[-1], owner=owner)
    records.append(fact_record(gate, alias))
    step = RlorStep(
        dataset=data.dataset.fact.dataset,
        output_model=output,
        training_jobs=tuple(ids),
        groups=len(staged.group_ids[0]),
        evaluation_groups=0 if staged.evaluation is None else staged.evaluation.groups,
    )
    asked = without_step(tables, fact).model_copy(update={"step": step})
    return Prepared(fact=asked, records=tuple(records), output=output_key, named=named)


def without_step(tables: Tables, fact: RlorJob) -> RlorJob:
    """The record with its last step, which has ended, counted among those before."""
    if fact.step is None:
        return fact
    seconds = dict(fact.seconds_before)
    for job_id in fact.step.training_jobs:
        view = tables.job(job_id)
        for name, value in (view.document.accelerator_seconds if view is not None and view.document is not None else {}).items():
            seconds[name] = seconds.get(name, 0.0) + value
    return fact.model_copy(update={"step": None, "steps_before": fact.steps_before + 1, "seconds_before": seconds})


async def write_step(gate: Gate, step: Prepared, others: Sequence[Sealed] = (), *, before: BaseModel | None) -> None:
    """Commit a step with its job's record; otherwise as `write_job`."""
    await write_job(gate, step.fact, [*others, *step.records], before=before, named={step.output: step.named})


async def write_job(
    gate: Gate,
    fact: RlorJob,
    records: Sequence[Sealed] = (),
    *,
    before: BaseModel | None,
    named: Mapping[str, BaseModel | None] = MappingProxyType({}),
) -> None:
    """Commit a job's record, with what goes with it, in one transaction.

    Args:
        gate: The gateway's.
        fact: The record as it is to be.
        records: What goes with it.
        before: The record under this id as it was when this was decided; None: there was none.
        named: Other facts that this rests on, by their keys, as they were then.

    Raises:
        OvertakenError: one of these has changed meanwhile; nothing is committed.
        KafkaUnavailableError: it is not committed, or nobody can say.
    """
    facts, key = gate.view.tables.facts, rlor_job_key(fact.account, fact.id)

    def is_in() -> bool:
        now = facts.get(key)
        is_new = not isinstance(before, RlorJob) or before.nonce != fact.nonce
        return now == fact or (is_new and isinstance(now, RlorJob) and now.nonce == fact.nonce)

    turn = Turn.while_unchanged(fact.account, facts, {**named, key: before})
    await gate.writer.commit([*records, fact_record(gate, fact)], is_in=is_in, turn=turn)


def _check_deployments(tables: Tables, account: str, fields: JobFields) -> None:
    """Refuse to publish into what has become another account's since the job was made."""
    for field, name in (("rolloutDeploymentName", fields.rollout_deployment_name), ("hotLoadDeploymentId", fields.hot_load_deployment_id)):
        if name and is_of_another(tables, account, name):
            raise ProblemError(
                400,
                f"{field}: {name_of(account, 'deployments', name)} does not exist, and its id is taken: make a job that names another "
                "deployment",
                code=FAILED_PRECONDITION,
            )


def _access(gate: Gate, fact: RlorJob) -> S3Settings | None:
    """To datasets in S3, with the job's credentials."""
    sealed_secret = fact.secrets.get(S3_SECRET)
    if sealed_secret is None:
        return None
    try:
        return credentials(SecretBox(gate.settings.gateway.secrets_key).open(S3_SECRET, sealed_secret), gate.settings.s3)
    except SecretBoxError as error:
        raise ProblemError(400, str(error), code=FAILED_PRECONDITION) from None


def _reference(tables: Tables, account: str, fields: JobFields) -> str | None:
    """URI of the log-probabilities that the KL is to."""
    named = fields.loss_config.kl_reference_job
    if not named:
        return None
    job = find_job(tables, account, id_in(account, "rlorTrainerJobs", named, "lossConfig.klReferenceJob"))
    logprobs = job.stands.document.logprobs if job.stands.document is not None else None
    if logprobs is None:
        raise ProblemError(
            400,
            f"lossConfig.klReferenceJob: {job.name} is JOB_STATE_{job.stands.state} and has no log-probabilities: a job with forwardOnly "
            "whose step is committed is needed",
            code=FAILED_PRECONDITION,
        )
    return logprobs.uri
