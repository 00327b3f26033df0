"""What all tests share: one real Kafka and one real S3 server for the whole run, started by the first test that asks."""

import uuid
from collections.abc import Iterator

import pytest

from headrace.core.local import LocalBroker, LocalS3


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Bootstrap servers of a real broker. It makes no topic by itself; name yours with `topic_prefix`."""
    with LocalBroker(tmp_path_factory.mktemp("broker")) as broker:
        yield broker.bootstrap_servers


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalS3]:
    """A real S3 server: `endpoint_url`, `access_key`, `secret_key` and a `bucket` that exists; take a key prefix per test."""
    with LocalS3(tmp_path_factory.mktemp("s3"), bucket="headrace-test") as server:
        yield server


@pytest.fixture
def topic_prefix() -> str:
    """A prefix of its own for each test's topics, groups and transactional ids: the broker is shared by all tests."""
    return f"t{uuid.uuid4().hex[:10]}."
