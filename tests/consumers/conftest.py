"""What tests of consumers share: topics of their own, and a tiny causal LM that is made on the spot (nothing is downloaded)."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer
from tests.consumers.tiny_model import save_tiny_model

from headrace.core.settings import KafkaSettings, Settings, TopicSettings
from headrace.core.topic_admin import apply


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a Qwen3 model (hidden 64, 2 layers, vocabulary 32, tied embeddings) whose answers vary: its logits are not flat."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture
async def settings(kafka: str, topic_prefix: str) -> Settings:
    """Settings of the test's own topics (3 lanes), which exist."""
    settings = Settings(kafka=KafkaSettings(bootstrap_servers=kafka), topics=TopicSettings(prefix=topic_prefix, partitions=3))
    await apply(settings)
    return settings


@pytest.fixture
async def producer(kafka: str) -> AsyncIterator[AIOKafkaProducer]:
    async with AIOKafkaProducer(bootstrap_servers=kafka) as producer:
        yield producer
