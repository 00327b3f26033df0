"""A worker that starts on topics in which somebody has written anything at all, and continues training."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

from tests.poison import write_poison
from tests.worker.conftest import WorkerProcess, learner
from tests.worker.groups import group

from headrace.core.kafka import client_options
from headrace.core.kept import kept_or_none
from headrace.core.lanes import lane_of
from headrace.core.reading import follow
from headrace.core.settings import Settings
from headrace.producers import TrajectoryProducer
from headrace.schemas import topics
from headrace.schemas.carried import CARRIED
from headrace.schemas.state import StepRecord

SOON = 120.0


async def test_a_worker_starts_and_trains_whatever_stands_in_its_topics(
    settings: Settings, start_worker: Callable[[], WorkerProcess], tmp_path: Path
) -> None:
    model = await learner(settings)
    keys, written = [model.model_id], {topics.TRAJECTORY_GROUPS, topics.COMMANDS, topics.STEPS}
    # Not what claims to be a state and can't be read: that refuses the lane, and is another test's.
    await write_poison(settings, keys, claimed=False, but=CARRIED.keys() - {topics.MODELS})
    await write_poison(settings, keys, but=CARRIED.keys() - written)
    worker = start_worker()
    lane = lane_of(model.model_id, settings.topics.partitions)
    steps = follow(client_options(settings.kafka, "test"), settings.topic_names.steps, lane)
    found: list[int] = []
    async with aclosing(steps), TrajectoryProducer(settings, model_id=model.model_id) as producer, asyncio.timeout(SOON):
        for number in range(2):
            for i in range(2):
                await producer.send(group(f"{number}-{i}", seed=2 * number + i))
            while len(found) <= number:
                found += [step.step for record in await anext(steps) if isinstance(step := kept_or_none(record, (StepRecord,)), StepRecord)]
            await write_poison(settings, keys, but=CARRIED.keys() - written)
    assert found == [1, 2]
    assert worker.stop() == 0
    assert "Traceback" not in (tmp_path / "worker.log").read_text()
