"""Connecting to Kafka: settings to aiokafka's arguments, and its failures as sentences.

Guarantees: a missing address, an unreadable certificate and an unreachable broker each say what to set or to start; passwords
leave their `SecretStr` here only and enter no message. Limitations: GSSAPI and OAUTHBEARER.
"""

import asyncio
import logging
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiokafka import AIOKafkaProducer
from aiokafka.errors import (
    AuthenticationFailedError,
    IllegalSaslStateError,
    KafkaConnectionError,
    KafkaError,
    KafkaTimeoutError,
    RequestTimedOutError,
    SaslAuthenticationFailed,
    UnsupportedSaslMechanismError,
)

from headrace.core.errors import OutageError
from headrace.core.outages import said
from headrace.core.settings import KafkaSettings, Settings

logger = logging.getLogger(__name__)

_abandoned: set["asyncio.Task[None]"] = set()
"""Stops that Kafka did not answer in time. asyncio itself keeps only weak references to tasks."""

ClientOptions = dict[str, Any]
"""Keyword arguments that aiokafka's consumer, producer and admin client share."""

METADATA_AGE_MS = 10_000
"""A client asks again for topics and leaders after this long. With aiokafka's default a group is without partitions for five minutes if its
leader has no metadata of the topic, as may happen when the broker restarts."""


class KafkaUnavailableError(OutageError):
    """Kafka can't be reached or refuses us; says where, why and what to do."""


def require_bootstrap(settings: Settings) -> str:
    """The bootstrap servers of the settings.

    Raises:
        KafkaUnavailableError: none are set.
    """
    return _bootstrap(settings.kafka)


def client_options(kafka: KafkaSettings, client_id: str) -> ClientOptions:
    """Arguments for `AIOKafkaConsumer(**options)`, `AIOKafkaProducer(**options)` and `AIOKafkaAdminClient(**options)`.

    Reads the certificate files. Without `bootstrap_servers` the error comes here, not from a client that tries localhost.

    Raises:
        KafkaUnavailableError: no bootstrap servers, or a certificate or key file that can't be used.
    """
    options: ClientOptions = {
        "bootstrap_servers": _bootstrap(kafka),
        "client_id": client_id,
        "request_timeout_ms": kafka.request_timeout_ms,
        "metadata_max_age_ms": METADATA_AGE_MS,
        "security_protocol": kafka.security_protocol,
    }
    if kafka.security_protocol.endswith("SSL"):
        options["ssl_context"] = _ssl_context(kafka)
    if kafka.security_protocol.startswith("SASL"):
        options["sasl_mechanism"] = kafka.sasl_mechanism
        options["sasl_plain_username"] = kafka.sasl_username
        options["sasl_plain_password"] = kafka.sasl_password.get_secret_value() if kafka.sasl_password else None
    return options


@contextmanager
def plain_errors(options: ClientOptions) -> Iterator[None]:
    """Turn aiokafka's connection failures inside the block into `KafkaUnavailableError` with the address."""
    where = options["bootstrap_servers"]
    try:
        yield
    except (AuthenticationFailedError, SaslAuthenticationFailed, IllegalSaslStateError, UnsupportedSaslMechanismError) as error:
        raise KafkaUnavailableError(
            f"Kafka at {where} refused the login ({type(error).__name__}): check security_protocol, sasl_mechanism, user and password"
        ) from error
    except (KafkaConnectionError, KafkaTimeoutError, RequestTimedOutError) as error:
        raise KafkaUnavailableError(
            f"Kafka at {where} does not answer ({error}): is it running, is the address right, and does security_protocol "
            f"({options['security_protocol']}) fit its listener?"
        ) from error
    except KafkaError as error:
        raise KafkaUnavailableError(f"Kafka at {where}: {said(error)}") from error


async def stop_producer(producer: AIOKafkaProducer, seconds: float) -> None:
    """Flush and disconnect a producer. What Kafka does not acknowledge within `seconds` is dropped.

    `stop` waits for records that aiokafka retries without end. After the limit the connections are closed under it. Limitations: the
    task stays until the event loop ends, and a record may still arrive if Kafka returns before that.
    """
    stopping = asyncio.create_task(producer.stop(), name="stop of a Kafka producer")
    _abandoned.add(stopping)
    stopping.add_done_callback(_stopped)
    await asyncio.wait({stopping}, timeout=seconds)
    if not stopping.done():
        logger.warning("Kafka did not acknowledge the last records of a producer within %g s: they are dropped", seconds)
        await producer.client.close()


def _stopped(task: "asyncio.Task[None]") -> None:
    _abandoned.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.warning("a Kafka producer did not stop cleanly: %r", error)


def _bootstrap(kafka: KafkaSettings) -> str:
    if not kafka.bootstrap_servers:
        raise KafkaUnavailableError(
            "no Kafka is configured: set HEADRACE_KAFKA__BOOTSTRAP_SERVERS=host:port, or run `headrace up`, "
            "which starts one and says its address"
        )
    return kafka.bootstrap_servers


def _ssl_context(kafka: KafkaSettings) -> ssl.SSLContext:
    password = kafka.ssl_keyfile_password.get_secret_value() if kafka.ssl_keyfile_password else None
    try:
        context = ssl.create_default_context(cafile=kafka.ssl_cafile)
        context.check_hostname = kafka.ssl_check_hostname
        if kafka.ssl_certfile is not None:
            # OpenSSL asks on the terminal where a password is missing: an empty one makes it an error instead.
            context.load_cert_chain(kafka.ssl_certfile, kafka.ssl_keyfile, password or "")
    except OSError as error:  # ssl.SSLError is one too
        files = [str(file) for file in (kafka.ssl_cafile, kafka.ssl_certfile, kafka.ssl_keyfile) if file is not None]
        raise KafkaUnavailableError(
            f"kafka.ssl_*: {error.strerror or error} with {', '.join(files)}: each must be a readable PEM file, "
            "the key must fit the certificate, and ssl_keyfile_password must open it"
        ) from error
    return context
