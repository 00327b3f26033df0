"""The producer for runtimes without asyncio: the same object, on an event loop of its own in a background thread.

    with SyncTrajectoryProducer(bootstrap_servers="localhost:9092", model_id=model) as producer:
        report = producer.send(group)

Guarantees: as `TrajectoryProducer`; may be used from many threads at once. Limitations: use across `fork` (threads do not survive it).
"""

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from headrace.core.settings import Settings
from headrace.producers.errors import ProducerClosedError
from headrace.producers.outgoing import DeliveryReport, Group
from headrace.producers.producer import Delivery, TrajectoryProducer
from headrace.producers.signals import termination
from headrace.schemas.training import SftConfig, TrainConfig

T = TypeVar("T")


class SyncTrajectoryProducer:
    """`TrajectoryProducer` with calls that block. Arguments are the same."""

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        bootstrap_servers: str | None = None,
        model_id: str | None = None,
        source: str = "headrace-producer",
        flush_on_sigterm: bool | None = None,
    ) -> None:
        # SIGTERM is registered from the caller's thread: Python allows it from the main thread only.
        self._make = partial(
            TrajectoryProducer, settings, bootstrap_servers=bootstrap_servers, model_id=model_id, source=source, flush_on_sigterm=False
        )
        self._flush_on_sigterm = flush_on_sigterm
        self._producer: TrajectoryProducer | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="headrace-producer", daemon=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def start(self) -> None:
        """Connect; see `TrajectoryProducer.start`."""
        self._thread.start()
        try:
            self._producer = self._wait(self._started())
        except BaseException:
            self._stop_loop()
            raise
        if self._flush_on_sigterm is not False:
            termination.add(self._flush_from_anywhere, replace=self._flush_on_sigterm is True)

    def close(self) -> None:
        """Take no more, flush, disconnect, end the thread."""
        if self._producer is None:
            return
        termination.remove(self._flush_from_anywhere)
        try:
            self._wait(self._producer.close())
        finally:
            self._producer = None
            self._stop_loop()

    def flush(self) -> None:
        """See `TrajectoryProducer.flush`."""
        self._wait(self._open().flush())

    def send(self, group: Group, model_id: str | None = None, *, traceparent: str | None = None) -> DeliveryReport:
        """See `TrajectoryProducer.send`; an interrupt (Ctrl-C) leaves the outcome unknown."""
        return self._wait(self._open().send(group, model_id, traceparent=traceparent))

    def submit(self, group: Group, model_id: str | None = None, *, traceparent: str | None = None) -> "Future[DeliveryReport]":
        """See `TrajectoryProducer.submit`: blocks while the buffer is full, returns a future to call `result()` on later."""
        return self._watch(self._wait(_delivery(self._open().submit(group, model_id, traceparent=traceparent))))

    def try_send(self, group: Group, model_id: str | None = None, *, traceparent: str | None = None) -> "Future[DeliveryReport]":
        """See `TrajectoryProducer.try_send`: waits for no room, only for the producer's thread to take the call."""
        producer = self._open()

        async def attempt() -> tuple[Delivery]:
            return (producer.try_send(group, model_id, traceparent=traceparent),)

        return self._watch(self._wait(attempt()))

    def submit_job(
        self,
        groups: Sequence[Group],
        config: TrainConfig | None = None,
        job_id: str | None = None,
        model_id: str | None = None,
        *,
        sft: SftConfig | None = None,
        kind: Literal["rl", "sft"] | None = None,
    ) -> str:
        """See `TrajectoryProducer.submit_job`."""
        return self._wait(self._open().submit_job(groups, config, job_id, model_id, sft=sft, kind=kind))

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    async def _started(self) -> TrajectoryProducer:
        producer = self._make()
        await producer.start()
        return producer

    def _open(self) -> TrajectoryProducer:
        if self._producer is None:
            raise ProducerClosedError("the producer is not started, or closed: use it inside `with`")
        return self._producer

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _watch(self, delivery: tuple[Delivery]) -> "Future[DeliveryReport]":
        return asyncio.run_coroutine_threadsafe(_report(delivery[0]), self._loop)

    def _flush_from_anywhere(self) -> "Future[None]":
        return asyncio.run_coroutine_threadsafe(self._open().flush(), self._loop)

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


async def _delivery(submitted: Coroutine[Any, Any, Delivery]) -> tuple[Delivery]:
    """A task inside a tuple: awaiting the coroutine that returns a bare task is easily mistaken for awaiting the task."""
    return (await submitted,)


async def _report(delivery: Delivery) -> DeliveryReport:
    return await asyncio.shield(delivery)
