"""One train step of an RLOR job: its dataset becomes groups, training jobs (one an epoch) and the name of the result.

Lines become records for the log, large ones claims in the store. A sample's reward is the sum of weight times metric over the metrics of
`rewardWeights`; without any, the only metric that there is.
Guarantees: claims are in the store before the transaction, which contains everything else: a step is written whole or not at all. Memory
holds the records only (`_INLINE_BYTES` of groups, the rest as claims of half a kB) and the few groups that are being written. Training does
not use the lines of the evaluation: `evalAutoCarveout` takes one line in ten by its SHA-256, at most 50, so the same lines at every step.
An invalid line is named by its number and sample.
Limitations: a committed epoch is not undone: each is a version of its own, and the output model names the last one. Claims of a step that
was rejected afterwards stay until the bucket's lifecycle deletes them. The files have text, no token ids.
"""

import asyncio
import hashlib
import math
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import cast

import orjson
from pydantic import BaseModel

from headrace.core.group_sets import store_groups
from headrace.core.lanes import lane_of
from headrace.core.payloads import PayloadTooLargeError
from headrace.core.settings import S3Settings, Settings
from headrace.core.store import DigestMismatchError, ObjectNotFoundError, ObjectStore
from headrace.gateway.facts import fact_record
from headrace.gateway.gate import Gate
from headrace.gateway.job_records import group_record, job_records
from headrace.gateway.log_writer import Sealed, Turn, sealed
from headrace.gateway.problems import FAILED_PRECONDITION, ProblemError
from headrace.gateway.rlor.dataset_files import (
    S3_SECRET,
    Dataset,
    DatasetFaultError,
    Line,
    RlLine,
    RlSample,
    parse_credentials,
    read_line,
    read_lines,
    read_s3_lines,
    ready_dataset,
)
from headrace.gateway.rlor.deployment_state import belongs_to_another, find_snapshot_folder
from headrace.gateway.rlor.job_fields import JobFields
from headrace.gateway.rlor.job_rules import reward_weights, step_config
from headrace.gateway.rlor.job_status import KIND, find_job
from headrace.gateway.rlor.resources import resource_id, resource_name
from headrace.gateway.tables import Tables
from headrace.gateway.tokens import SecretBox, SecretBoxError
from headrace.producers.errors import InvalidGroupError
from headrace.schemas.commands import Command
from headrace.schemas.gateway import GatewayJob
from headrace.schemas.jobs import GroupSet, TrainingJob
from headrace.schemas.reasons import CodecError
from headrace.schemas.rlor import ModelAlias, RlorJob, RlorStep, model_alias_key, rlor_job_key
from headrace.schemas.trajectory import Trajectory, TrajectoryGroup

_INLINE_BYTES = 8 * 1024 * 1024
"""Of all groups of a step together; beyond it all groups are claims."""
_WRITERS = 8
"""Claims that are stored at the same time: each waits for the disk, or for S3."""
_CARVED_OUT_OF = 10
_MAX_CARVED_OUT = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class StepData:
    """The datasets of a step."""

    store: ObjectStore
    """Of uploaded datasets, and of claims."""
    dataset: Dataset
    weights: dict[str, float]
    """Of metrics, in the reward."""
    evaluation: Dataset | None = None
    carve_out: bool = False
    s3: S3Settings | None = None
    """Access to datasets in S3."""

    def lines(self, dataset: Dataset) -> Iterator[bytes]:
        """A dataset's lines, without empty ones."""
        url = dataset.record.external_url
        if url is None:
            return read_lines(self.store, dataset.files)
        if self.s3 is None:
            message = f"{dataset.name} is in {url}: give awsS3Config.credentialsSecret with the job"
            raise ProblemError(400, message, code=FAILED_PRECONDITION)
        return read_s3_lines(url, self.s3)

    def groups(self, dataset: Dataset) -> Iterator[tuple[bytes, TrajectoryGroup]]:
        """A dataset's lines, each with its group, without an id. Raises DatasetFaultError; lines are counted without the empty ones."""
        weights, size = dict(self.weights), None
        for number, text in enumerate(self.lines(dataset), start=1):
            where = f"{dataset.name} line {number}"
            try:
                line = cast("RlLine", read_line(Line(number, text, ended=True), "RL"))
            except DatasetFaultError as error:
                raise DatasetFaultError(f"{dataset.name} {error}") from None
            if size is not None and len(line.samples) != size:
                raise DatasetFaultError(f"{where}: {len(line.samples)} samples, those before have {size}: every line needs the same number")
            size, first = len(line.samples), line.samples[0].metrics
            if not weights:
                if len(first) != 1:
                    names = ", ".join(sorted(first))
                    raise DatasetFaultError(f"{where} sample 1: which metric is the reward? There are {names}: name some in rewardWeights")
                weights = dict.fromkeys(first, 1.0)
            trajectories = [_trajectory(sample, weights, f"{where} sample {n}") for n, sample in enumerate(line.samples, start=1)]
            yield text, TrajectoryGroup(trajectories=[*trajectories], allow_training_without_logprobs=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedStep:
    """The groups of a step, ready for the transaction."""

    groups: tuple[tuple[Sealed, ...], ...]
    """For each training job, the records of its groups."""
    group_ids: tuple[tuple[str, ...], ...]
    evaluation: GroupSet | None
    size: int
    """Bytes of the lines that train."""
    samples: int
    """Of these lines."""


def stage_step(settings: Settings, data: StepData, *, model_id: str, lane: int, training_jobs: Sequence[str]) -> StagedStep:
    """Stage a step; each training job trains on all groups. Raises ProblemError (400: invalid lines, too many, or deleted data)."""
    records: list[list[Sealed]] = [[] for _ in training_jobs]
    ids: list[list[str]] = [[] for _ in training_jobs]
    pending: deque[tuple[list[Sealed], Future[Sealed]]] = deque()
    inline, size, count, samples = 0, 0, 0, 0

    def take_first() -> None:
        target, written = pending.popleft()
        target.append(written.result())

    with _as_problems(data.dataset), ThreadPoolExecutor(_WRITERS, thread_name_prefix="headrace-stage") as pool:
        evaluation, carved_out = _stage_evaluation(data)
        for line, group in data.groups(data.dataset):
            if _digest(line) in carved_out:
                continue
            size, count, samples = size + len(line), count + 1, samples + len(group.trajectories)
            if count * len(training_jobs) > settings.gateway.max_groups:
                raise ProblemError(
                    400,
                    f"{data.dataset.name} has more than {count - 1} groups to train on: groups times epochs may be "
                    f"{settings.gateway.max_groups} at most (gateway.max_groups): make several steps of it",
                )
            for job_id, job_records, job_groups in zip(training_jobs, records, ids, strict=True):
                group_id = str(uuid.uuid5(uuid.UUID(job_id), str(count - 1)))
                job_groups.append(group_id)
                inline += len(line)
                written = pool.submit(
                    group_record,
                    group.model_copy(update={"job_id": job_id, "group_id": group_id}),
                    topics=settings.topic_names,
                    model_id=model_id,
                    lane=lane,
                    store=data.store,
                    encoding="json",  # the groups have no tokens, which the other encoding is for
                    inline_limit=settings.producer.inline_limit_bytes if inline < _INLINE_BYTES else 0,
                )
                pending.append((job_records, written))
                if len(pending) > 2 * _WRITERS:
                    take_first()
        while pending:
            take_first()
    if not count:
        raise ProblemError(400, f"{data.dataset.name} has no group to train on")
    return StagedStep(
        groups=tuple(map(tuple, records)), group_ids=tuple(map(tuple, ids)), evaluation=evaluation, size=size, samples=samples
    )


def _trajectory(sample: RlSample, weights: Mapping[str, float], where: str) -> Trajectory:
    metrics = sample.metrics
    for name in weights:
        if name not in metrics:
            names = ", ".join(sorted(metrics))
            raise DatasetFaultError(f"{where}: the metric {name!r} of the reward is missing; there are {names}")
    reward = math.fsum(weight * metrics[name] for name, weight in weights.items())
    if not math.isfinite(reward):
        raise DatasetFaultError(f"{where}: the reward, the weighted sum of {', '.join(weights)}, is not finite")
    return Trajectory(messages_and_choices=[*sample.messages], tools=sample.tools, reward=reward, metrics={**metrics})


@contextmanager
def _as_problems(dataset: Dataset) -> Iterator[None]:
    try:
        yield
    except (DatasetFaultError, PayloadTooLargeError, InvalidGroupError, CodecError) as error:
        raise ProblemError(400, f"{error}") from None
    except (ObjectNotFoundError, DigestMismatchError) as error:
        raise ProblemError(400, f"{dataset.name} can't be read: was it deleted? {error}", code=FAILED_PRECONDITION) from None


def _stage_evaluation(data: StepData) -> tuple[GroupSet | None, frozenset[bytes]]:
    """The set that the step is evaluated on, and the digests of the training lines that were carved out for it."""
    if data.evaluation is not None:
        return store_groups(data.store, _with_ids(data.groups(data.evaluation))), frozenset()
    if not data.carve_out:
        return None, frozenset()
    digests = [_digest(line) for line in data.lines(data.dataset)]
    carved_out = [digest for digest in dict.fromkeys(digests) if int.from_bytes(digest[:8]) % _CARVED_OUT_OF == 0][:_MAX_CARVED_OUT]
    while carved_out and len(carved_out) >= len(set(digests)):
        carved_out.pop()  # some line must be left to train on
    chosen = frozenset(carved_out)
    if not chosen:
        return None, chosen
    groups = ((line, group) for line, group in data.groups(data.dataset) if _digest(line) in chosen)
    return store_groups(data.store, _with_ids(groups)), chosen


def _with_ids(groups: Iterator[tuple[bytes, TrajectoryGroup]]) -> Iterator[TrajectoryGroup]:
    for line, group in groups:
        group.group_id = _digest(line).hex()
        yield group


def _digest(line: bytes) -> bytes:
    return hashlib.sha256(line).digest()


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
