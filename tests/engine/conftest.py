"""What tests of the engine share: base models made on the spot, and an engine that serves for a whole module."""

import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from tests.consumers.tiny_model import save_tiny_model
from tests.engine.site import Acks, Site, acks_of, running, site_with
from tests.engine.speaking_model import save_speaking_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def speaking_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_speaking_model(tmp_path_factory.mktemp("speaking-model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(kafka: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    async with site_with(kafka, tiny_model, tmp_path_factory.mktemp("site"), f"t{uuid.uuid4().hex[:10]}.") as site:
        yield site


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(site: Site) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an engine that serves the tiny model."""
    async with running(site) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def acks(site: Site) -> AsyncIterator[Acks]:
    async with acks_of(site) as acks:
        yield acks
