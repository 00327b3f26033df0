"""The security settings against a real broker that asks for a password."""

import hashlib
import os
import socket
import struct
from collections.abc import Iterator

import pytest

from headrace.core.kafka import KafkaUnavailableError, client_options
from headrace.core.local import LocalBroker
from headrace.core.settings import KafkaSettings
from headrace.core.topic_admin import partition_counts

MODULE = "org.apache.kafka.common.security"


@pytest.fixture(scope="module")
def sasl_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a listener that takes PLAIN and SCRAM logins of user `agent`, password `right`."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    port, controller, secure = (one.getsockname()[1] for one in held)
    for one in held:
        one.close()
    scram = f"{MODULE}.scram.ScramLoginModule required;"
    overrides = {
        "listeners": f"CLIENT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller},SECURE://127.0.0.1:{secure}",
        "advertised.listeners": f"CLIENT://127.0.0.1:{port},SECURE://127.0.0.1:{secure}",
        "controller.quorum.voters": f"1@127.0.0.1:{controller}",
        "listener.security.protocol.map": "CLIENT:PLAINTEXT,CONTROLLER:PLAINTEXT,SECURE:SASL_PLAINTEXT",
        "listener.name.secure.sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512",
        "listener.name.secure.plain.sasl.jaas.config": f'{MODULE}.plain.PlainLoginModule required user_agent="right";',
        "listener.name.secure.scram-sha-256.sasl.jaas.config": scram,
        "listener.name.secure.scram-sha-512.sasl.jaas.config": scram,
    }
    with LocalBroker(tmp_path_factory.mktemp("sasl"), port, overrides=overrides) as broker:
        add_scram_user(broker.bootstrap_servers, 1, "sha256")
        add_scram_user(broker.bootstrap_servers, 2, "sha512")
        yield f"127.0.0.1:{secure}"


def add_scram_user(bootstrap_servers: str, mechanism: int, digest: str) -> None:
    """AlterUserScramCredentials v0 on the wire: neither aiokafka nor the jars we fetch can make users."""
    salt = os.urandom(16)
    salted = hashlib.pbkdf2_hmac(digest, b"right", salt, 4096)
    upsert = compact(b"agent") + struct.pack(">bi", mechanism, 4096) + compact(salt) + compact(salted) + b"\0"
    request = struct.pack(">hhi", 51, 0, 1) + b"\0\4test\0" + b"\1" + b"\2" + upsert + b"\0"
    host, _, port = bootstrap_servers.partition(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(struct.pack(">i", len(request)) + request)
        answer = connection.makefile("rb")
        body = answer.read(*struct.unpack(">i", answer.read(4)))
    error = struct.unpack_from(">h", body, body.index(compact(b"agent")) + 6)
    assert error == (0,), body


def compact(value: bytes) -> bytes:
    """A compact string or bytes of Kafka's protocol, shorter than 127."""
    return bytes([len(value) + 1]) + value


def settings(address: str, mechanism: str, password: str) -> KafkaSettings:
    return KafkaSettings.model_validate(
        {
            "bootstrap_servers": address,
            "security_protocol": "SASL_PLAINTEXT",
            "sasl_mechanism": mechanism,
            "sasl_username": "agent",
            "sasl_password": password,
        }
    )


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
async def test_the_right_password_is_let_in_and_a_wrong_one_is_told(sasl_broker: str, mechanism: str) -> None:
    await partition_counts(client_options(settings(sasl_broker, mechanism, "right"), "test"))
    with pytest.raises(KafkaUnavailableError, match=r"sasl_mechanism|security_protocol") as caught:
        await partition_counts(client_options(settings(sasl_broker, mechanism, "wr0ng"), "test"))
    assert "wr0ng" not in str(caught.value)


async def test_no_login_at_all_is_told_with_the_protocol(sasl_broker: str) -> None:
    plain = KafkaSettings(bootstrap_servers=sasl_broker, request_timeout_ms=2000)
    with pytest.raises(KafkaUnavailableError, match=rf"{sasl_broker}.*security_protocol \(PLAINTEXT\)"):
        await partition_counts(client_options(plain, "test"))
