"""Topics and producers on the shared broker, for the tests of core."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from headrace.core.kafka import ClientOptions, client_options
from headrace.core.settings import KafkaSettings
from headrace.core.topic_admin import counts_of

MakeTopic = Callable[..., Awaitable[str]]
Producing = Callable[..., AbstractAsyncContextManager[AIOKafkaProducer]]


@pytest.fixture
def options(kafka: str) -> ClientOptions:
    return client_options(KafkaSettings(bootstrap_servers=kafka), "test")


@pytest.fixture
def make_topic(options: ClientOptions, topic_prefix: str) -> MakeTopic:
    """`await make_topic("name", partitions=1, config={})` makes a topic under the test's prefix and gives its full name."""

    async def make(name: str, partitions: int = 1, config: dict[str, str] | None = None) -> str:
        admin = AIOKafkaAdminClient(**options)
        await admin.start()
        try:
            answer = await admin.create_topics([NewTopic(topic_prefix + name, partitions, 1, topic_configs=config or {})])
            assert [error[1] for error in answer.topic_errors] == [0]
            while topic_prefix + name not in await counts_of(admin):  # it is made, and a busy broker shows it a moment later
                pass
        finally:
            await admin.close()
        return topic_prefix + name

    return make


@pytest.fixture
def producing(options: ClientOptions) -> Producing:
    """`async with producing(transactional_id=...) as producer`."""

    @asynccontextmanager
    async def started(**more: Any) -> AsyncIterator[AIOKafkaProducer]:
        producer = AIOKafkaProducer(**options, **more)
        await producer.start()
        try:
            yield producer
        finally:
            await producer.stop()

    return started
