"""Guarantees broken on purpose, so that anyone can see that a chaos run finds it: `make chaos ARGS="--sabotage fence --steps 60"`."""

import os
from collections.abc import Callable, Sequence

from aiokafka import AIOKafkaProducer

from headrace.consumers import lane, lane_writer, world
from headrace.consumers.outgoing import Outgoing


def transaction() -> None:
    """Records are sent without a transaction: a crash in the middle leaves half a step, a repeat is seen twice."""

    async def commit(self: lane_writer.LaneWriter, records: Sequence[Outgoing], _mark: int) -> None:
        producer = AIOKafkaProducer(**self._options_kept, acks="all")
        await producer.start()
        try:
            for r in records:
                await producer.send_and_wait(r.topic, value=r.value, key=r.key, partition=r.partition, headers=list(r.headers))
        finally:
            await producer.stop()

    started = lane_writer.LaneWriter.__init__

    def start(self: lane_writer.LaneWriter, settings: object, number: int, options: dict[str, object]) -> None:
        started(self, settings, number, options)
        self._options_kept = options

    lane_writer.LaneWriter.__init__ = start
    lane_writer.LaneWriter._commit = commit


def fence() -> None:
    """Each worker has transactional ids of its own: nobody fences a zombie."""
    made = lane_writer.AIOKafkaProducer

    def make(**options: object) -> AIOKafkaProducer:
        if "transactional_id" in options:
            options["transactional_id"] = f"{options['transactional_id']}-{os.getpid()}"
        return made(**options)

    lane_writer.AIOKafkaProducer = make


def order() -> None:
    """A claim reads the states first and fences after that: what it read may be stale."""
    read = lane.read_states
    kept: dict[int, object] = {}
    started = lane_writer.LaneWriter.start

    async def read_early(self: lane_writer.LaneWriter) -> None:
        kept[self._groups.partition] = await read(self._options_kept, self._topics_kept, self._groups.partition)
        await started(self)

    made = lane_writer.LaneWriter.__init__

    def make(self: lane_writer.LaneWriter, settings: object, number: int, options: dict[str, object]) -> None:
        made(self, settings, number, options)
        self._options_kept, self._topics_kept = options, settings.topic_names

    async def read_kept(_options: object, _topics: object, number: int) -> object:
        return kept[number]

    lane_writer.LaneWriter.__init__, lane_writer.LaneWriter.start, lane.read_states = make, read_early, read_kept


def resident() -> None:
    """What the ranks hold is trained on although its step was never committed (rule 5)."""
    loads = world.TrainerWorld._load_from

    async def load(self: world.TrainerWorld, plan: object, snapshot: object) -> object:
        held = self._resident
        if (
            held is not None
            and (held.model_id, held.step) >= (plan.state.model_id, plan.state.step)
            and held.model_id == plan.state.model_id
        ):
            return None
        return await loads(self, plan, snapshot)

    world.TrainerWorld._load_from = load


SABOTAGES: dict[str, Callable[[], None]] = {"transaction": transaction, "fence": fence, "order": order, "resident": resident}
"""By name."""
