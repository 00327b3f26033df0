"""The groups of a step on their way into the log: lines of datasets become records, large ones as claims in the store.

Guarantees: line by line, with no more in memory than the records (`_INLINE_BYTES` of groups, the rest as claims of half a kB) and those few
groups that are being written; all claims are durable before any record is written. What is evaluated on is not trained on:
`evalAutoCarveout` takes one line in ten by its SHA-256, at most 50, so the same lines at every step. Gives up: deleting what was staged for
a step that was then refused; the bucket's lifecycle does. Blocks and computes: not for an event loop.
"""

import hashlib
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from headrace.core.group_sets import store_groups
from headrace.core.payloads import PayloadTooLargeError
from headrace.core.settings import S3Settings, Settings
from headrace.core.store import DigestMismatchError, ObjectNotFoundError, ObjectStore
from headrace.gateway.job_records import group_record
from headrace.gateway.log_writer import Sealed
from headrace.gateway.problems import ProblemError
from headrace.gateway.rlor.dataset_facts import Dataset
from headrace.gateway.rlor.dataset_files import lines_of
from headrace.gateway.rlor.reward_lines import LineError, RewardLines
from headrace.gateway.rlor.s3_datasets import s3_lines
from headrace.producers.errors import InvalidGroupError
from headrace.schemas.errors import CodecError
from headrace.schemas.jobs import GroupSet
from headrace.schemas.trajectory import TrajectoryGroup

_INLINE_BYTES = 8 * 1024 * 1024
"""Of all groups of a step together; beyond it they are claims, however small."""
_WRITERS = 8
"""Claims that are stored side by side: each waits for the disk, or for S3."""
_CARVED_OF = 10
_MOST_CARVED = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class StepData:
    """What a step trains and is evaluated on."""

    store: ObjectStore
    """Of datasets that were uploaded, and of claims."""
    dataset: Dataset
    weights: dict[str, float]
    """Of metrics, in the reward."""
    evaluation: Dataset | None = None
    carve_out: bool = False
    access: S3Settings | None = None
    """To datasets that lie in S3."""

    def lines(self, dataset: Dataset) -> Iterator[bytes]:
        """A dataset's lines, without empty ones."""
        url = dataset.fact.external_url
        if url is None:
            return lines_of(self.store, dataset.files)
        if self.access is None:
            raise ProblemError(400, f"{dataset.name} lies in {url}: give awsS3Config.credentialsSecret with the job", code=9)
        return s3_lines(url, self.access)


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """Ready to be submitted."""

    groups: tuple[tuple[Sealed, ...], ...]
    """For each training job, the records of its groups."""
    group_ids: tuple[tuple[str, ...], ...]
    evaluation: GroupSet | None
    size: int
    """Bytes of the lines that train."""
    samples: int
    """On these lines."""


def stage(settings: Settings, data: StepData, *, model_id: str, lane: int, training_jobs: Sequence[str]) -> Staged:
    """Stage a step.

    Args:
        settings: Limits.
        data: Which.
        model_id: That is trained.
        lane: Its.
        training_jobs: Ids; each trains on all groups.

    Raises:
        ProblemError: 400: a line that is no group, too many of them, or a dataset that was deleted meanwhile.
        StoreError: the store.
    """
    try:
        evaluation, carved = _evaluation(data)
        return _staged(settings, data, evaluation=evaluation, carved=carved, model_id=model_id, lane=lane, training_jobs=training_jobs)
    except (LineError, PayloadTooLargeError, InvalidGroupError, CodecError) as error:
        raise ProblemError(400, f"{error}") from None
    except (ObjectNotFoundError, DigestMismatchError) as error:
        raise ProblemError(400, f"{data.dataset.name} can't be read: was it deleted? {error}", code=9) from None


def _staged(
    settings: Settings,
    data: StepData,
    *,
    evaluation: GroupSet | None,
    carved: frozenset[bytes],
    model_id: str,
    lane: int,
    training_jobs: Sequence[str],
) -> Staged:
    records: list[list[Sealed]] = [[] for _ in training_jobs]
    ids: list[list[str]] = [[] for _ in training_jobs]
    waiting: deque[tuple[list[Sealed], Future[Sealed]]] = deque()
    inline, size, count, samples = 0, 0, 0, 0
    with ThreadPoolExecutor(_WRITERS, thread_name_prefix="headrace-stage") as pool:
        for line, group in _groups(data, data.dataset):
            if _digest(line) in carved:
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
                    encoding="json",  # there are no tokens in it, which the other form is for
                    inline_limit=settings.producer.inline_limit_bytes if inline < _INLINE_BYTES else 0,
                )
                waiting.append((job_records, written))
                if len(waiting) > 2 * _WRITERS:
                    _take_first(waiting)
        while waiting:
            _take_first(waiting)
    if not count:
        raise ProblemError(400, f"{data.dataset.name} has no group to train on")
    return Staged(groups=tuple(map(tuple, records)), group_ids=tuple(map(tuple, ids)), evaluation=evaluation, size=size, samples=samples)


def _take_first(waiting: "deque[tuple[list[Sealed], Future[Sealed]]]") -> None:
    records, written = waiting.popleft()
    records.append(written.result())


def _evaluation(data: StepData) -> tuple[GroupSet | None, frozenset[bytes]]:
    """The set that the step is evaluated on, and the digests of lines that were carved out for it."""
    if data.evaluation is not None:
        return store_groups(data.store, _named(_groups(data, data.evaluation))), frozenset()
    if not data.carve_out:
        return None, frozenset()
    digests = [_digest(line) for line in data.lines(data.dataset)]
    carved = [digest for digest in dict.fromkeys(digests) if int.from_bytes(digest[:8]) % _CARVED_OF == 0][:_MOST_CARVED]
    while carved and len(carved) >= len(set(digests)):
        carved.pop()  # something is left to train on
    chosen = frozenset(carved)
    if not chosen:
        return None, chosen
    groups = ((line, group) for line, group in _groups(data, data.dataset) if _digest(line) in chosen)
    return store_groups(data.store, _named(groups)), chosen


def _groups(data: StepData, dataset: Dataset) -> Iterator[tuple[bytes, TrajectoryGroup]]:
    reader = RewardLines(dataset.name, data.weights)
    for line in data.lines(dataset):
        yield line, reader.read(line)


def _named(groups: Iterator[tuple[bytes, TrajectoryGroup]]) -> Iterator[TrajectoryGroup]:
    for line, group in groups:
        group.group_id = _digest(line).hex()
        yield group


def _digest(line: bytes) -> bytes:
    return hashlib.sha256(line).digest()
