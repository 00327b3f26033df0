"""One engine process: a base model, its followers of Kafka, and the HTTP server, on one event loop.

Guarantees: it listens before its first ack says where; SIGTERM and Ctrl-C let requests that run end (for `_GRACE_SECONDS`), take the acks
back and end the process; whatever ends one of its parts ends the engine with that error. Limitations: requests that take longer than that;
they end at their next token.
"""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Generator, Sequence

import uvicorn

from headrace.core.http_server import is_loopback, server_config
from headrace.core.kafka import client_options
from headrace.core.kafka_outage import folding
from headrace.core.model_names import known_model_id
from headrace.core.settings import Settings
from headrace.engine.http.app import engine_app
from headrace.engine.http.options import EngineOptions, base_model_entry
from headrace.engine.sampling.batching import Batcher
from headrace.engine.sampling.policy_engine import PolicyEngine
from headrace.engine.serving.model_watch import ModelWatch
from headrace.engine.serving.served_models import EngineIdentity, ServedModels

logger = logging.getLogger(__name__)

_GRACE_SECONDS = 10


class EngineProcess:
    """An engine, from the base model to the last request.

    Args:
        settings: All settings.
        options: What it is started with.
        listener: Where it listens, from `listen`.

    Raises:
        HeadraceError: the base model is not in the catalogue.
    """

    def __init__(self, settings: Settings, options: EngineOptions, listener: socket.socket) -> None:
        self._entry = base_model_entry(settings, options.base_model)
        self._settings = settings
        self._options = options
        self._listener = listener
        self._stopping = asyncio.Event()
        self._interrupted = False

    def stop(self) -> None:
        """Let `run` return."""
        self._stopping.set()

    async def run(self) -> None:
        """Serve until `stop`, SIGTERM or SIGINT.

        Raises:
            HeadraceError: Kafka can't be reached, or there is no such model as it should serve.
            KeyboardInterrupt: after a clean end, if it was SIGINT.
        """
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.stop)
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        options = self._options
        models = [await known_model_id(self._settings, wanted) for wanted in options.models]
        engine = await asyncio.to_thread(
            PolicyEngine, self._entry.path, gguf_file=self._entry.gguf_file, threads=options.threads, device=options.device
        )
        kafka = client_options(self._settings.kafka, "headrace-engine")
        with folding(lambda: kafka):
            await self._serve(engine, models)
        if self._interrupted:
            raise KeyboardInterrupt

    async def _serve(self, engine: PolicyEngine, models: Sequence[str]) -> None:
        options, settings, listener = self._options, self._settings, self._listener
        identity = EngineIdentity(engine_id=options.name(listener), base_url=options.url(listener), deployment=options.deployment)
        watch = ModelWatch(
            settings,
            options.base_model,
            models=models,
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
            server_config(
                engine_app(engine, batcher, served, only_local=is_loopback(options.host), names=options.names(listener)),
                grace_seconds=_GRACE_SECONDS,
            )
        )
        try:
            await served.start()
            listening = asyncio.create_task(server.serve(sockets=[listener]), name="http")
            sampling = asyncio.create_task(batcher.run(), name="batches")
            following = [asyncio.create_task(watch.run(), name="watch"), asyncio.create_task(served.run(), name="models")]
            stopping = asyncio.create_task(self._stopping.wait())
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
