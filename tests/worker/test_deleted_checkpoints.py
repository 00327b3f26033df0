"""A worker is killed around the deletion of a checkpoint's files: whoever comes next finishes it, and nothing that is needed goes."""

import asyncio
from collections.abc import Callable

import pytest
from tests.worker.groups import group
from tests.worker.stage import Commit, Script, Stage, offsets_of, until

from headrace.consumers.worker.storage.step_files import list_folders
from headrace.core.model_views import ModelView
from headrace.core.store import StoreUnavailableError
from headrace.schemas.commands import DeleteCheckpoints
from headrace.schemas.state import ModelState, StepRecord

pytestmark = pytest.mark.asyncio(loop_scope="session")

WORKER = {"snapshot_every": 1}


async def three_steps(stage: Stage, lane: int) -> ModelView:
    """A model with three versions and a snapshot of each."""
    model = await stage.model(lane)
    async with stage.seen(model) as seen, stage.owner(lane, **WORKER) as owner:
        await stage.send(model, *(group(f"g{i}", seed=i, version=None) for i in range(6)))
        await seen.until(StepRecord, 3)
        await owner.leave()
    return model


async def goes_on(stage: Stage, lane: int, model: ModelView, sent: list[int] | None = None) -> None:
    """The next owner finishes the deletion, and trains on: on what was sent, or on two groups more."""
    async with stage.seen(model) as seen, stage.owner(lane, **WORKER) as owner:
        state = await seen.until_state(lambda found: bool(found.doomed))
        await until(lambda: not {1, 2} & {*weights(stage, state)})
        if sent is None:
            sent = await stage.send(model, *(group(f"late{i}", seed=i, version=None) for i in range(2)))
        step = (await seen.until(StepRecord, 4))[-1]
        assert offsets_of(step) == sent
        # What was deleted is noted with the next commit.
        await until(lambda: not stage.run_of(owner, model).doomed)
        more = await stage.send(model, *(group(f"more{i}", seed=i, version=None) for i in range(2)))
        assert offsets_of((await seen.until(StepRecord, 5))[-1]) == more
        await seen.until_state(lambda found: found.policy_version == 5 and not found.doomed)
        assert {3, 4, 5} <= {*weights(stage, state)}
        await asyncio.to_thread(stage.store.head, f"{stage.store.resolve(step.weights.uri)}/manifest.json")
        await owner.leave()


def weights(stage: Stage, state: ModelState) -> list[int]:
    """Steps of which any file of the weights is there."""
    return [folder.step for folder in list_folders(stage.store, state.model_id, state.incarnation, "weights")]


def dies_where(fits: Callable[[ModelState], bool], *, before: bool) -> Script:
    """The owner is no more at the first commit of a state that fits, before it is written or just after."""

    async def script(commit: Commit) -> dict[str, int]:
        if not commit.of(ModelState, fits):
            return await commit.go()
        if not before:
            await commit.go()
        return await commit.die()

    return script


async def test_killed_between_the_commit_that_dooms_files_and_their_deletion(stage: Stage) -> None:
    lane = stage.free_lane()
    model = await three_steps(stage, lane)
    async with stage.seen(model) as seen:
        state = await seen.until_state(lambda found: found.policy_version == 3)
        await stage.command(DeleteCheckpoints(model_id=model.model_id, incarnation=state.incarnation, steps=((1, 2),)))
        async with stage.owner(lane, dies_where(lambda found: bool(found.doomed), before=False), **WORKER) as owner:
            await owner.dead()
        assert weights(stage, state) == [1, 2, 3]
    await goes_on(stage, lane, model)


async def test_killed_between_the_deletion_of_files_and_its_commit(stage: Stage) -> None:
    lane = stage.free_lane()
    model = await three_steps(stage, lane)
    async with stage.seen(model) as seen:
        state = await seen.until_state(lambda found: found.policy_version == 3)
        await stage.command(DeleteCheckpoints(model_id=model.model_id, incarnation=state.incarnation, steps=((1, 2),)))
        gone = False

        def forgets(found: ModelState) -> bool:
            nonlocal gone
            gone = gone or bool(found.doomed)
            return gone and not found.doomed

        async with stage.owner(lane, dies_where(forgets, before=True), **WORKER) as owner:
            await until(lambda: weights(stage, state) == [3])
            await until(lambda: not stage.run_of(owner, model).doomed)
            sent = await stage.send(model, *(group(f"late{i}", seed=i, version=None) for i in range(2)))
            await owner.dead()
        committed = await seen.until_state(lambda found: bool(found.doomed))
        assert [batch.steps for batch in committed.doomed] == [((1, 2),)]
    await goes_on(stage, lane, model, sent)


async def test_killed_in_the_middle_of_a_folder(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    lane = stage.free_lane()
    model = await three_steps(stage, lane)
    async with stage.seen(model) as seen:
        state = await seen.until_state(lambda found: found.policy_version == 3)
        await stage.command(DeleteCheckpoints(model_id=model.model_id, incarnation=state.incarnation, steps=((1, 2),)))
        (folder, *_) = list_folders(stage.store, state.model_id, state.incarnation, "weights")
        assert len(folder.objects) > 1
        deleted = 0
        really = stage.store.delete
        async with stage.owner(lane, **WORKER) as owner:
            loop = asyncio.get_running_loop()

            def delete(key: str) -> None:
                """The first file goes; with the second the owner is no more."""
                nonlocal deleted
                deleted += 1
                if deleted > 1:
                    asyncio.run_coroutine_threadsafe(owner.die(), loop)
                    raise StoreUnavailableError("the process is no more")
                really(key)

            monkeypatch.setattr(stage.store, "delete", delete)
            await owner.dead()
            monkeypatch.undo()
        assert weights(stage, state) == [1, 2, 3]
        left = next(iter(list_folders(stage.store, state.model_id, state.incarnation, "weights")))
        assert len(left.objects) == len(folder.objects) - 1
        assert all(not found.key.endswith("manifest.json") for found in left.objects), "what is left is no folder to anybody"
    await goes_on(stage, lane, model)
