"""The cut is a pure function of the log and the version: order, judging, refilling."""

import numpy as np
import pytest

from headrace.consumers.cut import judge, next_batch
from headrace.consumers.duplicates import DuplicateWindow
from headrace.consumers.model_run import ModelRun, Waiting
from headrace.schemas.jobs import JobState, TrainingJob
from headrace.schemas.reasons import RejectionReason
from headrace.schemas.state import ModelState
from headrace.schemas.training import BatchPolicy, ModelSettings
from headrace.trainer.groups import TokenizedGroup, TokenizedTrajectory, TokenSequence


def sequence(tokens: int = 4) -> TokenSequence:
    trainable = np.zeros(tokens, dtype=np.bool_)
    trainable[1:] = True
    return TokenSequence(token_ids=np.arange(tokens, dtype=np.int32), trainable=trainable, logprobs=np.full(tokens, -0.5, dtype=np.float32))


def group(name: str, *, initial: int | None = None, final: int | None = None, tokens: int = 4) -> TokenizedGroup:
    trajectory = TokenizedTrajectory(reward=1.0, sequences=(sequence(tokens),), initial_policy_version=initial, final_policy_version=final)
    return TokenizedGroup(group_id=name, trajectories=(trajectory,))


def run_of(*, version: int = 0, max_policy_lag: int | None = None, **batch: object) -> ModelRun:
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
    return ModelRun.of(state, DuplicateWindow(100), lane=0)


def admit(run: ModelRun, offset: int, *, job_id: str | None = None, **what: object) -> None:
    run.admit(Waiting(offset=offset, group=group(f"g{offset}", **what), job_id=job_id))  # type: ignore[arg-type]


def offsets(run: ModelRun) -> list[int] | None:
    batch = next_batch(run)
    return None if batch is None else [waiting.offset for waiting in batch.groups]


def test_the_stream_is_complete_with_groups_per_step() -> None:
    run = run_of()
    admit(run, 3)
    assert offsets(run) is None
    admit(run, 7)
    admit(run, 9)
    assert offsets(run) == [3, 7]


def test_the_stream_is_complete_with_max_tokens_per_step() -> None:
    run = run_of(groups_per_step=100, max_tokens_per_step=10)
    admit(run, 0, tokens=6)
    assert offsets(run) is None
    admit(run, 1, tokens=4)
    batch = next_batch(run)
    assert batch is not None
    assert (batch.cut, [w.offset for w in batch.groups]) == ("max_tokens_per_step", [0, 1])


def test_rule_07_a_job_that_waits_for_its_groups_holds_neither_the_stream_nor_another_job() -> None:
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
    batch = next_batch(run)
    assert batch is not None
    assert batch.job_id is None
    for waiting in batch.groups:
        del run.waiting[waiting.offset]
    batch = next_batch(run)
    assert batch is not None
    assert batch.job_id == "a"


def test_a_refused_group_is_no_longer_waited_for() -> None:
    run = run_of()
    admit(run, 0, job_id="a")
    run.refuse(offset=1, group_id="g1", job_id="a", reason=RejectionReason.TOO_LONG, detail="x")
    run.open_job(TrainingJob(job_id="a", group_ids=("g0", "g1")), 2)
    assert offsets(run) == [0]


def test_a_job_whose_groups_are_all_refused_still_gets_its_step() -> None:
    run = run_of()
    run.refuse(offset=0, group_id="g0", job_id="a", reason=RejectionReason.TOO_LONG, detail="x")
    run.open_job(TrainingJob(job_id="a", group_ids=("g0",)), 1)
    assert offsets(run) == []
    assert run.jobs["a"].document is not None
    assert run.jobs["a"].document.state is JobState.PENDING


def test_a_stale_group_is_refused_at_the_cut_and_the_next_one_takes_its_place() -> None:
    run = run_of(version=5, max_policy_lag=2)
    admit(run, 0, initial=2, final=5)
    admit(run, 1, initial=3, final=3)
    assert offsets(run) is None
    assert [(event.group_id, event.reason) for event in run.rejected] == [("g0", RejectionReason.STALE)]
    assert run.rejected[0].detail == "trajectories[0]: it is 3 versions behind (2 of 5); max_policy_lag is 2"
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
    refusal = judge(run_of(version=3), group("g", initial=initial, final=final)).refusal
    assert (None if refusal is None else refusal.reason) == reason


def test_nothing_is_cut_while_pending_groups_of_the_committed_state_are_read_again() -> None:
    run = run_of()
    run.recovering = frozenset({1})
    admit(run, 0)
    admit(run, 2)
    assert offsets(run) is None
    run.recovering = frozenset()
    assert offsets(run) == [0, 2]
