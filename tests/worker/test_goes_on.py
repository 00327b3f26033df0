"""The step that ranks have gone on to by themselves: its asker's, or nobody's, whoever has the next turn."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from tests.worker.groups import group
from tests.worker.stage import Stage, offsets_of, until
from tests.worker.test_ahead import a_plan

from headrace.consumers.steps.ahead import Following, NextPlan
from headrace.consumers.steps.cut import Batch
from headrace.consumers.steps.world import StateNotHeldError, TrainerWorld
from headrace.schemas.state import StepRecord
from headrace.schemas.weights import WeightsPublished
from headrace.trainer.plan import StateKey, StepPlan, StepResult
from headrace.trainer.rank import RankDiedError, RankWorld

pytestmark = pytest.mark.asyncio(loop_scope="session")


def lies_there(plan: StepPlan) -> bool:
    return Path(plan.out_dir, "weights").is_dir()


class Plans:
    """Plans like one that a lane has run.

    Args:
        one: It.
        world: That runs them.
    """

    def __init__(self, one: StepPlan, world: TrainerWorld) -> None:
        self._one = one
        self._world = world

    def of(self, state: StateKey, attempt: str) -> StepPlan:
        """A step from a state."""
        out_dir = str(Path(self._one.out_dir).with_name(f"{state.model_id}-{state.step}-{attempt}"))
        return replace(self._one, state=state, attempt=attempt, out_dir=out_dir, snapshot=False)

    async def gone_on(self, model_id: str) -> StepPlan:
        """Have the ranks run a first step of a new model and go on to a second one, which is returned."""
        for turn in range(50):  # it is handed over in time, or not: until it is
            first = self.of(StateKey(model_id=model_id, incarnation="i", step=0), f"first-{turn}")
            second = self.of(replace(first.state, step=1, attempt=first.attempt), f"second-{turn}")
            running = asyncio.create_task(self._world.run(first, None))
            await until(lambda first=first: self._world.has_turn(first))
            await self._world.hand_over(second, goes_on=True)
            result = await running
            if result.goes_on is not None:
                assert result.goes_on == second.out_dir
                assert not self._world.holds(result.key), "the ranks are past it"
                return replace(second, scalars=result.scalars)
        raise AssertionError("it never went on")


@pytest_asyncio.fixture(loop_scope="session")
async def plans(stage: Stage) -> AsyncIterator[Plans]:
    yield Plans(await a_plan(stage), stage.world)
    stage.world.forget({"m", "n"})


async def test_a_lane_commits_what_its_ranks_have_gone_on_to_once_and_it_comes_out_of_the_ledger_as_it_did(stage: Stage) -> None:
    lane = stage.free_lane()
    model = await stage.model(lane)
    results: list[StepResult] = []
    run = stage.world._result_of

    async def noting(plan: StepPlan) -> StepResult:
        results.append(await run(plan))
        return results[-1]

    async with stage.seen(model) as seen:
        sent = await stage.send(model, *(group(f"g{i}", seed=i, version=None) for i in range(40)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stage.world, "_result_of", noting)
            async with stage.owner(lane):
                steps = await seen.until(StepRecord, 20)
                await seen.until(WeightsPublished, 20)
    assert [offset for step in steps for offset in offsets_of(step)] == sent
    assert [step.attempt for step in steps] == [result.key.attempt for result in results], "none was run twice"
    assert any(result.goes_on for result in results)
    # Whoever comes next runs them again from the last snapshot: a digest that differs would stop the model.
    async with stage.seen(model) as seen, stage.owner(lane):
        await stage.send(model, *(group(f"h{i}", seed=i, version=None) for i in range(2)))
        (last,) = [step for step in await seen.until(StepRecord, 21) if step.step == 21]
    assert last.attempt_before == steps[-1].attempt


async def test_what_ranks_go_on_to_is_kept_for_who_has_asked_while_another_has_its_turn(stage: Stage, plans: Plans) -> None:
    second = await plans.gone_on("m")
    other = plans.of(StateKey(model_id="n", incarnation="i", step=0), "other")
    tasks = [asyncio.create_task(stage.world.run(plan, None)) for plan in (other, second)]
    others, mine = await asyncio.gather(*tasks)
    assert (others.key.model_id, mine.key) == ("n", replace(second.state, step=2, attempt=second.attempt))
    assert lies_there(second)
    third = await stage.world.run(plans.of(mine.key, "third"), None)
    assert third.key.step == 3, "what it made was parked meanwhile"


async def test_what_ranks_have_gone_on_to_and_nobody_wants_keeps_nobody_from_its_turn(stage: Stage, plans: Plans) -> None:
    second = await plans.gone_on("m")
    other = await stage.world.run(plans.of(StateKey(model_id="n", incarnation="i", step=0), "other"), None)
    assert other.key.model_id == "n"
    assert not lies_there(second)
    assert stage.world.holds(other.key)
    await plans.gone_on("m")
    stage.world.forget({"m"})
    async with stage.world.turn():
        pass
    await asyncio.gather(*stage.world._forgetting)
    assert stage.world._ranks.going is None


async def test_what_ranks_have_gone_on_to_is_lost_with_them_and_is_nobodys_fault(stage: Stage, plans: Plans) -> None:
    second = await plans.gone_on("m")
    stage.world._ranks.kill()
    with pytest.raises(StateNotHeldError):
        await stage.world.run(second, None)


async def test_what_ranks_wrote_of_it_before_they_ended_does_not_stay(stage: Stage, plans: Plans) -> None:
    second = await plans.gone_on("m")
    stage.world._ranks.kill()
    await asyncio.to_thread(Path(second.out_dir, "weights").mkdir, parents=True, exist_ok=True)
    await stage.world.run(plans.of(StateKey(model_id="n", incarnation="i", step=0), "other"), None)
    assert not lies_there(second)


async def test_a_launched_world_that_is_ended_in_anothers_turn_is_reported(stage: Stage, plans: Plans) -> None:
    await plans.gone_on("m")
    other = plans.of(StateKey(model_id="n", incarnation="i", step=0), "other")
    settling = asyncio.Event()
    loop = asyncio.get_running_loop()

    def waits(ranks: RankWorld) -> StepResult:
        loop.call_soon_threadsafe(settling.set)
        ranks._processes[0].join()
        raise RankDiedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankWorld, "settle", waits)
        patch.setattr(stage.world, "launched", True)
        patch.setattr(stage.world, "lost", asyncio.Event())
        running = asyncio.create_task(stage.world.run(other, None))
        await settling.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert stage.world.lost.is_set()


async def test_ranks_are_held_back_from_what_a_command_takes_away_and_from_nothing_else(plans: Plans) -> None:
    """The device is a stand-in that notes what it is told."""
    told: list[object] = []
    next_batch = Batch(groups=(), job_id=None, cut="groups_per_step", completed_at=1)
    plan = plans.of(StateKey(model_id="m", incarnation="i", step=1), "next")
    wanted, asked, changed = True, 0, asyncio.Event()

    class Device:
        async def hand_over(self, plan: StepPlan, *, goes_on: bool) -> None:
            told.append((plan.attempt, goes_on))

        async def hold_back(self) -> None:
            told.append("held back")

    def may_still(batch: Batch) -> bool:
        nonlocal asked
        asked += 1
        return batch is next_batch and wanted

    async def make(_batch: Batch) -> StepPlan:
        return plan

    following = Following(now=lambda: next_batch, may_still=may_still, changed=changed)
    coming = NextPlan(following, make, Device(), lambda: True)  # type: ignore[arg-type]
    await until(lambda: asked == 1)
    changed.set()
    await until(lambda: asked == 2)
    assert told == [("next", True)]
    wanted = False
    changed.set()
    await until(lambda: told[1:] == ["held back"])
    assert await coming.plan() is plan
    await coming.cancel()


async def test_ranks_do_not_go_on_where_another_waits_for_its_turn(stage: Stage, plans: Plans) -> None:
    first = plans.of(StateKey(model_id="m", incarnation="i", step=0), "first")
    second = plans.of(replace(first.state, step=1, attempt="first"), "second")
    other = plans.of(StateKey(model_id="n", incarnation="i", step=0), "other")
    handed: list[bool] = []
    hand_over = stage.world._ranks.hand_over
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage.world._ranks, "hand_over", lambda plan, *, goes_on: (handed.append(goes_on), hand_over(plan, goes_on=goes_on)))
        running = asyncio.create_task(stage.world.run(first, None))
        await until(lambda: stage.world.has_turn(first))
        waiting = asyncio.create_task(stage.world.run(other, None))
        await until(lambda: stage.world._queue == 1)
        await stage.world.hand_over(second, goes_on=True)
        await asyncio.gather(running, waiting)
    assert handed == [False]
