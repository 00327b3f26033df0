"""A gateway as its clients see it: real HTTP on a port of its own, real Kafka behind it."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from headrace.core.http_server import HEAD_SECONDS, server_config
from headrace.core.settings import BaseModelEntry, GatewaySettings, KafkaSettings, Settings, StoreSettings, TopicSettings
from headrace.core.topic_admin import apply
from headrace.gateway.app import create_app
from headrace.gateway.gate import Gate
from headrace.gateway.serve import Server, bind


def gateway_settings(kafka: str, prefix: str, folder: Path, **gateway: object) -> Settings:
    """Settings of a gateway over topics of its own; the base models exist in the catalogue only."""
    return Settings(
        kafka=KafkaSettings(bootstrap_servers=kafka),
        topics=TopicSettings(prefix=prefix, partitions=2),
        store=StoreSettings(url=f"file://{folder}/store"),
        gateway=GatewaySettings.model_validate({"port": 0, "instance": uuid.uuid4().hex[:8], **gateway}),
        base_models={"tiny": BaseModelEntry(path=str(folder / "nowhere"))},
    )


@asynccontextmanager
async def running(settings: Settings, *, head_seconds: float = HEAD_SECONDS, **client: object) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway that answers, and a client of it; `client.gate` is its gate."""
    app = create_app(settings)
    gate: Gate = app.state.gate
    server = Server(server_config(app, grace_seconds=20, head_seconds=head_seconds), gate)
    listener = bind(settings)
    async with gate:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            address = f"http://127.0.0.1:{listener.getsockname()[1]}"
            async with httpx.AsyncClient(base_url=address, timeout=30, trust_env=False, **client) as http:  # type: ignore[arg-type]
                http.gate = gate  # type: ignore[attr-defined]
                yield http
        finally:
            server.should_exit = True
            await serving
            listener.close()


@pytest.fixture
async def settings(kafka: str, topic_prefix: str, tmp_path: Path) -> Settings:
    """Settings with topics of their own, made."""
    found = gateway_settings(kafka, topic_prefix, tmp_path)
    await apply(found)
    return found


@pytest.fixture
async def gateway(settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway without tokens."""
    async with running(settings) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_gateway(kafka: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway for a whole file, whose tests then run in the module's loop; each makes a model of its own."""
    settings = gateway_settings(kafka, f"t{uuid.uuid4().hex[:10]}.", tmp_path_factory.mktemp("gateway"))
    await apply(settings)
    async with running(settings) as client:
        yield client
