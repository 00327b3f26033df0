"""Batch selection is a pure function of the log and the version: order, judging, refilling."""

from dataclasses import replace
from typing import TypeVar

import numpy as np
import pytest

from headrace.consumers.worker.duplicates import DuplicateWindow
from headrace.consumers.worker.lane_model import LaneModel
from headrace.consumers.worker.pending import PendingGroup
from headrace.consumers.worker.selection import judge, select_batch, short_of_nodes
from headrace.schemas.events import GroupRejected, JobStateChanged, TrajectoryRejected
from headrace.schemas.jobs import JobState, TrainingJob
from headrace.schemas.reasons import RejectionReason
from headrace.schemas.state import ModelState
from headrace.schemas.training import BatchPolicy, ModelSettings, SftConfig, TrainConfig
from headrace.trainer.groups import RejectedTrajectory, TokenizedGroup, TokenizedTrajectory, TokenSequence


def sequence(tokens: int = 4) -> TokenSequence:
    trainable = np.zeros(tokens, dtype=np.bool_)
    trainable[1:] = True
    return TokenSequence(token_ids=np.arange(tokens, dtype=np.int32), trainable=trainable, logprobs=np.full(tokens, -0.5, dtype=np.float32))


def group(name: str, *, initial: int | None = None, final: int | None = None, tokens: int = 4) -> TokenizedGroup:
    trajectory = TokenizedTrajectory(reward=1.0, sequences=(sequence(tokens),), initial_policy_version=initial, final_policy_version=final)
    return TokenizedGroup(group_id=name, trajectories=(trajectory,))


def members(name: str, *versions: int | None, sft: bool = False) -> TokenizedGroup:
    """One member for each version, rewards 0, 1, 2…"""
    trajectories = [
        TokenizedTrajectory(reward=float(i), sequences=(sequence(),), initial_policy_version=version, final_policy_version=version)
        for i, version in enumerate(versions)
    ]
    return TokenizedGroup(group_id=name, trajectories=tuple(trajectories), sft=sft)


def run_of(*, version: int = 0, max_policy_lag: int | None = None, **batch: object) -> LaneModel:
    settings = ModelSettings(
        base_model="tiny", max_policy_lag=max_policy_lag, batch=BatchPolicy.model_validate({"groups_per_step": 2, **batch})
    )
    state = ModelState(
        model_id="m",
        incarnation="i",
        account="a",
        project="p",
        name="n",
        worker_group="default",
        settings=settings,
        scanned=0,
        policy_version=version,
    )
    return LaneModel.from_state(state, DuplicateWindow(100), lane=0)


def admit(run: LaneModel, offset: int, *, job_id: str | None = None, **what: object) -> None:
    run.admit(PendingGroup(offset=offset, group=group(f"g{offset}", **what), job_id=job_id))  # type: ignore[arg-type]


E = TypeVar("E")


def reported(run: LaneModel, kind: type[E]) -> list[E]:
    """The events of a kind that the next commit reports."""
    return [event for event in run.events if isinstance(event, kind)]


def offsets(run: LaneModel) -> list[int] | None:
    batch = select_batch(run)
    return None if batch is None else [waiting.offset for waiting in batch.groups]


def test_the_stream_is_complete_with_groups_per_step() -> None:
    run = run_of()
    admit(run, 3)
    assert offsets(run) is None
    admit(run, 7)
    admit(run, 9)
    assert offsets(run) == [3, 7]


def test_a_job_that_needs_more_machines_is_passed_by_and_keeps_its_place() -> None:
    run = run_of()
    admit(run, 0, job_id="large")
    run.open_job(TrainingJob(job_id="large", group_ids=("g0",), node_count=2), 1)
    admit(run, 2)
    admit(run, 3)
    assert offsets(run) == [2, 3]
    first = select_batch(run, nodes=2)
    assert first is not None
    assert first.job_id == "large"
    assert (short_of_nodes(run, 1), short_of_nodes(run, 2)) == ({"large": 2}, {})


def test_the_stream_is_complete_with_max_tokens_per_step() -> None:
    run = run_of(groups_per_step=100, max_tokens_per_step=10)
    admit(run, 0, tokens=6)
    assert offsets(run) is None
    admit(run, 1, tokens=4)
    batch = select_batch(run)
    assert batch is not None
    assert (batch.cut, [w.offset for w in batch.groups]) == ("max_tokens_per_step", [0, 1])


def test_scanned_and_pending_a_job_that_waits_for_its_groups_holds_neither_the_stream_nor_another_job() -> None:
    run = run_of()
    admit(run, 0, job_id="a")
    admit(run, 1)
    admit(run, 2, job_id="b")
    run.open_job(TrainingJob(job_id="b", group_ids=("g2",)), 3)
    assert offsets(run) == [2]
    run.open_job(TrainingJob(job_id="a", group_ids=("g0", "never sent")), 4)
    assert offsets(run) == [2]


def test_steps_run_in_the_order_of_the_record_that_completed_their_bucket() -> None:
    run = run_of()
    admit(run, 0, job_id="a")
    admit(run, 1)
    admit(run, 2)  # completes the stream
    run.open_job(TrainingJob(job_id="a", group_ids=("g0",)), 3)  # completes the job
    batch = select_batch(run)
    assert batch is not None
    assert batch.job_id is None
    for waiting in batch.groups:
        del run.waiting[waiting.offset]
    batch = select_batch(run)
    assert batch is not None
    assert batch.job_id == "a"


def test_a_refused_group_is_no_longer_waited_for() -> None:
    run = run_of()
    admit(run, 0, job_id="a")
    run.reject_group(offset=1, group_id="g1", job_id="a", reason=RejectionReason.TOO_LONG, detail="x")
    run.open_job(TrainingJob(job_id="a", group_ids=("g0", "g1")), 2)
    assert offsets(run) == [0]


def test_a_job_whose_groups_are_all_refused_still_gets_its_step() -> None:
    run = run_of()
    run.reject_group(offset=0, group_id="g0", job_id="a", reason=RejectionReason.TOO_LONG, detail="x")
    run.open_job(TrainingJob(job_id="a", group_ids=("g0",)), 1)
    assert offsets(run) == []
    assert run.jobs["a"].document is not None
    assert run.jobs["a"].document.state is JobState.PENDING


def test_a_stale_group_is_refused_at_the_cut_and_the_next_one_takes_its_place() -> None:
    run = run_of(version=5, max_policy_lag=2)
    admit(run, 0, initial=2, final=5)
    admit(run, 1, initial=3, final=3)
    assert offsets(run) is None
    assert [(event.group_id, event.reason) for event in reported(run, GroupRejected)] == [("g0", RejectionReason.STALE)]
    assert reported(run, GroupRejected)[0].detail == "trajectories[0]: it is 3 versions behind (2 of 5); max_policy_lag is 2"
    admit(run, 2, initial=5, final=5)
    assert offsets(run) == [1, 2]


@pytest.mark.parametrize(
    ("initial", "final", "reason"),
    [
        (None, None, None),
        (0, 3, None),
        (None, 3, None),
        (3, 4, RejectionReason.UNKNOWN_POLICY_VERSION),
        (4, None, RejectionReason.UNKNOWN_POLICY_VERSION),
        (3, 1, RejectionReason.UNKNOWN_POLICY_VERSION),
    ],
)
def test_a_version_that_was_never_published_is_refused(initial: int | None, final: int | None, reason: RejectionReason | None) -> None:
    refusal = judge(run_of(version=3).state.settings, 3, group("g", initial=initial, final=final)).refusal
    assert (None if refusal is None else refusal.reason) == reason


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        ([-1, 3, 3, 5], None),
        ([-1, 4, 2, 5], RejectionReason.STALE),
        ([-1, 5, -1, 6], RejectionReason.UNKNOWN_POLICY_VERSION),
        ([9, -1, -1, -1], None),  # of a token that was not sampled
    ],
)
@pytest.mark.parametrize("initial", [5, None])
def test_the_versions_of_tokens_are_judged_like_that_of_the_rollout(
    initial: int | None, tokens: list[int], reason: RejectionReason | None
) -> None:
    """By the oldest for `max_policy_lag`, by the newest for what was never published; -1 is unknown."""
    made = replace(sequence(), policy_versions=np.array(tokens, np.int32))
    member = TokenizedTrajectory(reward=1.0, sequences=(sequence(), made), initial_policy_version=initial, final_policy_version=initial)
    one = TokenizedGroup(group_id="g", trajectories=(member,))
    refusal = judge(run_of(version=5, max_policy_lag=2).state.settings, 5, one).refusal
    assert (None if refusal is None else refusal.reason) == reason


def test_nothing_is_cut_while_pending_groups_of_the_committed_state_are_read_again() -> None:
    run = run_of()
    run.recovering = frozenset({1})
    admit(run, 0)
    admit(run, 2)
    assert offsets(run) is None
    run.recovering = frozenset()
    assert offsets(run) == [0, 2]


def wait(run: LaneModel, offset: int, group: TokenizedGroup, job_id: str | None = None) -> None:
    run.admit(PendingGroup(offset=offset, group=group, job_id=job_id))


def test_a_stale_member_is_lost_alone_and_its_group_keeps_its_place() -> None:
    run = run_of(version=5, max_policy_lag=2)
    wait(run, 0, members("g0", 2, 5, 4))
    wait(run, 1, members("g1", 5, 5))
    wait(run, 2, members("g2", 5, 5))
    batch = select_batch(run)
    assert batch is not None
    assert [w.offset for w in batch.groups] == [0, 1]
    assert [t.reward for t in batch.groups[0].group.trajectories] == [1.0, 2.0]
    assert batch.groups[0].group.indices == [1, 2]
    ((lost,),) = [entry.members for entry in batch.lost]
    assert (lost.index, lost.reason) == (0, RejectionReason.STALE)
    assert lost.detail == "trajectories[0]: it is 3 versions behind (2 of 5); max_policy_lag is 2"


def test_members_lost_at_the_cut_are_said_with_the_step_and_not_before() -> None:
    """The group is pending until then: a crash brings it back, to be judged again."""
    run = run_of(version=5, max_policy_lag=2)
    wait(run, 0, members("g0", 2, 5))
    wait(run, 1, members("g1", 5, 5))
    first, second = select_batch(run), select_batch(run)
    assert first is not None
    assert second is not None
    assert (reported(run, GroupRejected), reported(run, TrajectoryRejected)) == ([], [])
    assert [w.group.indices for w in first.groups] == [w.group.indices for w in second.groups]
    assert len(run.waiting[0].group.trajectories) == 2
    for lost in first.lost:
        run.reject_members(lost.waiting, lost.members)
    (event,) = reported(run, TrajectoryRejected)
    assert (event.group_id, event.offset, event.trajectory, event.reason) == ("g0", 0, 0, RejectionReason.STALE)


@pytest.mark.parametrize(
    ("policy", "size", "reason"),
    [
        ("partial", None, None),
        ("minimum", 1, None),
        ("minimum", 2, RejectionReason.INCOMPLETE_GROUP),
        ("complete", None, RejectionReason.INCOMPLETE_GROUP),
    ],
)
def test_the_policy_for_incomplete_groups_holds_at_the_cut_too(policy: str, size: int | None, reason: RejectionReason | None) -> None:
    run = run_of(version=5, max_policy_lag=2, incomplete_groups=policy, minimum_group_size=size)
    refusal = judge(run.state.settings, run.state.policy_version, members("g", 0, 5)).refusal
    assert (None if refusal is None else refusal.reason) == reason
    if refusal is not None:
        assert "trajectories[0] stale" in refusal.detail


def test_a_group_whose_members_are_all_unfit_is_refused_with_the_first_ones_reason() -> None:
    refusal = judge(run_of(version=5, max_policy_lag=2).state.settings, 5, members("g", 9, 1)).refusal
    assert refusal is not None
    assert (refusal.reason, refusal.trajectory) == (RejectionReason.UNKNOWN_POLICY_VERSION, 0)


def test_a_member_that_was_lost_at_admission_counts_at_the_cut_and_indices_stay_those_that_were_sent() -> None:
    run = run_of(version=5, max_policy_lag=2, incomplete_groups="minimum", minimum_group_size=2)
    early = RejectedTrajectory(index=1, reason=RejectionReason.TOO_LONG, detail="trajectories[1]: long")
    group = replace(members("g", 5, 5, 0), rejected=(early,))
    verdict = judge(run.state.settings, run.state.policy_version, group)
    assert [member.index for member in verdict.lost] == [3]
    assert [member.index for member in verdict.group.rejected] == [1, 3]
    assert (verdict.group.indices, verdict.refusal) == ([0, 2], None)


def test_examples_have_no_lag() -> None:
    run = run_of(version=5, max_policy_lag=0)
    assert judge(run.state.settings, run.state.policy_version, members("g", None, None, sft=True)).lost == ()


@pytest.mark.parametrize(
    ("kind", "purposes"), [("sft", (True, False)), ("rl", (False, True)), ("sft", (False, False)), ("rl", (True, True))]
)
def test_a_job_of_another_kind_than_its_groups_fails_and_nothing_of_it_trains(kind: str, purposes: tuple[bool, bool]) -> None:
    run = run_of()
    for i, sft in enumerate(purposes):
        wait(run, i, members(f"g{i}", 0, 0, sft=sft), job_id="j")
    run.open_job(TrainingJob.model_validate({"job_id": "j", "group_ids": ("g0", "g1"), "kind": kind}), 2)
    wait(run, 3, members("s0", 0, 0))
    wait(run, 4, members("s1", 0, 0))
    assert offsets(run) == [3, 4]
    assert [event.reason for event in reported(run, GroupRejected)] == [RejectionReason.JOB_KIND_MISMATCH] * 2
    failed = reported(run, JobStateChanged)[-1]
    assert failed.state is JobState.FAILED
    other = "rl" if kind == "sft" else "sft"
    n = purposes.count(kind != "sft")
    assert (failed.message or "").startswith(f"the job is of kind '{kind}', but {n} of its 2 groups are of purpose '{other}': g")
    assert run.documents["j"].groups_rejected == 2
    assert run.draft.closed_jobs == ("j",)


def test_a_job_of_examples_is_cut_like_any_other_and_its_document_says_what_it_is() -> None:
    run = run_of(zero_variance="refuse", incomplete_groups="complete")
    wait(run, 0, members("g0", None, sft=True), job_id="j")
    run.open_job(TrainingJob(job_id="j", group_ids=("g0",), kind="sft", sft=SftConfig(epochs=3)), 1)
    assert offsets(run) == [0]
    document = run.jobs["j"].document
    assert document is not None
    assert (document.kind, document.sft) == ("sft", SftConfig(epochs=3))


@pytest.mark.parametrize("policy", ["drop", "truncate"])
def test_a_jobs_own_row_length_is_known_at_the_cut_only(policy: str) -> None:
    run = run_of(over_long=policy)
    long = members("long", None, None)
    long = replace(long, trajectories=(long.trajectories[0], replace(long.trajectories[1], sequences=(sequence(12),))))
    wait(run, 0, long, job_id="j")
    run.open_job(TrainingJob(job_id="j", group_ids=("long",), config=TrainConfig(packed_sequence_length=8)), 1)
    batch = select_batch(run)
    assert batch is not None
    ((group, lost),) = [(w.group, batch.lost) for w in batch.groups]
    if policy == "drop":
        assert [(m.index, m.reason) for m in lost[0].members] == [(1, RejectionReason.TOO_LONG)]
        assert lost[0].members[0].detail.endswith("a sequence of 12 tokens, at most 8 are trained on (the job's packed_sequence_length)")
        assert group.indices == [0]
    else:
        assert lost == ()
        assert [len(t.sequences[0]) for t in group.trajectories] == [4, 8]
        assert group.truncated == 1
