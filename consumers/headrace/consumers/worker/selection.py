"""Batch selection: which groups make the next step of a model, and which make the step after it.

A bucket is complete by its policy: a job's with its full set of groups, the stream's with `groups_per_step` groups or `max_tokens_per_step`
tokens. Steps run in the order of the log record that completed their bucket. Lag, versions and a job's own row length are judged here, at
the version that the step starts from, for each trajectory alone. The model's policy decides about the rest of its group.

Guarantees: `select_batch` is a pure function of the log, of the model's committed version and of its intent. A clock's decision (a linger)
is committed as an intent before its step runs, and an owner that finds an intent obeys it (the intent-first invariant). A rejected group
leaves its place to the next group of its bucket; a group that lost members keeps its place. The transaction of the step reports lost
members: reported earlier, they would be reported again after a crash, because the group is still pending. A job whose kind differs from
that of its groups fails. A job that needs more machines than there are keeps its place, and the buckets behind it are selected.
`select_following` changes nothing. It gives what `select_batch` will give when the current step is committed, unless a command or a clock
comes in between. Limitations: only stream batches without a linger follow, because other steps need an intent first.
"""

from dataclasses import dataclass, replace

from headrace.consumers.worker.lane_model import LaneModel
from headrace.consumers.worker.pending import PendingGroup
from headrace.schemas.jobs import JobState
from headrace.schemas.reasons import RejectionReason
from headrace.schemas.state import OpenJob
from headrace.schemas.training import BatchPolicy, ModelSettings
from headrace.trainer.group_policy import GroupRefusal, refusal_of
from headrace.trainer.groups import RejectedTrajectory, TokenizedGroup, TokenizedTrajectory
from headrace.trainer.lengths import OverLongError, fit

_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LostMembers:
    """Members of a group that trains without them."""

    waiting: PendingGroup
    members: tuple[RejectedTrajectory, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The groups of one step."""

    groups: tuple[PendingGroup, ...]
    job_id: str | None
    cut: str
    """`groups_per_step`, `max_tokens_per_step`, `linger` or `job`."""
    completed_at: int
    """Offset of the record that completed the bucket: the order of steps."""
    lost: tuple[LostMembers, ...] = ()
    """Members whose versions do not let them train now; `groups` are without them."""

    @property
    def offsets(self) -> tuple[int, ...]:
        """Of its groups."""
        return tuple(waiting.offset for waiting in self.groups)


def select_batch(model: LaneModel, nodes: int = 1) -> Batch | None:
    """The batch whose bucket was completed first, judged at the model's version; None while no bucket is complete."""
    if not model.trains or model.restarts:
        # Before a selection, pending groups must be back in their buckets, and a restart comes first.
        return None
    while True:
        first = _intended(model, nodes)
        if first is None:
            buckets = (stream_batch(model), *(job_batch(model, job, nodes) for job in model.jobs.values()))
            complete = [batch for batch in buckets if batch is not None]
            if not complete:
                return None
            first = min(complete, key=lambda batch: batch.completed_at)
        if first.job_id is not None and (message := _mismatch(model, first)) is not None:
            model.reject_all(RejectionReason.JOB_KIND_MISMATCH, message, first.job_id)
            model.move_job(first.job_id, JobState.FAILED, message=message)
            continue
        limit = _row_length(model, first)
        shadow = model.state.shadow_of is not None
        judged = [
            (waiting, judge(model.state.settings, model.state.policy_version, waiting.group, limit, shadow=shadow))
            for waiting in first.groups
        ]
        refused = [(waiting, verdict.refusal) for waiting, verdict in judged if verdict.refusal is not None]
        if not refused:
            return replace(
                first,
                groups=tuple(replace(waiting, group=verdict.group) for waiting, verdict in judged),
                lost=tuple(LostMembers(waiting=waiting, members=verdict.lost) for waiting, verdict in judged if verdict.lost),
            )
        for waiting, refusal in refused:
            model.reject_waiting(waiting, refusal.reason, refusal.detail, refusal.trajectory)


def select_following(model: LaneModel, current: Batch, nodes: int) -> Batch | None:
    """The model's next batch if `current` is committed as the next version; None if that can't be known yet."""
    if not model.trains or model.restarts or model.linger_over:
        return None
    batch = stream_batch(model, without=frozenset(current.offsets))
    if batch is None:
        return None
    jobs = (job_batch(model, job, nodes) for job in model.jobs.values() if job.job_id != current.job_id)
    if any(job is not None and job.completed_at < batch.completed_at for job in jobs):
        return None
    version, shadow = model.state.policy_version + 1, model.state.shadow_of is not None
    # A batch whose members change at the next version waits for its own selection.
    unchanged = all(judge(model.state.settings, version, waiting.group, shadow=shadow).group is waiting.group for waiting in batch.groups)
    return batch if unchanged else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The part of a group that may train now."""

    group: TokenizedGroup
    """Without the lost members."""
    lost: tuple[RejectedTrajectory, ...] = ()
    refusal: GroupRefusal | None = None
    """Why no part may."""


def judge(settings: ModelSettings, version: int, group: TokenizedGroup, limit: int | None = None, *, shadow: bool = False) -> Verdict:
    """Which members train now, and whether the rest is enough for the model's policy.

    Args:
        settings: The model's policy.
        version: That the step starts from.
        group: As it waits.
        limit: Tokens of the longest sequence, where the job has a limit of its own.
        shadow: The group's versions are those of another model: they are removed, and no lag is known.
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
    """Versions between the oldest one that sampled a token of it and the one that trains; None if neither is known."""
    known = trajectory.policy_versions
    return None if known is None else version - known[0]


def _row_length(model: LaneModel, batch: Batch) -> int | None:
    """The row length that the job asks for; admission checked the model's own limit."""
    document = None if batch.job_id is None else model.jobs[batch.job_id].document
    return None if document is None or document.config is None else document.config.packed_sequence_length


def _mismatch(model: LaneModel, batch: Batch) -> str | None:
    """What is wrong if a job's kind is not the purpose of its groups."""
    document = model.jobs[str(batch.job_id)].document
    kind = "rl" if document is None else document.kind
    others = [waiting.group.group_id for waiting in batch.groups if waiting.group.sft != (kind == "sft")]
    if not others:
        return None
    names = ", ".join(others[:_NAMED]) + (", …" if len(others) > _NAMED else "")
    purpose = "rl" if kind == "sft" else "sft"
    return f"the job is of kind {kind!r}, but {len(others)} of its {len(batch.groups)} groups are of purpose {purpose!r}: {names}"


def _intended(model: LaneModel, nodes: int) -> Batch | None:
    """The batch of an intent, as it was selected: by a clock, or before a worker ended."""
    intent = model.intent
    if intent is None or intent.step != model.state.policy_version + 1:
        return None
    if intent.job_id is not None:
        job = model.jobs.get(intent.job_id)
        return None if job is None else job_batch(model, job, nodes)
    groups = tuple(model.waiting[offset] for offset in intent.offsets if offset in model.waiting)
    if len(groups) != len(intent.offsets):
        return None
    return Batch(groups=groups, job_id=None, cut=intent.cut, completed_at=max(intent.offsets))


def stream_batch(model: LaneModel, without: frozenset[int] = frozenset()) -> Batch | None:
    """The stream's bucket, if it is complete, before its groups are judged; `without` the groups at these offsets."""
    policy = model.state.settings.batch
    chosen: list[PendingGroup] = []
    tokens = 0
    for waiting in model.waiting.values():
        if waiting.job_id is not None or waiting.offset in without:
            continue
        chosen.append(waiting)
        tokens += waiting.group.tokens
        full = len(chosen) >= policy.groups_per_step
        if full or (policy.max_tokens_per_step is not None and tokens >= policy.max_tokens_per_step):
            cut = "groups_per_step" if full else "max_tokens_per_step"
            return Batch(groups=tuple(chosen), job_id=None, cut=cut, completed_at=waiting.offset)
    if chosen and model.linger_over:
        return Batch(groups=tuple(chosen), job_id=None, cut="linger", completed_at=chosen[-1].offset)
    return None


def job_batch(model: LaneModel, job: OpenJob, nodes: int) -> Batch | None:
    """A job's bucket, if it is complete and a world of so many machines may train it."""
    if job.record_offset is None or not _is_complete(model, job):
        return None
    if job.document is not None and job.document.options.node_count > nodes:
        return None
    groups = tuple(waiting for waiting in model.waiting.values() if waiting.job_id == job.job_id)
    last = max((waiting.offset for waiting in groups), default=0)
    return Batch(groups=groups, job_id=job.job_id, cut="job", completed_at=max(job.record_offset, last))


def _is_complete(model: LaneModel, job: OpenJob) -> bool:
    return not (job.document is not None and job.document.state is JobState.PAUSED) and has_all_groups(model, job)


def short_of_nodes(model: LaneModel, nodes: int) -> dict[str, int]:
    """By id, the machines that complete jobs need if they need more than `nodes`."""
    needed = {job_id: job.document.options.node_count for job_id, job in model.jobs.items() if job.document is not None}
    return {job_id: count for job_id, count in needed.items() if count > nodes and _is_complete(model, model.jobs[job_id])}


def has_all_groups(model: LaneModel, job: OpenJob) -> bool:
    """Whether a job's record was read, and each group that it names waits or was refused."""
    if job.record_offset is None:
        return False
    missing = set(job.group_ids) - set(job.refused)
    return not missing or missing <= {waiting.group.group_id for waiting in model.waiting.values() if waiting.job_id == job.job_id}
