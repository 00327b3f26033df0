"""One engine process: a base model, its followers of Kafka, and the HTTP server, on one event loop.

Guarantees: it listens before its first ack says where; SIGTERM and Ctrl-C let requests that run end (for `_GRACE_SECONDS`), take the acks
back and end the process; whatever ends one of its parts ends the engine with that error. Gives up: requests that take longer than that;
they end at their next token.
"""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from headrace.consumers.batching import Batcher
from headrace.consumers.model_watch import ModelWatch
from headrace.consumers.policy_engine import PolicyEngine
from headrace.consumers.served_models import EngineIdentity, ServedModels
from headrace.core.errors import HeadraceError
from headrace.core.settings import Settings
from headrace.engine.app import engine_app

logger = logging.getLogger(__name__)

_GRACE_SECONDS = 10
_ANYWHERE = {"0.0.0.0", "::", ""}  # noqa: S104 - compared with, not bound to


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What an engine is started with."""

    base_model: str
    """Name in the catalogue."""
    models: tuple[str, ...] = ()
    """Only these ids; empty: all of the base model."""
    deployment: str | None = None
    """Only what names it."""
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


class EngineProcess:
    """An engine, from the base model to the last request.

    Args:
        settings: All settings.
        options: What it is started with.
        listening: Told the URL once it listens.

    Raises:
        HeadraceError: the base model is not in the catalogue.
    """

    def __init__(self, settings: Settings, options: EngineOptions, listening: Callable[[str], None] = lambda _: None) -> None:
        entry = settings.base_models.get(options.base_model)
        if entry is None:
            there = ", ".join(sorted(settings.base_models)) or "none: name some under base_models in the file that HEADRACE_CONFIG names"
            raise HeadraceError(f"base model {options.base_model!r} is not in the catalogue; there are {there}")
        self._entry = entry
        self._settings = settings
        self._options = options
        self._listening = listening
        self._stopping = asyncio.Event()
        self._interrupted = False

    def stop(self) -> None:
        """Let `run` return."""
        self._stopping.set()

    async def run(self) -> None:
        """Serve until `stop`, SIGTERM or SIGINT.

        Raises:
            HeadraceError: the port is taken, or Kafka can't be reached.
            KeyboardInterrupt: after a clean end, if it was SIGINT.
        """
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.stop)
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        options = self._options
        with _listen(options.host, options.port) as listener:
            port = int(listener.getsockname()[1])
            host = socket.gethostname() if options.host in _ANYWHERE else options.host
            url = options.advertise_url or f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
            identity = EngineIdentity(
                engine_id=options.engine_id or f"{socket.gethostname()}-{port}", base_url=url, deployment=options.deployment
            )
            engine = await asyncio.to_thread(
                PolicyEngine, self._entry.path, gguf_file=self._entry.gguf_file, threads=options.threads, device=options.device
            )
            await self._serve(engine, identity, listener)
        if self._interrupted:
            raise KeyboardInterrupt

    async def _serve(self, engine: PolicyEngine, identity: EngineIdentity, listener: socket.socket) -> None:
        options, settings = self._options, self._settings
        watch = ModelWatch(
            settings,
            options.base_model,
            models=options.models,
            deployment=options.deployment,
            client_id=f"headrace-engine-{identity.engine_id}",
        )
        batcher = Batcher(engine)
        served = ServedModels(
            settings,
            options.base_model,
            identity=identity,
            watch=watch,
            engine=engine,
            batcher=batcher,
            keep=options.versions,
            cache_dir=options.cache_dir,
        )
        server = _Server(
            uvicorn.Config(
                engine_app(engine, batcher, served),
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=_GRACE_SECONDS,
            )
        )
        try:
            await served.start()
            listening = asyncio.create_task(server.serve(sockets=[listener]), name="http")
            sampling = asyncio.create_task(batcher.run(), name="batches")
            following = [asyncio.create_task(watch.run(), name="watch"), asyncio.create_task(served.run(), name="models")]
            stopping = asyncio.create_task(self._stopping.wait())
            self._listening(identity.base_url)
            logger.info("engine %s serves %s at %s", identity.engine_id, options.base_model, identity.base_url)
            parts = [listening, sampling, *following]
            await asyncio.wait([*parts, stopping], return_when=asyncio.FIRST_COMPLETED)
            failed = next((part for part in parts if part.done()), None)
            server.should_exit = True
            for task in (*following, stopping):
                task.cancel()
            await asyncio.gather(*following, stopping, return_exceptions=True)
            await served.stop()
            await asyncio.gather(listening, return_exceptions=True)
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)
            if failed is not None:
                failed.result()
        finally:
            await batcher.close()

    def _interrupt(self) -> None:
        self._interrupted = True
        self.stop()


class _Server(uvicorn.Server):
    """Uvicorn without its own handling of signals: the engine ends itself, in its order."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


@contextlib.contextmanager
def _listen(host: str, port: int) -> Generator[socket.socket]:
    """A socket that takes connections already: nobody who reads the first ack is refused."""
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=2048)
    except OSError as error:
        raise HeadraceError(f"can't listen on {host}:{port} ({error.strerror or error}): choose another --host or --port") from error
    with listener:
        yield listener
