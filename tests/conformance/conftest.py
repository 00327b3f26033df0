"""The whole of Headrace as a client meets it: Kafka, a worker, an engine and a gateway with a token, each a process."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from tests.consumers.conftest import tiny_model as tiny_model  # noqa: PLC0414 - a fixture, shared
from tests.worker.conftest import environment_of, settings_of

from headrace.core.settings import GatewaySettings, Settings
from headrace.core.topic_admin import apply
from headrace.gateway.tokens import create_token

ACCOUNT = "acme"


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What a client needs to know, and what a test may look at."""

    address: str
    """Without a path."""
    key: str
    account: str
    settings: Settings
    folder: Path


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Part:
    """One process of the site; its log lies in a file."""

    def __init__(self, settings: Settings, log: Path, *words: str) -> None:
        environment = os.environ | environment_of(settings) | {"HEADRACE_GATEWAY": settings.gateway.model_dump_json()}
        self.log = log
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "headrace.cli", *words], env=environment, stdout=out, stderr=out, start_new_session=True
            )

    def stop(self) -> None:
        """SIGTERM, and SIGKILL if that was not enough."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(40)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)

    def until_it_answers(self, url: str, seconds: float) -> None:
        """Wait until the process answers there."""
        until = time.monotonic() + seconds
        while True:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            try:
                httpx.get(url, timeout=2, trust_env=False).raise_for_status()
            except httpx.HTTPError:
                assert time.monotonic() < until, f"{url} does not answer\n{self.log.read_text()[-4000:]}"
                time.sleep(0.1)
            else:
                return


@pytest.fixture(scope="session")
def site(kafka: str, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Site]:
    """A site of the tiny base model, shared by all conformance tests."""
    folder = tmp_path_factory.mktemp("site")
    _stored, token = create_token(folder / "tokens", account=ACCOUNT, owner="ada@example.org")
    port, engine_port = free_port(), free_port()
    settings = settings_of(kafka, f"site{uuid.uuid4().hex[:8]}.", folder, tiny_model)
    gateway = GatewaySettings(port=port, tokens_file=folder / "tokens")
    settings = settings.model_copy(update={"account": ACCOUNT, "gateway": gateway})
    asyncio.run(apply(settings))
    engine_words = ("engine", "--base-model", "tiny", "--port", str(engine_port), "--threads", "1")
    with ExitStack() as running:
        parts = {}
        for name, words in {"gateway": ("gateway",), "worker": ("worker",), "engine": engine_words}.items():
            parts[name] = Part(settings, folder / f"{name}.log", *words)
            running.callback(parts[name].stop)
        parts["gateway"].until_it_answers(f"http://127.0.0.1:{port}/v1/health", 60)
        parts["engine"].until_it_answers(f"http://127.0.0.1:{engine_port}/health", 120)
        yield Site(address=f"http://127.0.0.1:{port}", key=token, account=ACCOUNT, settings=settings, folder=folder)
    for name in parts:
        print(f"--- {name}\n{(folder / f'{name}.log').read_text()[-3000:]}")  # noqa: T201 - pytest shows it with a failure
