"""What a claim reads does not grow with the age of the log: counted, record by record, on a short log and on a long one."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from tests.worker.following import Following
from tests.worker.groups import group
from tests.worker.stage import Stage

from headrace.core.kafka import client_options
from headrace.core.models import ModelView
from headrace.schemas.envelope import seal
from headrace.schemas.state import StepRecord

pytestmark = pytest.mark.asyncio(loop_scope="session")
LONGER = 100


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Records that consumers of this process are handed, by topic; of those that subscribe for the test nothing."""
    found: Counter[str] = Counter()
    really = AIOKafkaConsumer.getmany

    async def getmany(self: AIOKafkaConsumer, *partitions: TopicPartition, **options: Any) -> dict[TopicPartition, Sequence[Any]]:
        batches: dict[TopicPartition, Sequence[Any]] = await really(self, *partitions, **options)
        if not str(self._client._client_id).startswith("test"):
            for partition, records in batches.items():
                found[partition.topic.rpartition(".")[2]] += len(records)
        return batches

    with mock.patch.object(AIOKafkaConsumer, "getmany", getmany):
        yield found


async def next_step_after_a_death(stage: Stage, model: ModelView, lane: int, seen: Following, number: int) -> Counter[str]:
    """Records that a new owner reads from its claim to its first step. `number`: of that step."""
    with counted() as found:
        async with stage.owner(lane):
            await train(stage, model, number)
            await seen.until(StepRecord, number)
    return found


async def train(stage: Stage, model: ModelView, number: int) -> None:
    await stage.send(model, *(group(f"{model.name}-{number}-{i}", seed=i, version=None) for i in range(2)))


async def test_a_claim_reads_no_more_of_a_log_that_is_100_times_longer(stage: Stage) -> None:
    lane = stage.free_lane()
    model = await stage.model(lane)
    topics = stage.settings.topic_names
    async with stage.seen(model) as seen:
        async with stage.owner(lane, snapshot_every=2):
            for number in (1, 2, 3):
                await train(stage, model, number)
                await seen.until(StepRecord, number)
        short = await next_step_after_a_death(stage, model, lane, seen, 4)
        async with stage.owner(lane, snapshot_every=2):
            await train(stage, model, 5)
            (*_, last) = await seen.until(StepRecord, 5)
            end = await lengthen(stage, model, lane, last)
            await seen.until_state(lambda state: state.scanned > end)
        long = await next_step_after_a_death(stage, model, lane, seen, 6)
    assert short["trajectory-groups"] > 0
    assert short["steps"] > 0
    # `models` is the broker's to compact (rule 15): what of it is read is bounded by its segments, not by the log's age.
    for topic in (topics.trajectory_groups, topics.steps, topics.commands):
        name = topic.rpartition(".")[2]
        assert long[name] <= short[name], f"{name}: {long[name]} records on the long log, {short[name]} on the short one"


async def lengthen(stage: Stage, model: ModelView, lane: int, step: StepRecord) -> int:
    """A hundred times more of both logs: groups that are refused, and the ledger of a model that is of no concern here.

    Returns:
        The offset of the last group.
    """
    topics = stage.settings.topic_names
    value, headers = seal(step.model_copy(update={"model_id": "another"}), source="test")
    key = model.model_id.encode()
    async with AIOKafkaProducer(**client_options(stage.settings.kafka, "test-longer")) as producer:
        sent = [await producer.send(topics.steps, value, key=b"another", partition=lane, headers=list(headers)) for _ in range(6 * LONGER)]
        empty = b'{"trajectories": []}'
        sent += [await producer.send(topics.trajectory_groups, empty, key=key, partition=lane) for _ in range(12 * LONGER)]
        return max([(await delivery).offset for delivery in sent][6 * LONGER :])
