"""The step after the one that is stored and committed: begun while that is under way, and used only if it is what comes next."""

import asyncio
import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from aiokafka.errors import KafkaConnectionError
from tests.worker.groups import group
from tests.worker.stage import SOON, Commit, Owner, Stage, offsets_of, until
from tests.worker.test_selection import admit, members, run_of

from headrace.consumers.worker.pending import PendingGroup
from headrace.consumers.worker.pipeline import Pipeline, PreparedPhase, is_transition_valid
from headrace.consumers.worker.selection import select_batch, select_following
from headrace.consumers.worker.storage.step_files import StoredStep, store_step
from headrace.consumers.worker.world import Turn
from headrace.core.store import ObjectStore
from headrace.schemas.commands import DeleteModel
from headrace.schemas.jobs import TrainingJob
from headrace.schemas.reasons import RejectionReason
from headrace.schemas.state import StepRecord
from headrace.schemas.weights import WeightsPublished, WeightsRef
from headrace.trainer.plan import StepPlan, StepResult

staged = pytest.mark.asyncio(loop_scope="session")


@contextmanager
def ran(stage: Stage) -> Iterator[list[StepPlan]]:
    """The plans that the world was asked to run."""
    plans: list[StepPlan] = []
    run = stage.world.run

    async def noting(plan: StepPlan, snapshot: object, turn: Turn | None = None) -> StepResult:
        plans.append(plan)
        return await run(plan, snapshot, turn)  # type: ignore[arg-type]

    with mock.patch.object(stage.world, "run", noting):
        yield plans


async def a_plan(stage: Stage) -> StepPlan:
    """One that a lane has run, the first of its model."""
    lane = stage.free_lane()
    model = await stage.model(lane)
    with ran(stage) as plans:
        async with stage.seen(model) as seen, stage.owner(lane):
            await stage.send(model, *(group(f"g{i}", seed=i, version=None) for i in range(2)))
            await seen.until(StepRecord, 1)
    return plans[0]


async def ahead_has_run(owner: Owner) -> None:
    """The step after the one whose commit waits for this has run."""

    def happened() -> bool:
        begun = owner.lane.tools.pipeline.prepared
        return begun is not None and begun.task.done()

    await until(happened)


@staged
async def test_the_next_step_runs_while_this_one_waits_for_its_commit_and_is_not_run_again(stage: Stage) -> None:
    lane = stage.free_lane()
    model = await stage.model(lane)

    async def hold_the_first(commit: Commit) -> dict[str, int]:
        if commit.of(StepRecord, lambda record: record.step == 1):
            await ahead_has_run(commit.owner)
        return await commit.go()

    with ran(stage) as plans:
        async with stage.seen(model) as seen, stage.owner(lane, hold_the_first):
            sent = await stage.send(model, *(group(f"g{i}", seed=i, version=None) for i in range(4)))
            first, second = await seen.until(StepRecord, 2)
            await seen.until(WeightsPublished, 2)
        assert [plan.attempt for plan in plans] == [first.attempt, second.attempt]
        assert (offsets_of(first), offsets_of(second)) == (sent[:2], sent[2:])
        assert (second.attempt_before, second.scalars_before) == (first.attempt, first.scalars)
        # Whoever comes next runs both again, from the ledger alone: a digest that differs would stop the model.
        async with stage.seen(model) as seen, stage.owner(lane):
            await stage.send(model, *(group(f"h{i}", seed=i, version=None) for i in range(2)))
            (third,) = [record for record in await seen.until(StepRecord, 3) if record.step == 3]
    assert third.attempt_before == second.attempt


@staged
async def test_committed_state_only_a_step_that_was_begun_ahead_of_a_commit_that_failed_is_not_gone_on_from(stage: Stage) -> None:
    lane = stage.free_lane()
    model = await stage.model(lane)
    lost: list[StepRecord] = []

    async def fail_the_first(commit: Commit) -> dict[str, int]:
        if (steps := commit.of(StepRecord)) and not lost:
            lost.extend(steps)
            await ahead_has_run(commit.owner)
            raise KafkaConnectionError("it never reached the broker")
        return await commit.go()

    with ran(stage) as plans:
        async with stage.seen(model) as seen, stage.owner(lane, fail_the_first):
            sent = await stage.send(model, *(group(f"g{i}", seed=i, version=None) for i in range(4)))
            first, second = await seen.until(StepRecord, 2)
    before, dropped = plans[:2]
    assert (before.attempt, dropped.state.attempt) == (lost[0].attempt, lost[0].attempt)
    assert {first.attempt, second.attempt}.isdisjoint({before.attempt, dropped.attempt})
    assert (offsets_of(first), offsets_of(second)) == (sent[:2], sent[2:])
    assert (first.weights.digest, first.plan_digest) == (lost[0].weights.digest, lost[0].plan_digest)
    assert second.attempt_before == first.attempt


@staged
async def test_a_group_that_goes_meanwhile_takes_what_was_begun_on_it_along(stage: Stage) -> None:
    lane = stage.free_lane()
    model = await stage.model(lane)

    async def expire_the_third(commit: Commit) -> dict[str, int]:
        written = await commit.go()
        if commit.of(StepRecord, lambda record: record.step == 1):
            await ahead_has_run(commit.owner)
            run = stage.run_of(commit.owner, model)
            run.reject_group(offset=sent[2], group_id="g2", job_id=None, reason=RejectionReason.EXPIRED, detail="its time is over")
        return written

    with ran(stage) as plans:
        async with stage.seen(model) as seen:
            sent = await stage.send(model, *(group(f"g{i}", seed=i, version=None) for i in range(5)))
            async with stage.owner(lane, expire_the_third):
                first, second = await seen.until(StepRecord, 2)
    assert plans[1].state.attempt == first.attempt, "it was begun"
    assert second.attempt != plans[1].attempt, "and is not what was committed"
    assert offsets_of(second) == sent[3:]
    # From the ledger alone it comes out as it did: it began from the first step, not from what was begun ahead.
    async with stage.seen(model) as seen, stage.owner(lane):
        await stage.send(model, *(group(f"h{i}", seed=i, version=None) for i in range(2)))
        assert [record.step for record in await seen.until(StepRecord, 3)] == [1, 2, 3]


@staged
async def test_a_model_that_is_deleted_meanwhile_commits_no_step_that_was_begun_ahead(stage: Stage) -> None:
    lane = stage.free_lane()
    model, other = await stage.model(lane), await stage.model(lane)

    async def delete_it(commit: Commit) -> dict[str, int]:
        if commit.of(StepRecord, lambda record: record.model_id == model.model_id):
            await ahead_has_run(commit.owner)
            written = await commit.go()
            await stage.command(DeleteModel(model_id=model.model_id))
            await until(lambda: stage.run_of(commit.owner, model).status == "deleted")
            return written
        return await commit.go()

    async with stage.seen(model) as seen, stage.seen(other) as of_other, stage.owner(lane, delete_it) as owner:
        await seen.until_state(lambda state: state.status == "active")
        await stage.send(model, *(group(f"g{i}", seed=i, version=None) for i in range(4)))
        await seen.until_state(lambda state: state.status == "deleted")
        await stage.send(other, *(group(f"o{i}", seed=i, version=None) for i in range(2)))
        await of_other.until(StepRecord, 1)
        assert owner.lane.tools.pipeline.model_id is None
        assert [record.step for record in seen.of(StepRecord)] == [1]


@staged
async def test_a_lane_that_is_left_commits_the_step_that_was_begun_ahead_and_leaves_its_snapshot(stage: Stage) -> None:
    lane = stage.free_lane()
    model = await stage.model(lane)

    async def leave_at_the_first(commit: Commit) -> dict[str, int]:
        if commit.of(StepRecord, lambda record: record.step == 1):
            await ahead_has_run(commit.owner)
            commit.owner.lane.leave()
        return await commit.go()

    async with stage.seen(model) as seen:
        async with stage.owner(lane, leave_at_the_first) as owner:
            await stage.send(model, *(group(f"g{i}", seed=i, version=None) for i in range(6)))
            await asyncio.wait({owner.task})
        state = await seen.until_state(lambda state: state.snapshot_step == 2)
    assert state.policy_version == 2, "and no third one was begun"


@staged
async def test_no_step_is_begun_ahead_of_one_that_is_under_suspicion(stage: Stage) -> None:
    """What ends the worker must be the step whose intent is in the log (rule 10)."""
    lane = stage.free_lane()
    model = await stage.model(lane)
    async with stage.seen(model) as seen, stage.owner(lane) as owner:
        await seen.until_state(lambda state: state.status == "active")
        await owner.die()
    begun: list[str | None] = []

    async def look(commit: Commit) -> dict[str, int]:
        if commit.of(StepRecord, lambda record: record.step == 1):
            begun.append(commit.owner.lane.tools.pipeline.model_id)
        return await commit.go()

    await stage.send(model, *(group(f"g{i}", seed=i, version=None) for i in range(4)))
    async with stage.seen(model) as seen, stage.owner(lane, look):
        await seen.until(StepRecord, 2)
    assert begun == [None]


@staged
async def test_a_step_is_stored_and_committed_though_the_next_one_can_not_be_planned(stage: Stage) -> None:
    lane = stage.free_lane()
    model = await stage.model(lane)
    with mock.patch("headrace.consumers.worker.plans.StepPlans.after", _no_room):
        async with stage.seen(model) as seen:
            sent = await stage.send(model, *(group(f"g{i}", seed=i, version=None) for i in range(4)))
            async with stage.owner(lane):
                first, second = await seen.until(StepRecord, 2)
    assert (offsets_of(first), offsets_of(second)) == (sent[:2], sent[2:])


async def _no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, "no space left on device")


@staged
async def test_what_was_begun_of_a_deleted_model_does_not_keep_the_others_of_a_busy_lane_from_beginning_theirs(stage: Stage) -> None:
    lane = stage.free_lane()
    model, other = await stage.model(lane), await stage.model(lane)
    begun: list[str | None] = []

    async def delete_it(commit: Commit) -> dict[str, int]:
        if commit.of(StepRecord, lambda record: record.model_id == model.model_id):
            await ahead_has_run(commit.owner)
            await until(lambda: len(stage.run_of(commit.owner, other).waiting) == 4)
            written = await commit.go()
            await stage.command(DeleteModel(model_id=model.model_id))
            await until(lambda: stage.run_of(commit.owner, model).status == "deleted")
            return written
        if commit.of(StepRecord, lambda record: record.step == 1):
            begun.append(commit.owner.lane.tools.pipeline.model_id)
        return await commit.go()

    async with stage.seen(model) as seen, stage.seen(other) as of_other:
        await stage.send(model, *(group(f"g{i}", seed=i, version=None) for i in range(4)))
        await stage.send(other, *(group(f"o{i}", seed=i, version=None) for i in range(4)))
        async with stage.owner(lane, delete_it):
            await of_other.until(StepRecord, 2)
            await seen.until_state(lambda state: state.status == "deleted")
        assert [record.step for record in seen.of(StepRecord)] == [1]
    assert begun == [other.model_id]


@staged
async def test_what_is_not_wanted_any_more_takes_no_turn_at_the_device(stage: Stage) -> None:
    one = await a_plan(stage)
    plan = replace(one, attempt="unwanted", out_dir=f"{one.out_dir}-unwanted")
    ended = asyncio.Event()

    async def another() -> None:
        async with stage.world.turn():
            await ended.wait()

    holder = asyncio.create_task(another())
    await asyncio.sleep(0)
    ahead = Pipeline(stage.world)
    ahead.prepare(plan)
    waits = ahead.prepared
    assert waits is not None
    await asyncio.sleep(0.05)
    ahead.discard()
    async with asyncio.timeout(1):
        await asyncio.wait({waits.task})
    assert waits.task.cancelled()
    ended.set()
    await holder
    assert stage.world._ranks.alive


@staged
async def test_a_lane_that_may_not_wait_for_what_was_begun_ahead_leaves_the_snapshots_of_its_other_models(stage: Stage) -> None:
    lane = stage.free_lane()
    model, other = await stage.model(lane), await stage.model(lane)
    run = stage.world._run

    async def slow(plan: StepPlan, snapshot: WeightsRef | None) -> StepResult:
        if (plan.state.model_id, plan.state.step) == (model.model_id, 1):
            await asyncio.sleep(SOON)
        return await run(plan, snapshot)

    async def store_for_ever(store: ObjectStore, out_dir: Path, result: StepResult, *more: Any) -> StoredStep:
        if result.key.model_id == model.model_id:
            owner.lane.leave()
            await asyncio.sleep(SOON)
        return await store_step(store, out_dir, result, *more)

    with mock.patch.object(stage.world, "_run", slow), mock.patch("headrace.consumers.worker.step.store_step", store_for_ever):
        async with stage.seen(other) as seen, stage.owner(lane, release_seconds=0.5) as owner:
            await stage.send(other, *(group(f"o{i}", seed=i, version=None) for i in range(2)))
            await seen.until(StepRecord, 1)
            await stage.send(model, *(group(f"g{i}", seed=i, version=None) for i in range(4)))
            await asyncio.wait({owner.task})
            async with asyncio.timeout(10):
                await seen.until_state(lambda state: state.snapshot_step == 1)


def test_what_is_foreseen_is_what_the_cut_gives_after_the_commit() -> None:
    run = run_of()
    for offset in range(5):
        admit(run, offset)
    current = select_batch(run)
    assert current is not None
    found = select_following(run, current, 1)
    for waiting in current.groups:
        del run.waiting[waiting.offset]
    run.state = run.state.model_copy(update={"policy_version": 1})
    assert found is not None
    assert found == select_batch(run)


def test_nothing_is_foreseen_while_the_bucket_is_not_complete_or_what_comes_is_not_the_logs_to_say() -> None:
    run = run_of(max_policy_lag=0)
    for offset in range(3):
        admit(run, offset)
    current = select_batch(run)
    assert current is not None
    assert select_following(run, current, 1) is None, "one group waits, two are needed"
    run.linger_over = True
    assert select_following(run, current, 1) is None, "a clock's cut is an intent first"
    run.linger_over = False
    admit(run, 3, initial=0, final=0)
    assert select_following(run, current, 1) is None, "a group will be stale at the next version"
    assert 3 in run.waiting, "and it is the cut that says so"
    admit(run, 4)
    del run.waiting[3]
    assert select_following(run, current, 1) is not None
    run.set_status("deleted", None)
    assert select_following(run, current, 1) is None


def test_a_jobs_turn_is_not_taken_by_what_is_foreseen_of_the_stream() -> None:
    run = run_of()
    admit(run, 0)
    admit(run, 1)
    current = select_batch(run)
    assert current is not None
    admit(run, 2, job_id="job")
    run.open_job(TrainingJob(job_id="job", group_ids=("g2",)), 3)
    admit(run, 4)
    admit(run, 5)
    assert select_following(run, current, 1) is None
    # One that is completed later comes later.
    later = run_of()
    for offset in range(4):
        admit(later, offset)
    current = select_batch(later)
    assert current is not None
    admit(later, 4, job_id="job")
    later.open_job(TrainingJob(job_id="job", group_ids=("g4",)), 5)
    found = select_following(later, current, 1)
    assert found is not None
    assert [waiting.offset for waiting in found.groups] == [2, 3]


def test_a_shadows_groups_are_not_foreseen_since_their_versions_go_at_the_cut() -> None:
    run = run_of()
    run.state = run.state.model_copy(update={"shadow_of": "other"})
    for offset in range(4):
        run.admit(PendingGroup(offset=offset, group=replace(members(f"g{offset}", 7, 7)), job_id=None))
    current = select_batch(run)
    assert current is not None
    assert select_following(run, current, 1) is None


def test_a_prepared_step_is_taken_or_discarded_once_and_nothing_follows() -> None:
    allowed = {(a, b) for a in PreparedPhase for b in PreparedPhase if is_transition_valid(a, b)}
    waiting, running, computed, taken, discarded = PreparedPhase
    ends = {taken, discarded}
    assert allowed == {(waiting, running), (running, computed)} | {(phase, end) for phase in (waiting, running, computed) for end in ends}


@staged
async def test_a_prepared_step_goes_through_its_phases_and_no_others(stage: Stage) -> None:
    one = await a_plan(stage)
    pipeline = Pipeline(stage.world)
    async with stage.world.turn():
        pipeline.prepare(replace(one, attempt="phases", out_dir=f"{one.out_dir}-phases"))
        prepared = pipeline.prepared
        assert prepared is not None
        await asyncio.sleep(0.05)
        assert prepared.phase is PreparedPhase.WAITING
    await asyncio.wait({prepared.task})
    assert prepared.phase is PreparedPhase.COMPUTED
    assert pipeline.from_state(one.state) is prepared
    assert (await pipeline.take(prepared)).key.attempt == "phases"
    assert (prepared.phase, pipeline.prepared) == (PreparedPhase.TAKEN, None)
    with pytest.raises(RuntimeError, match="can't go from taken to discarded"):
        prepared.move(PreparedPhase.DISCARDED)
