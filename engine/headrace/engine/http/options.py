"""What an engine is started with, and what can be said to be wrong with it before torch is loaded."""

import contextlib
import socket
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from headrace.core.errors import HeadraceError
from headrace.core.settings import BaseModelEntry, Settings

_ANYWHERE = {"0.0.0.0", "::", ""}  # noqa: S104 - compared with, not bound to


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Of one engine."""

    base_model: str
    """Name in the catalogue."""
    models: tuple[str, ...] = ()
    """Only these, by id or name; empty: all of the base model."""
    deployment: str | None = None
    """Only what names it, or what it is asked to load."""
    engine_id: str | None = None
    """Null: host name and port."""
    host: str = "127.0.0.1"
    port: int = 8200
    """0: any free one."""
    advertise_url: str | None = None
    """Where others reach it, with the `/v1`; null: host and port."""
    versions: int = 2
    """Versions of each model that are held."""
    device: str = "cpu"
    threads: int | None = None
    cache_dir: Path | None = None

    def url(self, listener: socket.socket) -> str:
        """Where others reach it."""
        host = socket.gethostname() if self.host in _ANYWHERE else self.host
        return self.advertise_url or f"http://{f'[{host}]' if ':' in host else host}:{_port(listener)}/v1"

    def names(self, listener: socket.socket) -> frozenset[str]:
        """Host names under which it is known."""
        return frozenset({socket.gethostname().lower(), urlsplit(self.url(listener)).hostname or ""} - {""})

    def name(self, listener: socket.socket) -> str:
        """Its id."""
        return self.engine_id or f"{socket.gethostname()}-{_port(listener)}"


def base_model_entry(settings: Settings, name: str) -> BaseModelEntry:
    """A base model of the catalogue.

    Raises:
        HeadraceError: it is not there; says what is.
    """
    entry = settings.base_models.get(name)
    if entry is None:
        there = ", ".join(sorted(settings.base_models)) or "none: name some under base_models in the file that HEADRACE_CONFIG names"
        raise HeadraceError(f"base model {name!r} is not in the catalogue; there are {there}")
    return entry


@contextlib.contextmanager
def listen(host: str, port: int) -> Generator[socket.socket]:
    """A socket that takes connections already: no one who reads the first ack is refused.

    Raises:
        HeadraceError: the port is taken, or the host is not this machine's.
    """
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=2048)
    except OSError as error:
        raise HeadraceError(f"can't listen on {host}:{port} ({error.strerror or error}): choose another --host or --port") from error
    with listener:
        yield listener


def _port(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])
