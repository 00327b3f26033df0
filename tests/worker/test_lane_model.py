"""What a model's state says at a commit, and what is forgotten after it."""

from dataclasses import replace

import pytest
from tests.worker.test_selection import admit, group, reported, run_of

from headrace.consumers.worker.duplicates import DuplicateWindow
from headrace.consumers.worker.lane import LanePhase, is_transition_valid
from headrace.consumers.worker.lane_model import LaneModel
from headrace.consumers.worker.pending import PendingGroup
from headrace.schemas.events import GroupRejected, JobStateChanged, TrajectoryRejected
from headrace.schemas.jobs import JobState, TrainingJob
from headrace.schemas.reasons import RejectionReason
from headrace.schemas.state import OpenJob
from headrace.schemas.training import TrainConfig
from headrace.trainer.groups import RejectedTrajectory
from headrace.trainer.options import merged_config


def test_the_state_lists_what_waits_and_counts_what_was_refused() -> None:
    run = run_of()
    admit(run, 4)
    admit(run, 6, job_id="j")
    run.reject_group(offset=5, group_id="x", job_id=None, reason=RejectionReason.DUPLICATE, detail="twice")
    state = run.next_change(7).state
    assert [(p.offset, p.job_id) for p in state.pending] == [(4, None), (6, "j")]
    assert state.refusals == {RejectionReason.DUPLICATE: 1}
    assert state.scanned == 7


def test_a_job_does_not_wait_for_a_group_that_another_job_or_the_stream_has() -> None:
    """Its own group sent again is another thing: the first copy is still to train."""
    run = run_of()
    admit(run, 1, job_id="first")
    own = run.waiting[1].group.group_id
    for offset, job_id in ((2, "first"), (3, "second"), (4, "second")):
        run.reject_group(offset=offset, group_id=own, job_id=job_id, reason=RejectionReason.DUPLICATE, detail="twice")
    assert run.jobs.get("first", OpenJob(job_id="first")).refused == ()
    assert run.jobs["second"].refused == (own,)


def test_members_that_were_refused_alone_are_counted_apart_from_groups_and_said_once() -> None:
    run = run_of()
    lost = RejectedTrajectory(index=1, reason=RejectionReason.TOO_LONG, detail="trajectories[1]: long")
    waiting = PendingGroup(offset=3, group=replace(group("g3"), rejected=(lost,)), job_id="j")
    run.admit(waiting)
    assert run.reportable
    (event,) = reported(run, TrajectoryRejected)
    assert (event.group_id, event.job_id, event.offset, event.trajectory, event.detail) == ("g3", "j", 3, 1, "trajectories[1]: long")
    change = run.next_change(4)
    state = change.state
    assert (state.refusals, state.trajectory_refusals) == ({}, {RejectionReason.TOO_LONG: 1})
    assert run.jobs["j"].refused == ()
    run.apply(change)
    assert not run.reportable
    again = LaneModel.from_state(state, DuplicateWindow(100), lane=0)
    again.admit(waiting, report_rejected=3 not in again.recovering)
    assert reported(again, TrajectoryRejected) == []
    assert again.next_change(4).state.trajectory_refusals == {RejectionReason.TOO_LONG: 1}


def test_a_jobs_document_says_which_groups_and_trajectories_it_lost_whenever_its_record_is_read() -> None:
    run = run_of()
    long = RejectedTrajectory(index=1, reason=RejectionReason.TOO_LONG, detail="long " * 200)
    run.reject_group(offset=1, group_id="b", job_id="j", reason=RejectionReason.STALE, detail="old")
    run.admit(PendingGroup(offset=2, group=replace(group("a"), rejected=(long,)), job_id="j"))
    assert [(entry.group_id, entry.group) for entry in run.jobs["j"].rejections.listed] == [("b", None), ("a", None)]
    run.open_job(TrainingJob(job_id="j", group_ids=("a", "b", "c")), offset=3)
    run.reject_group(offset=4, group_id="c", job_id="j", reason=RejectionReason.STALE, detail="older", trajectory=0)
    document = run.jobs["j"].document
    assert document is not None
    rejections = document.rejections
    assert (rejections.groups, rejections.trajectories) == ({RejectionReason.STALE: 2}, {RejectionReason.TOO_LONG: 1})
    listed = [(entry.group_id, entry.group, entry.trajectory, entry.whole_group) for entry in rejections.listed]
    assert listed == [("b", 1, None, True), ("a", 0, 1, False), ("c", 2, 0, True)]
    assert len(rejections.listed[1].detail) == 300
    for offset in range(5, 50):
        run.reject_group(offset=offset, group_id=f"x{offset}", job_id="j", reason=RejectionReason.STALE, detail="old")
    document = run.jobs["j"].document
    assert document is not None
    assert (len(document.rejections.listed), document.rejections.groups) == (20, {RejectionReason.STALE: 47})


def test_what_happens_while_a_commit_is_on_its_way_stays_to_be_said() -> None:
    run = run_of()
    run.reject_group(offset=0, group_id="x", job_id=None, reason=RejectionReason.TOO_LONG, detail="1")
    change = run.next_change(1)
    run.reject_group(offset=1, group_id="y", job_id=None, reason=RejectionReason.TOO_LONG, detail="2")
    run.set_status("deleted", None)
    run.apply(change)
    assert [event.group_id for event in reported(run, GroupRejected)] == ["y"]
    assert run.dirty
    assert run.urgent
    assert run.next_change(2).state.status == "deleted"
    assert run.next_change(2).state.refusals == {RejectionReason.TOO_LONG: 2}


def test_a_job_that_ended_is_closed_and_its_repeated_record_is_dropped() -> None:
    run = run_of()
    record = TrainingJob(job_id="j", group_ids=())
    run.open_job(record, 0)
    run.move_job("j", JobState.RUNNING)
    run.move_job("j", JobState.COMPLETED, step=1)
    assert run.next_change(1).state.closed_jobs == ("j",)
    run.open_job(record, 1)
    assert run.jobs == {}
    assert [event.state for event in reported(run, JobStateChanged)] == [JobState.PENDING, JobState.RUNNING, JobState.COMPLETED]


def test_a_job_can_not_skip_a_state() -> None:
    run = run_of()
    run.open_job(TrainingJob(job_id="j", group_ids=()), 0)
    with pytest.raises(RuntimeError, match="can't go from"):
        run.move_job("j", JobState.COMPLETED)


def test_duplicate_window_a_duplicate_is_an_id_among_the_last_w_admitted() -> None:
    window = DuplicateWindow(2)
    for name in ("a", "b", "b", "c"):
        window.add(name)
    assert [window.contains(name) for name in "abc"] == [False, True, True]
    again = DuplicateWindow(2, window.to_bytes())
    again.add("d")
    assert [again.contains(name) for name in "abcd"] == [False, False, True, True]


def test_a_lane_moves_along_its_allowed_transitions_only() -> None:
    assert is_transition_valid(LanePhase.CLAIMING, LanePhase.SERVING)
    assert not is_transition_valid(LanePhase.FENCED, LanePhase.SERVING), "it is claimed again first"
    assert not any(is_transition_valid(LanePhase.RELEASED, phase) for phase in LanePhase)


def test_a_null_of_the_job_hides_nothing_of_the_model_but_epsilon_high() -> None:
    model = TrainConfig(learning_rate=1e-3, epsilon_high=0.3)
    merged = merged_config(model, TrainConfig(learning_rate=None, ppo=True, epsilon_high=None))
    assert (merged.learning_rate, merged.ppo, merged.epsilon_high) == (1e-3, True, 0.3)
    merged = merged_config(TrainConfig(learning_rate=1e-3), TrainConfig(epsilon_high=None))
    assert "epsilon_high" in merged.model_fields_set
    assert merged.epsilon_high is None


def test_the_job_says_the_loss_by_either_name() -> None:
    assert merged_config(TrainConfig(loss_fn="cispo"), TrainConfig(ppo=True)).ppo is True
    assert merged_config(TrainConfig(ppo=True), TrainConfig(loss_fn="cispo")).loss_fn == "cispo"


def test_jobs_that_name_more_ids_than_a_state_record_holds_fail_with_a_message() -> None:
    run = run_of()
    names = tuple(f"{i:064d}" for i in range(3000))
    admit(run, 7, job_id="does not")
    run.open_job(TrainingJob(job_id="fits", group_ids=names), 0)
    run.open_job(TrainingJob(job_id="does not", group_ids=names), 1)
    assert set(run.jobs) == {"fits"}
    assert reported(run, JobStateChanged)[-1].state is JobState.FAILED
    assert "backlog_full" in (reported(run, JobStateChanged)[-1].message or "")
    assert [(event.group_id, event.reason) for event in reported(run, GroupRejected)] == [("g7", RejectionReason.BACKLOG_FULL)]
    assert run.waiting == {}


def test_refused_groups_of_jobs_that_nobody_opens_do_not_grow_the_state_without_bound() -> None:
    run = run_of()
    for i in range(3000):
        run.reject_group(offset=i, group_id=f"{i:0128d}", job_id=f"job {i}", reason=RejectionReason.TOO_LONG, detail="x")
    assert len(run.next_change(3000).state.model_dump_json()) < 900_000
