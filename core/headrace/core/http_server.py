"""What the HTTP servers of Headrace (gateway, engine) have in common: how uvicorn is set up, and whose pages may call.

Guarantees: a connection whose request head does not come in whole within a bound is closed, also one that says nothing; a request body that
is not read is thrown away for a short time after the answer, then the connection is closed; every answer has `X-Content-Type-Options:
nosniff`, also those that the server makes itself. Limitations: HTTP/1.1 only; the server that serves does not count connections.
"""

import asyncio
import ipaddress
from collections.abc import Collection
from typing import Any
from urllib.parse import urlsplit

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0
"""For the head of a request to come in whole."""
_LEFTOVER_SECONDS = 5.0
"""For which a body that no one reads is thrown away: its sender can read the answer meanwhile."""
_NO_SNIFF = ("X-Content-Type-Options", "nosniff")


def server_config(app: Any, *, grace_seconds: int, head_seconds: float = HEAD_SECONDS) -> uvicorn.Config:  # noqa: ANN401 - any ASGI app
    """Uvicorn's configuration for an app.

    Args:
        app: The ASGI app.
        grace_seconds: For which requests under way may continue when the server ends.
        head_seconds: Within which the head of a request comes in whole.
    """

    class Protocol(_PatientProtocol):
        patience = head_seconds

    return uvicorn.Config(
        app,
        http=Protocol,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=grace_seconds,
        server_header=False,
        headers=[_NO_SNIFF],
    )


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_of(netloc: str) -> str:
    """The host in `host:port`; empty where there is none."""
    try:
        return urlsplit(f"//{netloc}").hostname or ""
    except ValueError:  # half of an IPv6 address
        return ""


def is_foreign_page(host: str, origin: str | None, own: Collection[str] = ()) -> bool:
    """Whether a browser sends this request for a page that another server made.

    Args:
        host: Header `Host`. A page that leads a name of its own to this machine has that name here.
        origin: Header `Origin`; None: there is none, as in requests that no browser sends.
        own: Names by which this server is known, next to `localhost` and addresses.
    """
    if origin is None:
        return False
    try:
        page = urlsplit(origin).netloc
    except ValueError:
        return True
    name = host_of(host)
    return page.lower() != host.lower() or not (name in own or name == "localhost" or _is_address(name))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class _PatientProtocol(H11Protocol):
    """Uvicorn's, which waits without an end for the head of a request, and for a body that it throws away."""

    patience = HEAD_SECONDS
    _closing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._close_in(self.patience)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stay()
        elif self._closing is None:  # the beginning of a head
            self._close_in(self.patience)

    def on_response_complete(self) -> None:
        self._stay()
        super().on_response_complete()
        if self.cycle.response_complete and self.conn.their_state is h11.SEND_BODY:
            self._close_in(_LEFTOVER_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stay()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:  # otherwise an answer has begun
            self.transport.write(
                b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n"
                + f"{_NO_SNIFF[0]}: {_NO_SNIFF[1]}\r\nContent-Length: {len(msg)}\r\n\r\n{msg}".encode("ascii")
            )
        self.transport.close()

    def _close_in(self, seconds: float) -> None:
        self._stay()
        self._closing = self.loop.call_later(seconds, self.transport.close)

    def _stay(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None
