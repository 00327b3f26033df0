"""Guarantees broken on purpose, so that anyone can see that a chaos run finds it: `make chaos ARGS="--sabotage fence --steps 60"`."""

import os
from collections.abc import Callable, Sequence
from typing import Any

from aiokafka import AIOKafkaProducer

from headrace.consumers.worker import commits as lane_writer
from headrace.consumers.worker.outgoing import OutgoingRecord


def transaction() -> None:
    """Records are sent without a transaction: a crash in the middle leaves half a step, a repeat is seen twice."""
    made = lane_writer.LaneWriter.__init__

    def make(self: Any, settings: Any, number: int, options: dict[str, Any]) -> None:
        made(self, settings, number, options)
        self._plain = AIOKafkaProducer(**options, acks="all", linger_ms=0)

    async def start(self: Any) -> None:
        await self._producer.start()
        await self._plain.start()

    async def commit(self: Any, records: Sequence[OutgoingRecord], _mark: int) -> dict[str, int]:
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


SABOTAGES: dict[str, Callable[[], None]] = {"transaction": transaction, "fence": fence}
"""By name."""
