"""Guarantees broken on purpose, so that anyone can see that a chaos run finds it: `make chaos ARGS="--sabotage fence --steps 60"`."""

import os
from collections.abc import Callable, Sequence
from typing import Any

from aiokafka import AIOKafkaProducer

from headrace.consumers import lane, lane_writer, world
from headrace.consumers.outgoing import Outgoing


def transaction() -> None:
    """Records are sent without a transaction: a crash in the middle leaves half a step, a repeat is seen twice."""
    made = lane_writer.LaneWriter.__init__

    def make(self: Any, settings: Any, number: int, options: dict[str, Any]) -> None:
        made(self, settings, number, options)
        self._plain = AIOKafkaProducer(**options, acks="all", linger_ms=0)

    async def start(self: Any) -> None:
        await self._producer.start()
        await self._plain.start()

    async def commit(self: Any, records: Sequence[Outgoing], _mark: int) -> dict[str, int]:
        written = {}
        for r in records:
            sent = await self._plain.send_and_wait(r.topic, value=r.value, key=r.key, partition=r.partition, headers=list(r.headers))
            written[sent.topic] = sent.offset
        return written

    lane_writer.LaneWriter.__init__, lane_writer.LaneWriter.start = make, start  # type: ignore[method-assign]
    lane_writer.LaneWriter._commit = commit  # type: ignore[method-assign]


def fence() -> None:
    """Each worker has transactional ids of its own: nobody fences a zombie."""
    made = lane_writer.AIOKafkaProducer

    def make(**options: Any) -> AIOKafkaProducer:
        return made(**options | {"transactional_id": f"{options['transactional_id']}-{os.getpid()}"})

    lane_writer.AIOKafkaProducer = make


def order() -> None:
    """A claim reads the states first and fences after that: what it read may be stale."""
    read, made, started = lane.read_states, lane_writer.LaneWriter.__init__, lane_writer.LaneWriter.start
    early: dict[int, Any] = {}

    def make(self: Any, settings: Any, number: int, options: dict[str, Any]) -> None:
        made(self, settings, number, options)
        self._reads = (options, settings.topic_names, number, settings.groups_topic)

    async def start(self: Any) -> None:
        early[self._reads[2]] = await read(*self._reads)
        await started(self)

    async def read_kept(_options: Any, _topics: Any, number: int, _groups: Any) -> Any:
        return early[number]

    lane_writer.LaneWriter.__init__, lane_writer.LaneWriter.start = make, start  # type: ignore[method-assign]
    lane.read_states = read_kept


def resident() -> None:
    """What the ranks hold is trained on although its step was never committed (rule 5)."""
    holds, loads = world.TrainerWorld.holds, world.TrainerWorld._load_from

    def is_there(self: Any, state: Any) -> bool:
        held = self._resident
        return held is not None and self._ranks.alive and held.model_id == state.model_id and held.step >= state.step

    async def load(self: Any, plan: Any, snapshot: Any) -> Any:
        return None if is_there(self, plan.state) else await loads(self, plan, snapshot)

    world.TrainerWorld.holds = lambda self, state: is_there(self, state) or holds(self, state)  # type: ignore[method-assign]
    world.TrainerWorld._load_from = load  # type: ignore[method-assign]


SABOTAGES: dict[str, Callable[[], None]] = {"transaction": transaction, "fence": fence, "order": order, "resident": resident}
"""By name."""
