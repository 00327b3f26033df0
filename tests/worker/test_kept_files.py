"""What workers keep in the object store and what they delete, from the outside."""

import asyncio
from collections.abc import Callable

import pytest
from tests.worker.conftest import WorkerProcess, following, learner
from tests.worker.groups import group
from tests.worker.stored_steps import folders, put_folder

from headrace.consumers.worker.attempts import Attempts
from headrace.core.reports import read_report, read_rows
from headrace.core.settings import Settings
from headrace.core.store import ObjectStore, open_store, read_manifest
from headrace.producers import TrajectoryProducer
from headrace.schemas.state import StepRecord

Start = Callable[[Settings], WorkerProcess]


async def until_gone(store: ObjectStore, gone: set[str], seconds: float = 120) -> None:
    async with asyncio.timeout(seconds):
        while gone & set(folders(store, "models/")):  # noqa: ASYNC110 - a store tells nobody
            await asyncio.sleep(0.1)


@pytest.mark.slow
async def test_attempt_names_reports_stay_snapshots_go_by_policy_and_a_killed_workers_files_with_the_next_one(
    settings: Settings, start_worker: Start
) -> None:
    worker = {"snapshot_every": 1, "keep_snapshots": 2, "orphan_grace_seconds": 0, "report_rows": "all"}
    settings = settings.model_copy(update={"worker": settings.worker.model_copy(update=worker)})
    store = open_store(settings.store.url, settings.s3)
    model = await learner(settings)
    first = start_worker(settings)
    async with following(settings) as seen, TrajectoryProducer(settings, model_id=model.model_id) as producer:
        for i in range(6):
            await producer.send(group(f"g{i}", seed=i))
        steps = await seen.until(StepRecord, 3)
        assert steps[0].snapshot is not None
        await until_gone(store, {store.resolve(steps[0].snapshot.uri)})
        first.kill()

        report = read_report(store, steps[1].report)
        assert [reported.group_id for reported in report.groups] == ["g2", "g3"]
        assert {reported.producer for reported in report.groups} != {None}
        assert read_rows(store, steps[1].report) is not None

        lost = await Attempts(settings).new(model.model_id)
        of = {"model_id": model.model_id, "incarnation": steps[0].incarnation}
        orphans = {
            put_folder(store, "weights", 2, lost, **of),
            put_folder(store, "report", 2, lost, **of),
            put_folder(store, "weights", 4, lost, whole=False, **of),
        }
        kept = set(folders(store, "models/")) - orphans
        second = start_worker(settings)
        await until_gone(store, orphans)
        assert set(folders(store, "models/")) == kept
        for i in range(6, 8):
            await producer.send(group(f"g{i}", seed=i))
        steps = await seen.until(StepRecord, 4)
    assert second.stop() == 0
    for step in steps:
        read_manifest(store, step.weights.uri, step.weights.digest)
