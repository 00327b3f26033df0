"""`headrace engine` as it is started and ended from a shell; in this process, where torch is loaded already."""

import asyncio
import os
import signal
import socket
import threading
from pathlib import Path

import httpx
import pytest
from tests.cli.conftest import Headrace
from tests.cli.conftest import headrace as headrace  # noqa: PLC0414 - a fixture, shared

from headrace.core.kafka import client_options
from headrace.core.reading import read_to_end
from headrace.core.settings import KafkaSettings, Settings, TopicSettings
from headrace.core.topic_admin import apply

SOON = 60.0


class Client(threading.Thread):
    """Asks for a long stream, sends the signal once it has begun, and reads it to its end."""

    def __init__(self, port: int, number: int) -> None:
        super().__init__()
        self.port, self.number = port, number
        self.lines: list[str] = []

    def run(self) -> None:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "n": 8, "max_tokens": 100, "stream": True}
        # Until it listens there is nothing to wait for but the port.
        url = f"http://127.0.0.1:{self.port}/v1/chat/completions"
        client = httpx.Client(transport=httpx.HTTPTransport(retries=10), timeout=SOON)
        with client, client.stream("POST", url, json=body) as answer:
            lines = answer.iter_lines()
            self.lines.append(next(lines))
            os.kill(os.getpid(), self.number)
            self.lines += [line for line in lines if line]


@pytest.fixture
def settings(kafka: str, topic_prefix: str) -> Settings:
    settings = Settings(kafka=KafkaSettings(bootstrap_servers=kafka), topics=TopicSettings(prefix=topic_prefix, partitions=1))
    asyncio.run(apply(settings))
    return settings


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_lets_a_request_end_takes_the_acks_back_and_ends_it(
    settings: Settings, tiny_model: Path, headrace: Headrace, number: int, code: int
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    client = Client(port, number)
    client.start()
    ran = headrace(
        *("engine", "--base-model", "tiny", "--port", str(port), "--engine-id", "p"),
        HEADRACE_KAFKA__BOOTSTRAP_SERVERS=str(settings.kafka.bootstrap_servers),
        HEADRACE_TOPICS=settings.topics.model_dump_json(),
        HEADRACE_BASE_MODELS=f'{{"tiny": {{"path": "{tiny_model}"}}}}',
    )
    client.join(SOON)
    assert ran.code == code, ran.err
    assert f"Serving tiny at http://127.0.0.1:{port}/v1" in ran.out
    assert "Traceback" not in ran.err
    assert client.lines[-1] == "data: [DONE]"
    assert len(client.lines) > 100
    records = asyncio.run(read_to_end(client_options(settings.kafka, "test"), settings.topic_names.weight_acks))
    said = [(record.key, record.value is None) for record in records]
    assert [each for each in said if each[0] == b"p:tiny"] == [(b"p:tiny", False), (b"p:tiny", True)]
    assert said[-1] == (b"alive:p", True), "it said that it lived, and took that back"


def test_what_it_can_not_start_with_is_said_before_anything_is_loaded(headrace: Headrace) -> None:
    settings = {"HEADRACE_KAFKA__BOOTSTRAP_SERVERS": "localhost:1", "HEADRACE_BASE_MODELS": '{"tiny": {"path": "/m"}}'}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for options, says in (
            (["--base-model", "nobody"], "'nobody' is not in the catalogue; there are tiny"),
            (["--base-model", "tiny", "--port", port], f"can't listen on 127.0.0.1:{port}"),
            (["--base-model", "tiny", "--versions", "0"], "--versions"),
            ([], "--base-model"),
        ):
            ran = headrace("engine", *options, **settings)
            assert ran.code in {1, 2}
            assert says in ran.err
