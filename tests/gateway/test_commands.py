"""`headrace gateway` and `headrace tokens` as their users run them."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from tests.gateway.conftest import gateway_settings
from tests.gateway.conftest import running as serving
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.core.settings import Settings
from headrace.core.topic_admin import apply
from headrace.gateway.tokens import create_token


def environment(settings: Settings, **more: str) -> dict[str, str]:
    return os.environ | {
        "HEADRACE_KAFKA__BOOTSTRAP_SERVERS": str(settings.kafka.bootstrap_servers),
        "HEADRACE_TOPICS": settings.topics.model_dump_json(),
        "HEADRACE_STORE": settings.store.model_dump_json(),
        "HEADRACE_BASE_MODELS": '{"tiny": {"path": "/nowhere"}}',
        **more,
    }


@contextmanager
def running(settings: Settings, *words: str, **more: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace.cli", "gateway", "--port", "0", *words],
        env=environment(settings, **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


def refusal(settings: Settings, *words: str, **more: str) -> str:
    """What it says where it does not start."""
    done = subprocess.run(
        [sys.executable, "-m", "headrace.cli", "gateway", *words],
        env=environment(settings, **more),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_it_prints_its_address_once_it_answers_and_ends_in_order(settings: Settings) -> None:
    with running(settings) as (process, address):
        assert httpx.get(f"{address}/v1/health", trust_env=False).json() == {"status": "ok"}
        process.send_signal(signal.SIGTERM)
        _out, said = process.communicate(timeout=30)
    assert process.returncode in {0, -signal.SIGTERM, 143}
    assert "no other machine can" in said
    assert "Traceback" not in said


def test_keys_are_asked_for_where_tokens_are_configured_and_never_logged(settings: Settings, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    made = CliRunner().invoke(app, ["tokens", "create", "--account", "acme", "--owner", "ada", "--file", str(file)])
    assert made.exit_code == 0
    token = made.stdout.strip().splitlines()[-1]
    with running(settings, HEADRACE_GATEWAY__TOKENS_FILE=str(file)) as (process, address):

        def status(**headers: str) -> int:
            return httpx.get(f"{address}/v1/headrace/trajectories/t/exchanges", headers=headers, trust_env=False).status_code

        assert status() == 401
        assert status(Authorization="Bearer hr_00000000_wrong") == 401
        assert status(Authorization=f"Bearer {token}") == 200
        assert status(**{"X-Api-Key": token}) == 200
        shown = CliRunner().invoke(app, ["tokens", "list", "--file", str(file)])
        assert "acme" in shown.stdout
        assert token not in shown.stdout
        gone = CliRunner().invoke(app, ["tokens", "revoke", token.split("_")[1], "--file", str(file)])
        assert gone.exit_code == 0
        assert status(Authorization=f"Bearer {token}") == 401
        process.send_signal(signal.SIGTERM)
        _out, said = process.communicate(timeout=30)
    assert token.split("_", 2)[2] not in said
    assert "401" in said


def test_what_hinders_its_start_is_said_in_a_sentence(settings: Settings) -> None:
    assert "headrace tokens create" in refusal(settings, "--host", "0.0.0.0", "--port", "0")  # noqa: S104 - refused
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port}" in refusal(settings, "--port", str(port))
        assert "does not answer" in refusal(settings, "--port", "0", HEADRACE_KAFKA__BOOTSTRAP_SERVERS="127.0.0.1:1")
    elsewhere = settings.topics.model_copy(update={"prefix": "nothing-here."}).model_dump_json()
    assert "headrace topics apply" in refusal(settings, "--port", "0", HEADRACE_TOPICS=elsewhere)


@pytest.mark.parametrize("words", [["list"], ["revoke", "12345678"], ["create"]])
def test_tokens_need_a_file(words: list[str]) -> None:
    done = CliRunner().invoke(app, ["tokens", *words])
    assert done.exit_code == 2
    assert "--file" in done.output


async def test_a_key_that_is_too_fast_is_429_with_the_time_to_wait(kafka: str, topic_prefix: str, tmp_path: Path) -> None:
    _stored, token = create_token(tmp_path / "tokens", account="acme", owner="ada")
    slow = gateway_settings(kafka, topic_prefix, tmp_path, tokens_file=tmp_path / "tokens", requests_per_minute=3)
    await apply(slow)
    async with serving(slow, headers={"X-Api-Key": token}) as http:
        answers = [await http.get("/v1/headrace/trajectories/t/exchanges") for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    assert int(answers[-1].headers["retry-after"]) >= 1
