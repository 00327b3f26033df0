"""A trajectory-groups topic of its own for each test, and a way to read what stands in it."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from headrace.core.settings import KafkaSettings, ProducerSettings, Settings, StoreSettings, TopicSettings
from headrace.core.topic_admin import counts_of
from headrace.schemas.chat import Choice, ChoiceMessage, Message
from headrace.schemas.trajectory import Trajectory, TrajectoryGroup

PARTITIONS = 4
MODEL = "00000000-0000-4000-8000-000000000001"
"""An id: the topics of these tests know no models, as a producer without the right to read them does not."""
ReadAll = Callable[[], Awaitable[list[ConsumerRecord]]]


@pytest.fixture
async def producer_settings(kafka: str, topic_prefix: str, tmp_path: Path) -> Settings:
    """Settings for the shared broker, with the topic made and a file store."""
    settings = Settings(
        kafka=KafkaSettings(bootstrap_servers=kafka, request_timeout_ms=10_000),
        topics=TopicSettings(prefix=topic_prefix, partitions=PARTITIONS),
        store=StoreSettings(url=f"file://{tmp_path}/store"),
        producer=ProducerSettings(),
    )
    await make_topic(kafka, settings.topic_names.trajectory_groups)
    return settings


async def make_topic(kafka: str, topic: str, config: dict[str, str] | None = None) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka)
    await admin.start()
    try:
        await admin.create_topics([NewTopic(topic, PARTITIONS, 1, topic_configs=config or {})])
        while topic not in await counts_of(admin):  # it is made, and a busy broker shows it a moment later
            pass
    finally:
        await admin.close()


@pytest.fixture
def read_all(kafka: str, topic_prefix: str) -> ReadAll:
    """Every record of the test's topic, by partition and offset."""
    return lambda: read_topic(kafka, f"{topic_prefix}trajectory-groups")


async def read_topic(kafka: str, topic: str) -> list[ConsumerRecord]:
    consumer = AIOKafkaConsumer(bootstrap_servers=kafka, auto_offset_reset="none", enable_auto_commit=False)
    await consumer.start()
    try:
        partitions = [TopicPartition(topic, p) for p in range(PARTITIONS)]
        consumer.assign(partitions)
        ends = await consumer.end_offsets(partitions)
        await consumer.seek_to_beginning(*partitions)
        records: list[ConsumerRecord] = []
        while any([await consumer.position(p) < ends[p] for p in partitions]):
            batches = await consumer.getmany(timeout_ms=200)
            records += [record for p in sorted(batches) for record in batches[p]]
        return sorted(records, key=lambda record: (record.partition, record.offset))
    finally:
        await consumer.stop()


def make_group(reward: float = 1.0, tokens: int = 3, **fields: object) -> TrajectoryGroup:
    """A group of two trajectories with sampled tokens."""
    choice = Choice(
        finish_reason="stop",
        message=ChoiceMessage(content="yes"),
        token_ids=[*range(tokens)],
        token_logprobs=[-0.5] * tokens,
    )
    trajectories = [Trajectory(messages_and_choices=[Message(role="user", content="?"), choice], reward=r) for r in (0.0, reward)]
    return TrajectoryGroup.model_validate({"trajectories": trajectories, **fields})
