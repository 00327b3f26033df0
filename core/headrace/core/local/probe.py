"""Asking a Kafka broker whether it is ready, over its wire protocol.

An open port is not enough: a broker that still waits to be registered accepts connections. Ready means that it answers
a Metadata request (version 2) with the expected cluster id and itself among the live brokers.
Formats: https://kafka.apache.org/protocol, Metadata request and response v2. All integers are big-endian.

Ports on the loopback address.

Limitations: between choosing a port and the service's own bind another program may take it; services that chose their
ports themselves start again with others then.
"""

import contextlib
import socket
import struct
from dataclasses import dataclass

from headrace.core.local.errors import LocalServiceError

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


HOST = "127.0.0.1"


def is_free(port: int) -> bool:
    """True if a server could listen on `port` now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Java does: closed connections do not count
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def choose(count: int, *, fixed: int | None, remembered: list[int]) -> list[int]:
    """`count` free ports: those remembered while they are free, the first `fixed` if given.

    Raises:
        LocalServiceError: `fixed` is taken.
    """
    if fixed and not is_free(fixed):
        raise LocalServiceError(f"port {fixed} is taken by another program; name another port, or none to have a free one chosen")
    chosen: list[int] = []
    with contextlib.ExitStack() as held:  # held open until all are known, so that they differ
        for place in range(count):
            wish = fixed if place == 0 and fixed else next(iter(remembered[place : place + 1]), None)
            if wish and wish not in chosen and (wish == fixed or is_free(wish)):
                chosen.append(wish)
                continue
            probe = held.enter_context(socket.socket())
            probe.bind((HOST, 0))
            chosen.append(probe.getsockname()[1])
    return chosen
