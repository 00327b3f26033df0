"""Running the gateway: uvicorn in this process, until SIGTERM or Ctrl-C.

Guarantees: without tokens it listens on loopback only and says so; requests that run when it is asked to end are answered first, for
`_GRACE_SECONDS` at most. Limitations: TLS; put a proxy in front where it leaves the machine.
"""

import socket
from collections.abc import Callable

import uvicorn

from headrace.core.errors import HeadraceError
from headrace.core.http_server import is_loopback, server_config
from headrace.core.kafka import client_options
from headrace.core.kafka_outage import folding
from headrace.core.settings import Settings
from headrace.gateway.app import create_app
from headrace.gateway.gate import Gate
from headrace.gateway.rlor.tracking import tracking
from headrace.gateway.tokens import Tokens

_GRACE_SECONDS = 20
_BACKLOG = 2048


class ListenError(HeadraceError):
    """It can't listen there; says why."""


def check_listening(settings: Settings) -> None:
    """Refuse to be open to everybody.

    Raises:
        ListenError: no tokens, and an address that others reach.
    """
    host = settings.gateway.host
    if not Tokens(settings.gateway).configured and not is_loopback(host):
        raise ListenError(
            f"gateway.host={host} is reached by others and no token is configured: make one (`headrace tokens create --account …`) and "
            "name its file by gateway.tokens_file, or listen on 127.0.0.1"
        )


def bind(settings: Settings) -> socket.socket:
    """The socket that it will listen on.

    Raises:
        ListenError: taken, or no such address.
    """
    host, port = settings.gateway.host, settings.gateway.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol by name: asyncio sends at once (TCP_NODELAY) on connections of such a socket only, and 40 ms late on others.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)  # from now on, so that who is told the address is not refused
    except OSError as error:
        listener.close()
        raise ListenError(f"can't listen on {host}:{port}: {error.strerror}; set gateway.host and gateway.port") from error
    return listener


async def serve(settings: Settings, listener: socket.socket, *, ready: Callable[[], None] = lambda: None) -> None:
    """Serve until a signal ends it; `ready` is called when requests are answered.

    Raises:
        HeadraceError: Kafka can't be reached at start, or its topics are missing.
    """
    app = create_app(settings)
    gate: Gate = app.state.gate
    kafka = client_options(settings.kafka, "headrace-gateway")
    with folding(lambda: kafka):
        async with gate, tracking(gate):
            ready()
            await Server(server_config(app, grace_seconds=_GRACE_SECONDS), gate).serve(sockets=[listener])


class Server(uvicorn.Server):
    """Uvicorn's, which tells those who stream without an end that it ends; it would wait for them.

    Args:
        config: Uvicorn's.
        gate: Of the app.
    """

    def __init__(self, config: uvicorn.Config, gate: Gate) -> None:
        super().__init__(config)
        self._gate = gate

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End."""
        self._gate.ending.set()
        await super().shutdown(sockets)
