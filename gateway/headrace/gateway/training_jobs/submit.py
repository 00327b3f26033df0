"""`POST /v1/preview/training-jobs`: groups, the job's record, its document and the gateway's own note, in one transaction.

Guarantees: a 200 is given when all of it is committed, and then every gateway has it; a refused or failed request has written nothing to
Kafka; all faults of a body are reported at once. Limitations: judging what only the trainer can; see `groups`.

When two requests are one job (exactly-once rule 17, design section 12).

Guarantees: the same `Idempotency-Key` of an account is the same job, in every gateway; a client's own retry
(`x-stainless-retry-count` of 1 or more) is the job that it retries, as long as that has not ended. Limitations: a repeat that says of
itself neither; it is a new job.
"""

import asyncio
import uuid
import weakref
from dataclasses import dataclass
from functools import partial
from typing import Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel

from headrace.core.lanes import lane_of
from headrace.core.model_views import ModelView
from headrace.core.settings import S3Settings
from headrace.gateway.access import Caller, KnownCaller
from headrace.gateway.body_limit import Body, takes
from headrace.gateway.gate import Gate, OpenGate
from headrace.gateway.job_records import job_records
from headrace.gateway.problems import ProblemError
from headrace.gateway.reach import Reach
from headrace.gateway.readers import ReceivedBody, received, store_at
from headrace.gateway.tables import Tables
from headrace.gateway.training_jobs.body import head_of, split
from headrace.gateway.training_jobs.config import Faults, JobConfig, read_config
from headrace.gateway.training_jobs.events import model_of, version_of
from headrace.gateway.training_jobs.groups import ReadGroup, read_group
from headrace.gateway.training_jobs.pages import TrainingJobRequest, request_body
from headrace.gateway.training_jobs.staging import Placed, Staged, stage
from headrace.schemas.gateway import GatewayJob, job_key
from headrace.schemas.jobs import TrainingJob

_NAMESPACE = uuid.UUID("5f1c5a0e-3df3-5a0c-8d6f-7a51c8b2f6d4")
_MOST_CHARACTERS = 256
_locks: "weakref.WeakValueDictionary[tuple[int, str], asyncio.Lock]" = weakref.WeakValueDictionary()


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What makes a request the job that it is."""

    job_id: str
    content: str
    """SHA-256 of what was asked."""
    key: str | None
    is_retry: bool

    def known(self, tables: Tables, account: str) -> str | None:
        """The job that this request is, if it is there already.

        Raises:
            ProblemError: 409, the key was used for another request.
        """
        fact = tables.facts.get(job_key(self.job_id))
        if isinstance(fact, GatewayJob):
            if fact.content != self.content:
                raise ProblemError(409, "this Idempotency-Key was used for another request: take a new one for a new job")
            return self.job_id
        if not self.is_retry or self.key is not None:
            return None
        for fact in tables.facts.values():
            if isinstance(fact, GatewayJob) and (fact.content, fact.account) == (self.content, account):
                view = tables.job(fact.job_id)
                if view is not None and not view.final:
                    return fact.job_id
        return None

    def lock(self, gate: object) -> asyncio.Lock:
        """Held while the job is written: a repeat that comes meanwhile waits, and finds it."""
        name = self.key if self.key is not None else self.content
        lock = _locks.get((id(gate), name))
        if lock is None:
            lock = _locks[id(gate), name] = asyncio.Lock()
        return lock


async def identity_of(request: Request, caller: Caller, api: Literal["training-jobs", "rlor"], body: ReceivedBody) -> Identity:
    """Of a request to make a job.

    Raises:
        ProblemError: 400, the headers can't be used.
    """
    key = request.headers.get("idempotency-key")
    if key is not None and not 1 <= len(key) <= _MOST_CHARACTERS:
        raise ProblemError(400, f"Idempotency-Key has {len(key)} characters: 1 to {_MOST_CHARACTERS} are allowed")
    count = request.headers.get("x-stainless-retry-count", "0")
    asked = request.url.path.encode() + b"\n"
    job_id = uuid.uuid4() if key is None else uuid.uuid5(_NAMESPACE, "\n".join([api, caller.account, key]))
    return Identity(
        job_id=str(job_id),
        content=await asyncio.to_thread(body.digest, asked),
        key=key,
        is_retry=count.strip("0") != "",
    )


router = APIRouter(prefix="/v1/preview/training-jobs", tags=["training-jobs"])


class CreatedJob(BaseModel):
    """The job's id: ask `/v1/preview/training-jobs/{id}/events` what becomes of it."""

    id: str


@router.post("", openapi_extra=request_body(TrainingJobRequest))
@takes(Body.GROUPS)
async def create_job(request: Request, caller: KnownCaller, gate: OpenGate) -> CreatedJob:
    """Train a model one step on groups of trajectories."""
    async with received(request) as body:
        identity = await identity_of(request, caller, "training-jobs", body)
        async with identity.lock(gate):
            return await _created(gate, caller, identity, body)


async def _created(gate: Gate, caller: Caller, identity: Identity, body: ReceivedBody) -> CreatedJob:
    tables = await gate.view.fresh()
    if (known := identity.known(tables, caller.account)) is not None:
        return CreatedJob(id=known)
    most = gate.settings.gateway.max_groups
    head = await gate.readers.run(body.size, head_of, body, most)
    model = trainable(model_of(tables, caller, head.model_id, ("body", "model_id")))
    faults = Faults()
    config = read_config(head.config, Reach.of(gate, tables, caller), model, faults)
    placed = place(gate, model, identity, config)
    staged = await gate.readers.run(
        body.size,
        _staged,
        body,
        most,
        url=gate.settings.store.url,
        s3=gate.settings.s3,
        placed=placed,
        read=partial(read_group, model_id=model.model_id, version=version_of(model), compact=config.compact),
        faults=faults,
    )
    job = TrainingJob(job_id=identity.job_id, group_ids=staged.group_ids, config=config.config)
    await write(gate, Submission(identity=identity, caller=caller, placed=placed, staged=staged, job=job, warnings=config.warnings))
    return CreatedJob(id=identity.job_id)


def trainable(model: ModelView) -> ModelView:
    """The model, if it takes jobs.

    Raises:
        ProblemError: 409, says why not.
    """
    if model.shadow_of is not None:
        raise ProblemError(409, f"model {model.name} shadows {model.shadow_of}: it trains on that model's jobs, and has none of its own")
    if model.status in {"stopped", "diverged"}:
        raise ProblemError(409, f"model {model.name} is {model.status}: {model.status_detail}; `headrace models resume` lets it continue")
    return model


def place(gate: Gate, model: ModelView, identity: Identity, config: JobConfig, *, is_sft: bool = False) -> Placed:
    """Where the groups of a job go."""
    return Placed(
        job_id=identity.job_id,
        model_id=model.model_id,
        topics=gate.settings.topic_names,
        lane=lane_of(model.model_id, gate.view.lanes),
        inline_limit=0 if is_sft else gate.settings.producer.inline_limit_bytes,
        is_sft=is_sft,
        without_logprobs=None if config.config is None else config.config.allow_training_without_logprobs,
    )


def _staged(body: ReceivedBody, most: int, *, url: str, s3: S3Settings, placed: Placed, read: ReadGroup, faults: Faults) -> Staged:
    texts = split(body.buffer(), most, model_id=placed.model_id).groups
    places: list[list[str | int]] = [["body", "trajectory_groups", i] for i in range(len(texts))]
    groups = ((loc, partial(read, text, loc)) for loc, text in zip(places, texts, strict=True))
    staged = stage(store_at(url, s3), groups, placed, faults)
    faults.check()
    return staged


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A job, ready to be written."""

    identity: Identity
    caller: Caller
    placed: Placed
    staged: Staged
    job: TrainingJob
    warnings: tuple[str, ...] = ()


async def write(gate: Gate, submission: Submission) -> None:
    """Write a job; returns when it is committed and the gateway's tables hold it.

    Raises:
        KafkaUnavailableError: nothing was written, or no one can say; repeating the request is safe.
    """
    job, placed = submission.job, submission.placed
    if submission.identity.key is not None and job_key(job.job_id) in (await gate.view.fresh()).facts:
        return  # staging took its time: another gateway had the same request meanwhile, and its document must not be covered
    fact = GatewayJob(
        job_id=job.job_id,
        model_id=placed.model_id,
        account=submission.caller.account,
        owner=submission.caller.owner,
        api="training-jobs",
        content=submission.identity.content,
        idempotency_key=submission.identity.key,
        warnings=submission.warnings,
        created_at=job.created_at,
    )
    records = [*submission.staged.records, *job_records(job, fact, topics=placed.topics, lane=placed.lane)]
    await gate.writer.commit(records, is_in=lambda: job_key(job.job_id) in gate.view.tables.facts)
