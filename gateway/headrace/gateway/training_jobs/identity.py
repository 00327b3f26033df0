"""When two requests are one job (exactly-once rule 17, design section 12).

Guarantees: the same `Idempotency-Key` of an account is the same job, in every gateway; a client's own retry
(`x-stainless-retry-count` of 1 or more) is the job that it retries, as long as that has not ended. Limitations: a repeat that says of
itself neither; it is a new job.
"""

import asyncio
import uuid
import weakref
from dataclasses import dataclass
from typing import Literal

from fastapi import Request

from headrace.gateway.access import Caller
from headrace.gateway.problems import ProblemError
from headrace.gateway.received import ReceivedBody
from headrace.gateway.tables import Tables
from headrace.schemas.gateway import GatewayJob, job_key

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
