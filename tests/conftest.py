"""What all tests share: one real Kafka and one real S3 server for the whole run, started by the first test that asks."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.core.local import LocalBroker, LocalS3
from headrace.core.settings import S3Settings
from headrace.core.store import ObjectStore, open_store


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


@pytest.fixture(params=["file", "s3"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path, topic_prefix: str) -> tuple[str, S3Settings]:
    """Where an empty store is, of either kind."""
    if request.param == "file":
        return f"file://{tmp_path}/store", S3Settings()
    s3: LocalS3 = request.getfixturevalue("s3")
    settings = {"endpoint_url": s3.endpoint_url, "access_key_id": s3.access_key, "secret_access_key": s3.secret_key}
    return f"s3://{s3.bucket}/{topic_prefix}store", S3Settings.model_validate(settings)


@pytest.fixture
def store(store_url: tuple[str, S3Settings]) -> ObjectStore:
    """An empty store; every test that asks for it runs against files and against S3."""
    return open_store(*store_url)
