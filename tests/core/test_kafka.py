"""Kafka settings become client arguments; what is wrong with them is said in words."""

import socket
import ssl
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer
from pydantic import SecretStr

from headrace.core.kafka import KafkaUnavailableError, client_options, plain_errors, require_bootstrap
from headrace.core.settings import KafkaSettings, Settings
from headrace.core.topic_admin import partition_counts


def test_without_bootstrap_servers_the_error_says_what_to_set_or_start() -> None:
    with pytest.raises(KafkaUnavailableError, match=r"HEADRACE_KAFKA__BOOTSTRAP_SERVERS.*headrace up"):
        require_bootstrap(Settings(kafka=KafkaSettings()))
    assert require_bootstrap(Settings(kafka=KafkaSettings(bootstrap_servers="a:1,b:2"))) == "a:1,b:2"


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_sasl_over_tls_passes_mechanism_user_and_password(mechanism: str) -> None:
    options = client_options(
        KafkaSettings.model_validate(
            {
                "bootstrap_servers": "broker:9093",
                "security_protocol": "SASL_SSL",
                "sasl_mechanism": mechanism,
                "sasl_username": "user",
                "sasl_password": SecretStr("secret"),
            }
        ),
        "me",
    )
    context = options.pop("ssl_context")
    assert isinstance(context, ssl.SSLContext)
    assert context.check_hostname
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert options == {
        "bootstrap_servers": "broker:9093",
        "client_id": "me",
        "request_timeout_ms": 40_000,
        "metadata_max_age_ms": 10_000,
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": mechanism,
        "sasl_plain_username": "user",
        "sasl_plain_password": "secret",
    }


async def test_the_client_accepts_the_options_of_every_protocol() -> None:
    sasl = {"sasl_mechanism": "SCRAM-SHA-512", "sasl_username": "u", "sasl_password": "p"}
    for protocol in ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"):
        settings = KafkaSettings.model_validate({"bootstrap_servers": "b:1", "security_protocol": protocol} | sasl)
        AIOKafkaConsumer(**client_options(settings, "me"))


def test_host_names_are_checked_unless_switched_off() -> None:
    options = client_options(KafkaSettings(bootstrap_servers="b:1", security_protocol="SSL", ssl_check_hostname=False), "me")
    assert not options["ssl_context"].check_hostname


def test_a_certificate_file_that_is_missing_or_no_pem_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "ca.pem"
    with pytest.raises(KafkaUnavailableError, match=r"kafka\.ssl_\*: .*ca\.pem"):
        client_options(KafkaSettings(bootstrap_servers="b:1", security_protocol="SSL", ssl_cafile=missing), "me")
    missing.write_text("not a certificate")
    with pytest.raises(KafkaUnavailableError, match=r"ca\.pem.*readable PEM"):
        client_options(KafkaSettings(bootstrap_servers="b:1", security_protocol="SSL", ssl_cafile=missing), "me")


async def test_nobody_listening_is_said_with_the_address() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(KafkaUnavailableError, match=rf"Kafka at {address} does not answer"):
        await partition_counts(client_options(KafkaSettings(bootstrap_servers=address), "me"))


def test_other_errors_pass_through_plain_errors() -> None:
    with pytest.raises(KeyError), plain_errors({"bootstrap_servers": "b:1", "security_protocol": "PLAINTEXT"}):
        raise KeyError("mine")
