"""A broker that is spoken to in TLS, with a certificate of its own making."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from headrace.core.local import LocalBroker
from headrace.core.settings import KafkaSettings


def write_certificate(folder: Path) -> tuple[Path, Path]:
    """A key with its self-signed certificate for 127.0.0.1, and the certificate alone."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    public = certificate.public_bytes(serialization.Encoding.PEM)
    secret = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    both, alone = folder / "broker.pem", folder / "ca.pem"
    both.write_bytes(secret + public)
    alone.write_bytes(public)
    return both, alone


@contextmanager
def tls_broker(folder: Path) -> Iterator[KafkaSettings]:
    """How to reach its TLS listener."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    port, controller, secure = (one.getsockname()[1] for one in held)
    for one in held:
        one.close()
    both, alone = write_certificate(folder)
    overrides = {
        "listeners": f"CLIENT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller},SECURE://127.0.0.1:{secure}",
        "advertised.listeners": f"CLIENT://127.0.0.1:{port},SECURE://127.0.0.1:{secure}",
        "controller.quorum.voters": f"1@127.0.0.1:{controller}",
        "listener.security.protocol.map": "CLIENT:PLAINTEXT,CONTROLLER:PLAINTEXT,SECURE:SSL",
        "listener.name.secure.ssl.keystore.type": "PEM",
        "listener.name.secure.ssl.keystore.location": str(both),
    }
    with LocalBroker(folder / "kafka", port, overrides=overrides):
        yield KafkaSettings(bootstrap_servers=f"127.0.0.1:{secure}", security_protocol="SSL", ssl_cafile=alone)
