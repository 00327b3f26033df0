"""A FastStream broker that reaches Kafka as our settings say.

Guarantees: address, security, client id and time-outs are those that every other part of Headrace uses, with the same errors at the
door. Limitations: FastStream's own settings for them; the process that needs others builds a `KafkaBroker` and includes `Events.router`
in it.
"""

import logging

from faststream.kafka import KafkaBroker
from faststream.security import BaseSecurity, SASLPlaintext, SASLScram256, SASLScram512

from headrace.core.kafka import METADATA_AGE_MS, client_options, require_bootstrap
from headrace.core.settings import Settings

CLIENT_ID = "headrace-events"


def event_broker(settings: Settings, client_id: str = CLIENT_ID) -> KafkaBroker:
    """A broker that is not started yet. Its subscribers choose read_committed themselves (those of `Events` do).

    Raises:
        KafkaUnavailableError: no bootstrap servers, or a certificate that can't be used.
    """
    options = client_options(settings.kafka, client_id)
    return KafkaBroker(
        require_bootstrap(settings),
        client_id=client_id,
        request_timeout_ms=settings.kafka.request_timeout_ms,
        metadata_max_age_ms=METADATA_AGE_MS,
        security=_security(settings, options.get("ssl_context")),
        enable_idempotence=True,
        log_level=logging.DEBUG,  # of "Received" and "Processed", two lines a record; failures are logged as errors all the same
    )


def _security(settings: Settings, ssl_context: object) -> BaseSecurity:
    kafka = settings.kafka
    use_ssl = kafka.security_protocol.endswith("SSL")
    context = {"ssl_context": ssl_context, "use_ssl": use_ssl}
    if not kafka.security_protocol.startswith("SASL"):
        return BaseSecurity(**context)  # type: ignore[arg-type]  # the context comes out of untyped client options
    kinds = {"PLAIN": SASLPlaintext, "SCRAM-SHA-256": SASLScram256, "SCRAM-SHA-512": SASLScram512}
    # The settings refuse SASL without mechanism, user and password.
    kind = kinds[str(kafka.sasl_mechanism)]
    password = kafka.sasl_password.get_secret_value() if kafka.sasl_password else ""
    return kind(username=str(kafka.sasl_username), password=password, **context)  # type: ignore[arg-type]  # as above
