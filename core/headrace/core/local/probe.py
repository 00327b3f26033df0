"""Asking a Kafka broker whether it is ready, over its wire protocol.

An open port is not enough: a broker that still waits to be registered accepts connections. Ready means that it answers
a Metadata request (version 2) with the expected cluster id and itself among the live brokers.
Formats: https://kafka.apache.org/protocol, Metadata request and response v2. All integers are big-endian.
"""

import socket
import struct
from dataclasses import dataclass

METADATA = 3
VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAnswer:
    """What a broker says of its cluster."""

    cluster_id: str | None
    """Set by formatting; tells one cluster from another."""
    ports: tuple[int, ...]
    """Advertised ports of the live brokers; empty until the first is registered."""


class _Reader:
    """Reads Kafka's primitive types from bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def integer(self, form: str) -> int:
        (value,) = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return int(value)

    def string(self) -> str | None:
        if (size := self.integer(">h")) < 0:
            return None
        text = self._data[self._at : self._at + size].decode()
        self._at += size
        return text


def ask(host: str, port: int, timeout_s: float) -> ClusterAnswer | None:
    """The broker's answer, or None if there is none yet: no connection, no answer in time, or not Kafka's."""
    client = b"headrace"
    no_topics = struct.pack(">i", 0)
    request = struct.pack(">hhih", METADATA, VERSION, 1, len(client)) + client + no_topics
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as connection:
            connection.sendall(struct.pack(">i", len(request)) + request)
            with connection.makefile("rb") as stream:
                (size,) = struct.unpack(">i", stream.read(4))
                return _parse(stream.read(size))
    except (OSError, struct.error, UnicodeDecodeError):
        return None


def _parse(body: bytes) -> ClusterAnswer:
    reader = _Reader(body)
    reader.integer(">i")  # correlation id
    ports = []
    for _ in range(reader.integer(">i")):
        reader.integer(">i")  # node id
        reader.string()  # host
        ports.append(reader.integer(">i"))
        reader.string()  # rack
    return ClusterAnswer(cluster_id=reader.string(), ports=tuple(ports))
