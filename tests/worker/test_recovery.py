"""What a worker finds when it comes back, and what it leaves when it goes."""

from collections.abc import Callable
from pathlib import Path

from tests.worker.conftest import WorkerProcess, following, learner
from tests.worker.groups import group

from headrace.core.models import ModelView
from headrace.core.settings import Settings
from headrace.producers import TrajectoryProducer
from headrace.schemas.state import ModelState, StepRecord

Start = Callable[..., WorkerProcess]


def with_worker(settings: Settings, **changes: object) -> Settings:
    return settings.model_copy(update={"worker": settings.worker.model_copy(update=changes)})


async def train(settings: Settings, model: ModelView, first: int, count: int) -> None:
    """Groups for `count` steps of two."""
    async with TrajectoryProducer(settings, model_id=model.model_id) as producer:
        for number in range(2 * first, 2 * (first + count)):
            await producer.send(group(f"{model.name}-{number}", seed=number, version=None))


async def test_models_take_turns_and_a_worker_that_is_asked_to_end_leaves_snapshots(
    settings: Settings, start_worker: Start, tmp_path: Path
) -> None:
    worker = start_worker(with_worker(settings, snapshot_every=100))
    models = [await learner(settings, name) for name in ("one", "two")]
    async with following(settings) as seen:
        for turn in range(3):
            for model in models:
                await train(settings, model, turn, 1)
                await seen.until_state(lambda state, m=model, t=turn: state.model_id == m.model_id and state.policy_version == t + 1)
        assert all(record.snapshot is None for record in seen.of(StepRecord))
        assert worker.stop() == 0
        for model in models:
            left = await seen.until_state(lambda state, m=model: state.model_id == m.model_id and state.snapshot is not None)
            assert (left.snapshot_step, left.steps_since, left.needed_from) == (3, (), None)
    log = (tmp_path / "worker.log").read_text()
    assert "is run again" not in log
    start_worker(with_worker(settings, snapshot_every=100))
    async with following(settings) as seen:
        for model in models:
            await train(settings, model, 3, 1)
            await seen.until_state(lambda state, m=model: state.model_id == m.model_id and state.policy_version == 4)
    assert "is run again" not in (tmp_path / "worker.log").read_text()


async def test_a_killed_workers_steps_are_run_again_to_the_same_digests_and_an_idle_model_gets_its_snapshot(
    settings: Settings, start_worker: Start, tmp_path: Path
) -> None:
    changed = with_worker(settings, snapshot_every=3, settle_seconds=1)
    worker = start_worker(with_worker(settings, snapshot_every=3))
    model = await learner(settings, "killed")
    async with following(settings, model.model_id) as seen:
        await train(settings, model, 0, 5)
        records = await seen.until(StepRecord, 5)
        assert [record.snapshot is not None for record in records] == [False, False, True, False, False]
        assert seen.of(ModelState)[-1].needed_from == 6
        worker.kill()
        start_worker(changed)
        await train(settings, model, 5, 2)
        records = await seen.until(StepRecord, 7)
        # Step 6 has a snapshot by policy, step 7 because nothing comes after it.
        settled = await seen.until_state(lambda state: state.snapshot_step == 7)
        assert settled.policy_version == 7
    log = (tmp_path / "worker.log").read_text()
    assert log.count("is run again, to the same digests") == 2
    assert [record.step for record in records] == list(range(1, 8))
    assert records[5].attempt_before == records[4].attempt
