"""A proxy in front of a real S3 server: it cuts answers off at a chosen byte, or answers writes itself with an error.

One request a connection: the proxy adds `Connection: close` to what it passes on. Everything else passes as it is.
"""

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from urllib.parse import urlsplit

from headrace.core.local import LocalS3
from headrace.core.settings import S3Settings

_WRITES = (b"PUT ", b"POST ", b"DELETE ")


class S3Proxy:
    """Passes requests on to a server.

    Args:
        endpoint_url: Of the server.
    """

    def __init__(self, endpoint_url: str) -> None:
        where = urlsplit(endpoint_url)
        assert where.hostname is not None
        assert where.port is not None
        self._upstream = (where.hostname, where.port)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.endpoint_url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        self.cut: int | None = None
        """Bytes of each answer that pass; None: all."""
        self.refused: tuple[int, str] | None = None
        """Status and S3 error code of all writes; None: they pass."""
        self.answers: list[bytearray] = []
        """Of the server, as far as they were passed on."""
        self.refusals = 0
        self.settings = S3Settings(endpoint_url=self.endpoint_url)

    @classmethod
    def of(cls, server: LocalS3) -> "S3Proxy":
        """Before a local server, with settings for clients of the proxy."""
        proxy = cls(server.endpoint_url)
        proxy.settings = S3Settings.model_validate(
            {"endpoint_url": proxy.endpoint_url, "access_key_id": server.access_key, "secret_access_key": server.secret_key}
        )
        return proxy

    def __enter__(self) -> "S3Proxy":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.close()

    @contextmanager
    def refusing(self, status: int, code: str) -> Iterator[None]:
        """Answer writes with this error."""
        self.refused = (status, code)
        try:
            yield
        finally:
            self.refused = None

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._pass, args=(client,), daemon=True).start()

    def _pass(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head:
                if not (data := client.recv(65536)):
                    return
                head += data
            if self.refused is not None and head.startswith(_WRITES):
                self.refusals += 1
                client.sendall(_refusal(*self.refused))
                client.shutdown(socket.SHUT_WR)
                while client.recv(65536):  # a connection that is closed before all is read loses the answer
                    pass
                return
            first, rest = head.split(b"\r\n", 1)
            with socket.create_connection(self._upstream) as server:
                server.sendall(first + b"\r\nConnection: close\r\n" + rest)
                threading.Thread(target=_pump, args=(client, server), daemon=True).start()
                self._answer(server, client)

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        whole = bytearray()
        self.answers.append(whole)
        while data := server.recv(65536):
            left = len(data) if self.cut is None else max(0, self.cut - len(whole))
            whole += data
            client.sendall(data[:left])
            if left < len(data):
                break
        client.shutdown(socket.SHUT_RDWR)


def _pump(client: socket.socket, server: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := client.recv(65536):
            server.sendall(data)


def _refusal(status: int, code: str) -> bytes:
    body = f"<Error><Code>{code}</Code><Message>refused by the test</Message></Error>".encode()
    return b"HTTP/1.1 %d Refused\r\nContent-Type: application/xml\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (
        status,
        len(body),
        body,
    )
