"""`headrace up` as a person runs it: a process of its own, stopped by Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import boto3
import pytest

from headrace.core.local.probe import ask

HEADRACE = str(Path(sys.executable).with_name("headrace"))


@contextmanager
def up(*arguments: str, data_dir: Path) -> Iterator[subprocess.Popen[str]]:
    command = [HEADRACE, "up", "--data-dir", str(data_dir), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    with process:
        try:
            yield process
        finally:
            process.kill()


def exported(process: subprocess.Popen[str], count: int) -> dict[str, str]:
    """The first `count` lines on stdout, read as a shell would."""
    assert process.stdout is not None
    assert process.stderr is not None
    lines = [process.stdout.readline().rstrip("\n") for _ in range(count)]
    assert all(line.startswith("export HEADRACE_") for line in lines), process.stderr.read()
    return dict(line.removeprefix("export ").split("=", 1) for line in lines)


def answers(bootstrap_servers: str) -> bool:
    host, _, port = bootstrap_servers.partition(":")
    return ask(host, int(port), 1.0) is not None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_prints_what_to_export_and_stops_in_order_on_a_signal(number: int, tmp_path: Path) -> None:
    with up(data_dir=tmp_path) as process:
        servers = exported(process, 1)["HEADRACE_KAFKA__BOOTSTRAP_SERVERS"]
        assert answers(servers)
        told = subprocess.run([HEADRACE, "env", "--wait", "--data-dir", str(tmp_path)], capture_output=True, text=True, check=True)
        assert told.stdout == f"export HEADRACE_KAFKA__BOOTSTRAP_SERVERS={servers}\n"
        assert (tmp_path / "env").stat().st_mode & 0o777 == 0o600
        os.killpg(process.pid, number)  # as a terminal does: the whole group
        out, err = process.communicate(timeout=20)
        assert process.returncode == 0
        assert out == ""
        assert err.endswith("Stopped.\n")
        assert not answers(servers)
        ended = subprocess.run([HEADRACE, "env", "--data-dir", str(tmp_path)], capture_output=True, text=True, check=False)
        assert (ended.returncode, ended.stdout) == (1, "")
        assert "no `headrace up` is ready" in ended.stderr
    assert "shut down completed" in (tmp_path / "kafka" / "server.log").read_text()


def test_with_s3_a_store_opened_from_the_exported_settings_works(tmp_path: Path) -> None:
    with up("--s3", data_dir=tmp_path) as process:
        settings = exported(process, 5)
        bucket, _, prefix = settings["HEADRACE_STORE__URL"].removeprefix("s3://").partition("/")
        client = boto3.client(
            "s3",
            region_name="us-east-1",
            endpoint_url=settings["HEADRACE_S3__ENDPOINT_URL"],
            aws_access_key_id=settings["HEADRACE_S3__ACCESS_KEY_ID"],
            aws_secret_access_key=settings["HEADRACE_S3__SECRET_ACCESS_KEY"],
        )
        client.put_object(Bucket=bucket, Key=f"{prefix}/key", Body=b"value")
        assert client.get_object(Bucket=bucket, Key=f"{prefix}/key")["Body"].read() == b"value"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
        assert process.returncode == 0


def test_a_second_up_on_the_folder_says_so_and_where_the_first_is(tmp_path: Path) -> None:
    with up(data_dir=tmp_path) as first:
        servers = exported(first, 1)["HEADRACE_KAFKA__BOOTSTRAP_SERVERS"]
        with up(data_dir=tmp_path) as second:
            out, err = second.communicate(timeout=20)
        assert second.returncode == 1
        assert out == ""
        assert err.startswith("error: Apache Kafka 4.4.0 already runs on the folder")
        assert f"at {servers}" in err
        assert answers(servers)


def test_a_configured_kafka_is_named_and_none_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_KAFKA__BOOTSTRAP_SERVERS", "kafka.example:9092")
    with up(data_dir=tmp_path) as process:
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, "")
    assert err == "Using the Kafka at kafka.example:9092 (setting kafka.bootstrap_servers); none is started here.\n"
    assert not list(tmp_path.iterdir())


def test_a_broker_that_is_killed_ends_it_with_an_error_that_names_the_log(tmp_path: Path) -> None:
    with up(data_dir=tmp_path) as process:
        exported(process, 1)
        os.kill(json.loads((tmp_path / "kafka" / "service.json").read_text())["pid"], signal.SIGKILL)
        _, err = process.communicate(timeout=20)
        assert process.returncode == 1
        assert "Apache Kafka 4.4.0 ended by itself with status 137" in err
        assert f"{tmp_path}/kafka/server.log" in err
