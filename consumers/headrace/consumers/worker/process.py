"""The worker process: the lanes that the group gives it, one device, one tokenizing process, on one event loop.

Guarantees: the loop owns Kafka and does nothing that blocks. A lane that fails is claimed again, after a pause. SIGTERM and SIGINT release
all lanes and end the ranks before the process ends. Limitations: correctness does not depend on the group's membership (see `lane.py`).
"""

import asyncio
import logging
import signal
from collections.abc import Coroutine
from functools import partial

from headrace.consumers.worker.admission.pool import AdmissionPool
from headrace.consumers.worker.balancer import Balancer
from headrace.consumers.worker.base_models import base_source
from headrace.consumers.worker.lane import Lane
from headrace.consumers.worker.store_check import check_store
from headrace.consumers.worker.work_folder import WorkFolder
from headrace.consumers.worker.world import TrainerWorld, WorldLostError
from headrace.core.durability import durability
from headrace.core.errors import HeadraceError
from headrace.core.importing import keep_memory
from headrace.core.kafka import ClientOptions, client_options
from headrace.core.kafka_outage import folding, is_outage, kafka_back, kafka_problem, log_trouble
from headrace.core.settings import Settings
from headrace.core.store import open_store
from headrace.core.topic_admin import lane_count
from headrace.trainer.plan import StateKey

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 2.0


class Worker:
    """A trainer worker."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._store = open_store(settings.store.url, settings.s3)
        self._balancer = Balancer(settings)
        self._lanes: dict[int, asyncio.Task[None]] = {}
        self._owners: dict[int, Lane] = {}
        self._counted: set[StateKey] = set()
        """The states from which this process has begun a step that it counted: those batches have not ended it."""
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Release everything and return from `run`."""
        self._stopping.set()
        self._balancer.changed.set()

    async def run(self) -> None:
        """Work until `stop`, SIGTERM or SIGINT.

        Raises:
            WorldLostError: under a launcher, a rank ended or hung.
            StoreMisconfiguredError: the store is not the group's, or can't be used with these settings.
            HeadraceError: Kafka can't be reached, or the topics are missing or differ.
        """
        keep_memory()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        options = client_options(self._settings.kafka, "headrace-worker")
        with folding(lambda: options):
            await self._run(options)

    async def _run(self, options: ClientOptions) -> None:
        # Workers of one machine may share a folder in their settings: each works in one of its own below it.
        folder = await asyncio.to_thread(WorkFolder, self._settings.worker.work_dir.absolute())
        worker = self._settings.worker.model_copy(update={"work_dir": folder.path})
        self._settings = self._settings.model_copy(update={"worker": worker})
        # Before the first request to Kafka: the first step waits for their imports (seconds).
        pool = AdmissionPool(self._settings)
        world = TrainerWorld(self._settings, self._store)
        if len(self._settings.base_models) == 1:
            (entry,) = self._settings.base_models.values()
            world.preload(base_source(entry))
        try:
            await self._unless_stopping(self._join(options))
            lost = asyncio.create_task(self._stop_when_lost(world))
            while not self._stopping.is_set():
                await self._balancer.changed.wait()
                self._balancer.changed.clear()
                self._reconcile(pool, world)
            lost.cancel()
        finally:
            await self._release_all(options)
            await self._balancer.stop()
            await world.close()
            pool.close()
            await asyncio.to_thread(folder.remove)
        if world.lost.is_set():
            raise WorldLostError

    async def _join(self, options: ClientOptions) -> None:
        count = await lane_count(options, self._settings.topic_names, self._settings.groups_topic)
        await self._report_durability(options)
        await check_store(self._settings, self._store, options)
        await self._balancer.start()
        logger.info("worker of group %s on %d lanes", self._settings.worker.group, count)

    async def _unless_stopping(self, work: Coroutine[None, None, None]) -> None:
        """Await this; `stop` cancels it."""
        working, stopping = asyncio.create_task(work), asyncio.create_task(self._stopping.wait())
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait({working})
        if not working.cancelled():
            working.result()

    async def _report_durability(self, options: ClientOptions) -> None:
        """Log whether a power loss can rewind the ledger below published weights."""
        try:
            found = await durability(options, self._settings.topic_names)
        except HeadraceError as error:
            logger.warning("whether a power loss can take back committed steps is not known: %s", error)
        else:
            logger.log(logging.INFO if found.safe else logging.WARNING, "%s", found.text)

    async def _stop_when_lost(self, world: TrainerWorld) -> None:
        await world.lost.wait()
        logger.error("the world of ranks is broken, and its launcher must restart it: this worker ends")
        self.stop()

    def _reconcile(self, pool: AdmissionPool, world: TrainerWorld) -> None:
        """Start lanes that were given, cancel lanes that were taken. Lanes that stay are not touched (the kept-lane invariant)."""
        if self._stopping.is_set():
            return
        given = self._balancer.lanes
        for lane, task in list(self._lanes.items()):
            if lane not in given:
                task.cancel()
            if task.done():
                del self._lanes[lane], self._owners[lane]
                self._report(lane, task)
        for lane in given - self._lanes.keys():
            wanted = partial(self._is_given, lane)
            owner = Lane(lane, self._settings, store=self._store, pool=pool, world=world, wanted=wanted, counted=self._counted)
            task = asyncio.create_task(owner.run(), name=f"lane-{lane}")
            task.add_done_callback(self._lane_ended)
            self._lanes[lane], self._owners[lane] = task, owner

    def _is_given(self, lane: int) -> bool:
        return lane in self._balancer.lanes

    def _lane_ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or self._stopping.is_set():
            self._balancer.changed.set()
            return
        self._claiming_again = asyncio.create_task(self._claim_again())

    async def _claim_again(self) -> None:
        # After a pause: the cause may last.
        await asyncio.sleep(_RETRY_SECONDS)
        await kafka_back()
        self._balancer.changed.set()

    @staticmethod
    def _report(lane: int, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            # An error for a person says what to do. A defect needs its trace.
            trace = None if isinstance(error, HeadraceError) else error
            message = "lane %d ended and will be claimed again: %s"
            if is_outage(error):
                log_trouble(logger, logging.ERROR, error, message, lane, error)
            else:
                logger.error(message, lane, error if trace is None else repr(error), exc_info=trace)

    async def _release_all(self, options: ClientOptions) -> None:
        """Release every lane in order, then cancel those that take too long, until they have ended: a library may lose a cancellation."""
        running = {task for task in self._lanes.values() if not task.done()}
        problem = await kafka_problem(options) if running and self._stopping.is_set() else None
        if problem is not None:
            logger.warning("the lanes are released without snapshots: %s", problem)
        elif running and self._stopping.is_set():
            for owner in self._owners.values():
                owner.leave()
            # The step may take `release_seconds`, and so may the snapshots after it.
            _, running = await asyncio.wait(running, timeout=2 * self._settings.worker.release_seconds + _RETRY_SECONDS)
        while running:
            for task in running:
                task.cancel()
            _, running = await asyncio.wait(running, timeout=_RETRY_SECONDS)
