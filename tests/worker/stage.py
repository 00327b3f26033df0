"""Lanes that are owned in this process, and whose commits a test has in its hand: interleavings that no luck of timing would give.

Broker, object store, tokenizing process, ranks and the lane itself are the real ones; what a test does itself is to decide at a commit:
it goes through, its answer is lost, another owner comes first, or the owner is no more. An owner that dies here leaves what SIGKILL leaves:
the log, the store, and nothing in memory or on the ranks. One set of topics, one tokenizing process and one world serve all tests; each
takes a lane of its own.
"""

import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import pytest_asyncio
from aiokafka import AIOKafkaProducer
from aiokafka.admin import RecordsToDelete
from aiokafka.errors import KafkaConnectionError
from aiokafka.structs import TopicPartition
from pydantic import BaseModel
from tests.worker.following import Following
from tests.worker.learners import learner_settings

from headrace.consumers.worker.admission.pool import AdmissionPool
from headrace.consumers.worker.commits import LaneWriter
from headrace.consumers.worker.lane import Lane
from headrace.consumers.worker.lane_model import LaneModel
from headrace.consumers.worker.lane_models import LaneModels
from headrace.consumers.worker.outgoing import OutgoingRecord
from headrace.consumers.worker.world import TrainerWorld
from headrace.core.commands import send_command
from headrace.core.kafka import client_options
from headrace.core.lanes import lane_of
from headrace.core.model_views import ModelView
from headrace.core.models import create_model, model_id_of
from headrace.core.settings import BaseModelEntry, KafkaSettings, Settings, StoreSettings, TopicSettings, WorkerSettings
from headrace.core.store import ObjectStore, open_store
from headrace.core.topic_admin import apply, open_admin
from headrace.producers import TrajectoryProducer
from headrace.schemas.commands import Command
from headrace.schemas.dead_letters import is_dead_letter
from headrace.schemas.envelope import header_text, open_record, record_models, seal
from headrace.schemas.jobs import TrainingJob
from headrace.schemas.state import ModelState, StepRecord
from headrace.schemas.trajectory import TrajectoryGroup
from headrace.schemas.weights import WeightsRef

R = TypeVar("R", bound=BaseModel)
LANES = 48
SOON = 60.0


@dataclass(slots=True)
class Commit:
    """A transaction that the lane's owner is about to write."""

    owner: "Owner"
    records: list[OutgoingRecord]
    said: list[BaseModel | None]
    write: Callable[[Sequence[OutgoingRecord]], Awaitable[dict[str, int]]]

    def of(self, kind: type[R], fits: Callable[[R], bool] = lambda _: True) -> list[R]:
        """Its records of a type."""
        return [record for record in self.said if isinstance(record, kind) and fits(record)]

    async def go(self) -> dict[str, int]:
        """It is written, and the broker's answer comes."""
        return await self.write(self.records)

    async def die(self) -> dict[str, int]:
        """The owner is no more."""
        self.owner.died = True
        self.owner.task.cancel()
        return await self.never()

    @staticmethod
    async def never() -> dict[str, int]:
        """No answer, until whoever waits for it is cancelled."""
        await asyncio.Event().wait()
        raise AssertionError

    def alter(self, kind: type[R], change: Callable[[R], R]) -> None:
        """Write other records of this type."""
        for i, (record, said) in enumerate(zip(self.records, self.said, strict=True)):
            if isinstance(said, kind):
                value, _ = seal(change(said), source="test")
                self.records[i] = replace(record, value=value)


Script = Callable[[Commit], Awaitable[dict[str, int]]]
"""What becomes of each commit of an owner."""


class _StagedWriter(LaneWriter):
    def __init__(self, *args: Any, owner: "Owner", script: Script) -> None:
        super().__init__(*args)
        self._owner = owner
        self._script = script

    async def _commit(self, records: Sequence[OutgoingRecord], mark: int) -> dict[str, int]:
        if self._owner.died:
            raise KafkaConnectionError("the owner is no more")
        really = super()._commit

        async def write(changed: Sequence[OutgoingRecord]) -> dict[str, int]:
            self._owner.writing += 1
            try:
                return await really(changed, mark)
            finally:
                self._owner.writing -= 1

        # What stands in a dead letter can't be opened.
        said = [
            None if is_dead_letter(record.headers) else open_record(record.value, header_text(record.headers), record_models())
            for record in records
        ]
        return await self._script(Commit(self._owner, list(records), said, write))


@dataclass(slots=True)
class Owner:
    """One owner of a lane."""

    lane: Lane
    wanted: bool = True
    """Whether the group still gives it the lane."""
    died: bool = False
    writing: int = 0
    """Transactions that are open: one that was left so would hold up readers until the broker gives it up."""
    task: "asyncio.Task[None]" = field(init=False)

    @property
    def models(self) -> LaneModels:
        """What it knows."""
        assert self.lane.models is not None
        return self.lane.models

    async def die(self) -> None:
        """As with SIGKILL, but between two transactions: nothing is said, stored or given back."""
        self.died = True
        await until(lambda: self.writing == 0)
        self.task.cancel()
        await asyncio.wait({self.task})

    async def lose(self) -> None:
        """The group gives the lane to another."""
        self.wanted = False
        self.task.cancel()
        await asyncio.wait({self.task})

    async def leave(self) -> None:
        """In order."""
        self.lane.leave()
        await self.task

    async def dead(self) -> None:
        """Wait until a script has ended it."""
        async with asyncio.timeout(SOON):
            await asyncio.wait({self.task})
        assert self.task.cancelled(), self.task.exception()


class Stage:
    """Topics, a store, and what trains.

    Args:
        settings: Of all.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.store: ObjectStore = open_store(settings.store.url, settings.s3)
        self.pool = AdmissionPool(settings)
        self.world = TrainerWorld(settings, self.store)
        self._free = iter(range(LANES))
        self._names = itertools.count()

    def free_lane(self) -> int:
        """A lane that no other test uses."""
        return next(self._free)

    async def model(
        self,
        lane: int,
        *,
        max_policy_lag: int | None = None,
        start_weights: WeightsRef | None = None,
        learning_rate: float = 1e-2,
        **batch: object,
    ) -> ModelView:
        """Ask for a model on a lane: two groups a step."""
        names = (f"model {i}" for i in self._names)
        name = next(name for name in names if lane_of(model_id_of(self.settings.account, "rules", name), LANES) == lane)
        return await create_model(
            self.settings,
            project="rules",
            name=name,
            model=learner_settings(learning_rate=learning_rate, max_policy_lag=max_policy_lag, **batch),
            start_weights=start_weights,
        )

    @asynccontextmanager
    async def owner(self, lane: int, script: Script = Commit.go, **worker: object) -> AsyncIterator[Owner]:
        """Own a lane; at the end the owner dies, if it has not left. What made it fail before is raised.

        Args:
            lane: Partition number.
            script: For each of its commits.
            worker: Other settings of the worker.
        """
        settings = self.settings.model_copy(update={"worker": self.settings.worker.model_copy(update=worker)})
        made: list[Owner] = []
        one = Lane(lane, settings, store=self.store, pool=self.pool, world=self.world, wanted=lambda: made[0].wanted)
        made.append(Owner(one))
        with mock.patch("headrace.consumers.worker.lane.LaneWriter", partial(_StagedWriter, owner=made[0], script=script)):
            made[0].task = asyncio.create_task(one.run())
            try:
                yield made[0]
            finally:
                await made[0].die()
        if not made[0].task.cancelled():
            made[0].task.result()

    @asynccontextmanager
    async def seen(self, model: ModelView) -> AsyncIterator[Following]:
        """What subscribers hear of a model."""
        found = Following(client_options(self.settings.kafka, "test-rules"), self.settings.topic_names, model.model_id)
        await found.start()
        try:
            yield found
        finally:
            await asyncio.shield(found.stop())

    async def send(self, model: ModelView, *groups: TrajectoryGroup) -> list[int]:
        """Groups into the log; their offsets."""
        async with TrajectoryProducer(self.settings, model_id=model.model_id) as producer:
            return [(await producer.send(each)).offset for each in groups]

    async def send_job(self, model: ModelView, job_id: str, *group_ids: str, **more: object) -> int:
        """The record of a job alone: a producer of ours sends it behind its groups."""
        job = TrainingJob.model_validate({"job_id": job_id, "group_ids": group_ids, **more})
        value, headers = seal(job, source="test")
        return await self.put(model, value, headers)

    async def put(self, model: ModelView, value: bytes, headers: Iterable[tuple[str, bytes]] = (), timestamp_ms: int | None = None) -> int:
        """A record into the log as it is; its offset."""
        async with AIOKafkaProducer(**client_options(self.settings.kafka, "test-rules")) as producer:
            sent = await producer.send_and_wait(
                self.settings.topic_names.trajectory_groups,
                value,
                key=model.model_id.encode(),
                partition=lane_of(model.model_id, LANES),
                headers=list(headers),
                timestamp_ms=timestamp_ms,
            )
            return int(sent.offset)

    async def write_state(self, model: ModelView, state: ModelState) -> None:
        """A state into the log, as if nothing was behind it."""
        value, headers = seal(state, source="test")
        async with AIOKafkaProducer(**client_options(self.settings.kafka, "test-rules")) as producer:
            key, lane = model.model_id.encode(), lane_of(model.model_id, LANES)
            await producer.send_and_wait(self.settings.topic_names.models, value, key=key, partition=lane, headers=headers)

    async def command(self, command: Command) -> None:
        """A command into the log."""
        await send_command(self.settings, command, source="test")

    async def lose(self, model: ModelView, before: int) -> None:
        """Retention takes the lane's groups below an offset."""
        where = TopicPartition(self.settings.topic_names.trajectory_groups, lane_of(model.model_id, LANES))
        async with open_admin(client_options(self.settings.kafka, "test-rules")) as admin:
            await admin.delete_records({where: RecordsToDelete(before_offset=before)})

    def run_of(self, owner: Owner, model: ModelView) -> LaneModel:
        """What an owner knows of a model."""
        return owner.models.models[model.model_id]

    async def close(self) -> None:
        """End the processes."""
        await self.world.close()
        self.pool.close()


async def until(happened: Callable[[], bool]) -> None:
    """Wait for what no event reports."""
    async with asyncio.timeout(SOON):
        while not happened():  # noqa: ASYNC110 - memory tells nobody that it changed
            await asyncio.sleep(0.02)


def offsets_of(step: StepRecord) -> list[int]:
    """That a step trained on."""
    return [offset for span in step.offsets for offset in range(span.first, span.last + 1)]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stage(kafka: str, tmp_path_factory: Any, tiny_model: Path) -> AsyncIterator[Stage]:
    """For all tests of the rules."""
    folder = tmp_path_factory.mktemp("stage")
    settings = Settings(
        kafka=KafkaSettings(bootstrap_servers=kafka),
        topics=TopicSettings(prefix=f"stage{uuid.uuid4().hex[:8]}.", partitions=LANES),
        store=StoreSettings(url=f"file://{folder}/store"),
        worker=WorkerSettings(work_dir=folder / "work", threads=1, refusal_linger_seconds=0.02, heartbeat_interval_ms=100),
        base_models={"tiny": BaseModelEntry(path=str(tiny_model))},
    )
    await apply(settings)
    found = Stage(settings)
    yield found
    await found.close()
