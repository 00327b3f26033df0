"""Which groups make the next step of a model: the cut.

A bucket is complete by its policy: a job's with its full set, the stream's with `groups_per_step` groups or `max_tokens_per_step`
tokens. Steps run in the order of the log record that completed their bucket. Lag and versions are judged here, at the version that the
step starts from (exactly-once rules 7 and 9), and so is the row length that a job asks for; each trajectory alone. The model's policy says
what becomes of the rest of its group.

Guarantees: a pure function of the log, of the model's committed version and of its intent: what a clock decided (a linger) is committed as
an intent before its step runs, and an owner that finds one obeys it. A group that is refused here is
refused through `ModelRun.refuse`, and the place it leaves is filled by the next group of its bucket; a group that lost members keeps its
place. Members lost here are the batch's to report, in the transaction of its step: reported earlier they would be reported again after a
crash, since the group is still pending. A job whose kind is not that of its groups fails, and nothing of it trains;
one that needs more machines than there are keeps its place, and the buckets behind it go on.
"""

from dataclasses import dataclass, replace

from headrace.consumers.memory.model_run import ModelRun
from headrace.consumers.memory.waiting import Waiting
from headrace.schemas.jobs import JobState
from headrace.schemas.reasons import RejectionReason
from headrace.schemas.state import OpenJob
from headrace.schemas.training import BatchPolicy, ModelSettings
from headrace.trainer.group_policy import GroupRefusal, refusal_of
from headrace.trainer.groups import RejectedTrajectory, TokenizedGroup, TokenizedTrajectory
from headrace.trainer.lengths import OverLongError, fit

_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """Members of a group that the batch trains without them."""

    waiting: Waiting
    members: tuple[RejectedTrajectory, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What the next step trains on."""

    groups: tuple[Waiting, ...]
    job_id: str | None
    cut: str
    """`groups_per_step`, `max_tokens_per_step`, `linger` or `job`."""
    completed_at: int
    """Offset of the record that completed the bucket: the order of steps."""
    lost: tuple[Lost, ...] = ()
    """Members whose versions do not let them train now; `groups` are without them."""

    @property
    def offsets(self) -> tuple[int, ...]:
        """Of its groups."""
        return tuple(waiting.offset for waiting in self.groups)


def next_batch(run: ModelRun, nodes: int = 1) -> Batch | None:
    """The batch whose bucket was completed first, judged at the model's version; None while no bucket is complete.

    Args:
        run: The model.
        nodes: Machines of the world (`LaneState.nodes`): a job that needs more is passed by.
    """
    if not run.trains or run.rebasing is not None or run.start_from is not None:
        # Pending groups of the committed state must be back in their buckets before anything is cut, and a new beginning comes first.
        return None
    while True:
        first = _intended(run, nodes)
        if first is None:
            buckets = (stream_batch(run), *(job_batch(run, job, nodes) for job in run.jobs.values()))
            complete = [batch for batch in buckets if batch is not None]
            if not complete:
                return None
            first = min(complete, key=lambda batch: batch.completed_at)
        if first.job_id is not None and (message := _mismatch(run, first)) is not None:
            run.refuse_all(RejectionReason.JOB_KIND_MISMATCH, message, first.job_id)
            run.move_job(first.job_id, JobState.FAILED, message=message)
            continue
        limit = _row_length(run, first)
        shadow = run.state.shadow_of is not None
        judged = [
            (waiting, judge(run.state.settings, run.state.policy_version, waiting.group, limit, shadow=shadow)) for waiting in first.groups
        ]
        refused = [(waiting, verdict.refusal) for waiting, verdict in judged if verdict.refusal is not None]
        if not refused:
            return replace(
                first,
                groups=tuple(replace(waiting, group=verdict.group) for waiting, verdict in judged),
                lost=tuple(Lost(waiting=waiting, members=verdict.lost) for waiting, verdict in judged if verdict.lost),
            )
        for waiting, refusal in refused:
            run.refuse(
                offset=waiting.offset,
                group_id=waiting.group.group_id,
                job_id=waiting.job_id,
                reason=refusal.reason,
                detail=refusal.detail,
                trajectory=refusal.trajectory,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What may train of a group now."""

    group: TokenizedGroup
    """Without the lost members."""
    lost: tuple[RejectedTrajectory, ...] = ()
    refusal: GroupRefusal | None = None
    """Why nothing may."""


def judge(settings: ModelSettings, version: int, group: TokenizedGroup, limit: int | None = None, *, shadow: bool = False) -> Verdict:
    """Which members train now, and whether the rest is enough for the model's policy.

    Args:
        settings: The model's policy.
        version: That the step starts from.
        group: As it waits.
        limit: Tokens of the longest sequence, where the job has a limit of its own.
        shadow: The versions that the group says are another model's: they are left out, and no lag is known (rule 18).
    """
    if shadow:
        group = _without_versions(group)
    kept: list[TokenizedTrajectory] = []
    lost: list[RejectedTrajectory] = []
    for index, trajectory in zip(group.indices, group.trajectories, strict=True):
        try:
            _check_versions(settings.max_policy_lag, version, trajectory)
            kept.append(trajectory if limit is None else _within(settings.batch, group, trajectory, limit))
        except _UnfitError as error:
            lost.append(RejectedTrajectory(index=index, reason=error.reason, detail=f"trajectories[{index}]: {error}"))
    if not lost and all(now is before for now, before in zip(kept, group.trajectories, strict=True)):
        return Verdict(group=group)
    rejected = sorted((*group.rejected, *lost), key=lambda member: member.index)
    rest = replace(group, trajectories=tuple(kept), rejected=tuple(rejected))
    return Verdict(group=rest, lost=tuple(lost), refusal=refusal_of(rest, settings.batch) if lost else None)


def _without_versions(group: TokenizedGroup) -> TokenizedGroup:
    trajectories = (
        replace(
            trajectory,
            initial_policy_version=None,
            final_policy_version=None,
            sequences=tuple(replace(sequence, policy_versions=None) for sequence in trajectory.sequences),
        )
        for trajectory in group.trajectories
    )
    return replace(group, trajectories=tuple(trajectories))


class _UnfitError(Exception):
    def __init__(self, reason: RejectionReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def _within(policy: BatchPolicy, group: TokenizedGroup, trajectory: TokenizedTrajectory, limit: int) -> TokenizedTrajectory:
    try:
        fitted = fit(trajectory.sequences, limit, truncate=policy.over_long == "truncate" and not group.sft)
    except OverLongError as error:
        raise _UnfitError(RejectionReason.TOO_LONG, f"{error} (the job's packed_sequence_length)") from error
    if fitted.truncated == 0:
        return trajectory
    return replace(trajectory, sequences=fitted.sequences, truncated=max(trajectory.truncated, fitted.truncated))


def _check_versions(limit: int | None, now: int, trajectory: TokenizedTrajectory) -> None:
    initial, final = trajectory.initial_policy_version, trajectory.final_policy_version
    versions = trajectory.policy_versions
    if versions is None:
        return
    if versions[1] > now:
        of_tokens = "" if versions[1] in {initial, final} else " for a token"
        detail = f"it says policy version {versions[1]}{of_tokens}, but the newest that was published is {now}"
        raise _UnfitError(RejectionReason.UNKNOWN_POLICY_VERSION, detail)
    if initial is not None and final is not None and final < initial:
        raise _UnfitError(RejectionReason.UNKNOWN_POLICY_VERSION, f"it ends at version {final}, before it began at {initial}")
    lag = now - versions[0]
    if limit is not None and lag > limit:
        raise _UnfitError(RejectionReason.STALE, f"it is {lag} versions behind ({versions[0]} of {now}); max_policy_lag is {limit}")


def lag_of(version: int, trajectory: TokenizedTrajectory) -> int | None:
    """Versions between the oldest one that sampled a token of it and the one that trains; None where none is said."""
    known = trajectory.policy_versions
    return None if known is None else version - known[0]


def _row_length(run: ModelRun, batch: Batch) -> int | None:
    """What the job itself asks for; the model's own limit held at admission."""
    document = None if batch.job_id is None else run.jobs[batch.job_id].document
    return None if document is None or document.config is None else document.config.packed_sequence_length


def _mismatch(run: ModelRun, batch: Batch) -> str | None:
    """What is wrong where a job's kind is not its groups' purpose."""
    document = run.jobs[str(batch.job_id)].document
    kind = "rl" if document is None else document.kind
    others = [waiting.group.group_id for waiting in batch.groups if waiting.group.sft != (kind == "sft")]
    if not others:
        return None
    names = ", ".join(others[:_NAMED]) + (", …" if len(others) > _NAMED else "")
    purpose = "rl" if kind == "sft" else "sft"
    return f"the job is of kind {kind!r}, but {len(others)} of its {len(batch.groups)} groups are of purpose {purpose!r}: {names}"


def _intended(run: ModelRun, nodes: int) -> Batch | None:
    """The batch that an intent names, as it was cut: by a clock, or before a worker's end (rules 9 and 10)."""
    intent = run.intent
    if intent is None or intent.step != run.state.policy_version + 1:
        return None
    if intent.job_id is not None:
        job = run.jobs.get(intent.job_id)
        return None if job is None else job_batch(run, job, nodes)
    groups = tuple(run.waiting[offset] for offset in intent.offsets if offset in run.waiting)
    if len(groups) != len(intent.offsets):
        return None
    return Batch(groups=groups, job_id=None, cut=intent.cut, completed_at=max(intent.offsets))


def stream_batch(run: ModelRun, without: frozenset[int] = frozenset()) -> Batch | None:
    """The stream's bucket, if it is complete, before anybody judges its groups; `without` the groups at these offsets."""
    policy = run.state.settings.batch
    chosen: list[Waiting] = []
    tokens = 0
    for waiting in run.waiting.values():
        if waiting.job_id is not None or waiting.offset in without:
            continue
        chosen.append(waiting)
        tokens += waiting.group.tokens
        full = len(chosen) >= policy.groups_per_step
        if full or (policy.max_tokens_per_step is not None and tokens >= policy.max_tokens_per_step):
            cut = "groups_per_step" if full else "max_tokens_per_step"
            return Batch(groups=tuple(chosen), job_id=None, cut=cut, completed_at=waiting.offset)
    if chosen and run.lingered:
        return Batch(groups=tuple(chosen), job_id=None, cut="linger", completed_at=chosen[-1].offset)
    return None


def job_batch(run: ModelRun, job: OpenJob, nodes: int) -> Batch | None:
    """A job's bucket, if it is complete and a world of so many machines may train it."""
    if job.record_offset is None or not _is_complete(run, job):
        return None
    if job.document is not None and job.document.options.node_count > nodes:
        return None
    groups = tuple(waiting for waiting in run.waiting.values() if waiting.job_id == job.job_id)
    last = max((waiting.offset for waiting in groups), default=0)
    return Batch(groups=groups, job_id=job.job_id, cut="job", completed_at=max(job.record_offset, last))


def _is_complete(run: ModelRun, job: OpenJob) -> bool:
    return not (job.document is not None and job.document.state is JobState.PAUSED) and has_all_groups(run, job)


def short_of_nodes(run: ModelRun, nodes: int) -> dict[str, int]:
    """By id the machines that jobs need which could begin, were there so many."""
    needed = {job_id: job.document.options.node_count for job_id, job in run.jobs.items() if job.document is not None}
    return {job_id: count for job_id, count in needed.items() if count > nodes and _is_complete(run, run.jobs[job_id])}


def has_all_groups(run: ModelRun, job: OpenJob) -> bool:
    """Whether a job's record was read, and each group that it names waits or was refused."""
    if job.record_offset is None:
        return False
    missing = set(job.group_ids) - set(job.refused)
    return not missing or missing <= {waiting.group.group_id for waiting in run.waiting.values() if waiting.job_id == job.job_id}
