"""The groups of a step: lines of datasets become records for the log, large ones claims in the store.

A sample's reward is the sum of weight times metric over the metrics of `rewardWeights`; without any, the only metric that there is.
Guarantees: memory holds the records only (`_INLINE_BYTES` of groups, the rest as claims of half a kB) and the few groups that are being
written. All claims are durable before any record is written. Training does not use the lines of the evaluation: `evalAutoCarveout` takes
one line in ten by its SHA-256, at most 50, so the same lines at every step. An invalid line is named by its number and sample.
Limitations: claims of a step that was rejected afterwards stay until the bucket's lifecycle deletes them. The files have text, no token
ids. Blocking and CPU-bound: not for an event loop.
"""

import hashlib
import math
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

from headrace.core.group_sets import store_groups
from headrace.core.payloads import PayloadTooLargeError
from headrace.core.settings import S3Settings, Settings
from headrace.core.store import DigestMismatchError, ObjectNotFoundError, ObjectStore
from headrace.gateway.job_records import group_record
from headrace.gateway.log_writer import Sealed
from headrace.gateway.problems import FAILED_PRECONDITION, ProblemError
from headrace.gateway.rlor.dataset_files import Dataset, read_lines, read_s3_lines
from headrace.gateway.rlor.dataset_lines import DatasetFaultError, Line, RlLine, RlSample, read_line
from headrace.producers.errors import InvalidGroupError
from headrace.schemas.jobs import GroupSet
from headrace.schemas.reasons import CodecError
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
