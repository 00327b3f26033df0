"""Which groups make the next step of a model: the cut.

A bucket is complete by its policy: a job's with its full set, the stream's with `groups_per_step` groups or `max_tokens_per_step`
tokens. Steps run in the order of the log record that completed their bucket. Lag and versions are judged here, at the version that the
step starts from (exactly-once rules 7 and 9).

Guarantees: a pure function of the log and of the model's committed version: no clock, no arrival times. What is refused here is
refused through `ModelRun.refuse`, and the place it leaves is filled by the next group of its bucket.
"""

from dataclasses import dataclass

from headrace.consumers.model_run import ModelRun, Waiting
from headrace.schemas.reasons import RejectionReason
from headrace.schemas.state import OpenJob
from headrace.trainer.groups import TokenizedGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What the next step trains on."""

    groups: tuple[Waiting, ...]
    job_id: str | None
    cut: str
    """`groups_per_step`, `max_tokens_per_step` or `job`."""
    completed_at: int
    """Offset of the record that completed the bucket: the order of steps."""


def next_batch(run: ModelRun) -> Batch | None:
    """The batch whose bucket was completed first, judged at the model's version; None while no bucket is complete."""
    if run.status != "active" or run.recovering:
        # Pending groups of the committed state must be back in their buckets before anything is cut.
        return None
    while True:
        complete = [batch for batch in (_stream(run), *(_job(run, job) for job in run.jobs.values())) if batch is not None]
        if not complete:
            return None
        first = min(complete, key=lambda batch: batch.completed_at)
        unfit = [(waiting, verdict) for waiting in first.groups if (verdict := judge(run, waiting.group)) is not None]
        if not unfit:
            return first
        for waiting, (reason, detail) in unfit:
            run.refuse(offset=waiting.offset, group_id=waiting.group.group_id, job_id=waiting.job_id, reason=reason, detail=detail)


def judge(run: ModelRun, group: TokenizedGroup) -> tuple[RejectionReason, str] | None:
    """Whether the group's versions let it train now: None, or the reason and the detail."""
    now = run.state.policy_version
    limit = run.state.settings.max_policy_lag
    for index, trajectory in enumerate(group.trajectories):
        initial, final = trajectory.initial_policy_version, trajectory.final_policy_version
        newest = max((v for v in (initial, final) if v is not None), default=None)
        if newest is not None and newest > now:
            return RejectionReason.UNKNOWN_POLICY_VERSION, (
                f"trajectory {index} says policy version {newest}, but the newest that was published is {now}"
            )
        if initial is not None and final is not None and final < initial:
            return RejectionReason.UNKNOWN_POLICY_VERSION, f"trajectory {index} ends at version {final}, before it began at {initial}"
        lag = lag_of(now, initial, final)
        if limit is not None and lag is not None and lag > limit:
            return RejectionReason.STALE, f"trajectory {index} is {lag} versions behind ({now - lag} of {now}); max_policy_lag is {limit}"
    return None


def lag_of(version: int, initial: int | None, final: int | None) -> int | None:
    """Versions between the one that sampled (the oldest that took part) and the one that trains; None where none is said."""
    known = [v for v in (initial, final) if v is not None]
    return version - min(known) if known else None


def _stream(run: ModelRun) -> Batch | None:
    policy = run.state.settings.batch
    chosen: list[Waiting] = []
    tokens = 0
    for waiting in run.waiting.values():
        if waiting.job_id is not None:
            continue
        chosen.append(waiting)
        tokens += waiting.group.tokens
        full = len(chosen) >= policy.groups_per_step
        if full or (policy.max_tokens_per_step is not None and tokens >= policy.max_tokens_per_step):
            cut = "groups_per_step" if full else "max_tokens_per_step"
            return Batch(groups=tuple(chosen), job_id=None, cut=cut, completed_at=waiting.offset)
    return None


def _job(run: ModelRun, job: OpenJob) -> Batch | None:
    if job.record_offset is None:
        return None
    groups = tuple(waiting for waiting in run.waiting.values() if waiting.job_id == job.job_id)
    if not set(job.group_ids) <= {waiting.group.group_id for waiting in groups} | set(job.refused):
        return None
    last = max((waiting.offset for waiting in groups), default=0)
    return Batch(groups=groups, job_id=job.job_id, cut="job", completed_at=max(job.record_offset, last))
