"""RLOR jobs as the gateway knows them: their facts, read back into the fields that were asked for, and how each stands.

Guarantees: within one gateway, what changes a job goes one at a time (`changing`); across gateways, what was decided on a record that has
changed since is not written (`steps.write_job`).
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from weakref import WeakValueDictionary

from headrace.gateway.gate import Gate
from headrace.gateway.problems import FAILED_PRECONDITION, ProblemError
from headrace.gateway.rlor.job_fields import JobFields
from headrace.gateway.rlor.job_state import Standing, is_gone, standing
from headrace.gateway.rlor.names import name_of
from headrace.gateway.tables import Tables
from headrace.schemas.base import utc_now
from headrace.schemas.deployments import deployment_key
from headrace.schemas.rlor import RlorJob, RlorRun, rlor_job_key, rlor_run_key

KIND = "rlorTrainerJobs"
_AT_ONCE = 50
_changing: WeakValueDictionary[tuple[int, str, str], asyncio.Lock] = WeakValueDictionary()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job: its record, what was asked, how it stands."""

    fact: RlorJob
    fields: JobFields
    stands: Standing
    run_url: str
    """Where its metrics are to be seen, beside here; empty: nowhere yet."""
    run_fault: str | None
    """Why they are not there."""
    missing_deployments: tuple[str, ...] = ()
    """Names of deployments that it is to load its versions into, and that the account does not have."""

    @property
    def name(self) -> str:
        """The resource name."""
        return name_of(self.fact.account, KIND, self.fact.id)

    def refused(self, verb: str) -> ProblemError:
        """What is asked of it can't be in the state that it is in."""
        said = f": {self.stands.message}" if self.stands.message else ""
        return ProblemError(400, f"cannot {verb} job in state: JOB_STATE_{self.stands.state}{said}", code=FAILED_PRECONDITION)


@asynccontextmanager
async def changing(gate: Gate, account: str, job_id: str) -> AsyncIterator[Tables]:
    """Alone with a job; the tables as of now."""
    lock = _changing.setdefault((id(gate), account, job_id), asyncio.Lock())
    async with lock:
        yield await gate.view.fresh()


def job_of(tables: Tables, fact: RlorJob, now: datetime | None = None) -> Job:
    """A job from its record."""
    fields = JobFields.model_validate(fact.request)
    inactivity = None if fields.disable_inactivity_cleanup else fields.inactivity_timeout
    stands = standing(tables, fact, keep_alive=fields.keep_alive, inactivity=inactivity, now=now or utc_now())
    run = tables.facts.get(rlor_run_key(fact.account, fact.id))
    own = run if isinstance(run, RlorRun) and run.nonce == fact.nonce else None
    return Job(
        fact=fact,
        fields=fields,
        stands=stands,
        run_url=own.url if own else "",
        run_fault=own.fault if own else None,
        missing_deployments=_missing_deployments(tables, fact.account, fields),
    )


def _missing_deployments(tables: Tables, account: str, fields: JobFields) -> tuple[str, ...]:
    named = dict.fromkeys(filter(None, (fields.rollout_deployment_name, fields.hot_load_deployment_id)))
    return tuple(name_of(account, "deployments", name) for name in named if deployment_key(account, name) not in tables.facts)


def find_job(tables: Tables, account: str, job_id: str) -> Job:
    """A job by its id; a deleted one too, for 30 days.

    Raises:
        ProblemError: 404.
    """
    fact = tables.facts.get(rlor_job_key(account, job_id))
    if not isinstance(fact, RlorJob) or is_gone(fact, utc_now()):
        raise ProblemError(404, f"{name_of(account, KIND, job_id)[:300]} does not exist")
    return job_of(tables, fact)


async def each_job(tables: Tables, account: str) -> AsyncIterator[Job]:
    """All jobs of an account that are not deleted, by name. Others get their turn between them: there may be thousands."""
    now = utc_now()
    for number, fact in enumerate(tables.facts_under(rlor_job_key(account, "")), start=1):
        if isinstance(fact, RlorJob) and fact.deleted_at is None:
            yield job_of(tables, fact, now)
        if number % _AT_ONCE == 0:
            await asyncio.sleep(0)
