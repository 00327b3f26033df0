"""Runs committed steps again for a person: to the same digests, or with changes, as a fork that publishes nothing.

A replay has its own ranks, tokenizing process and working folder. It reads the log and the object store, and writes to neither.
Guarantees: each step starts from the state that the step before it made here. The world has the ledger's size, threads and ZeRO stage at
each step (or the requested size); the state is carried over where they change. Ranks, process and folder are gone afterwards, however the
replay ends.
Limitations: another environment may or may not give equal bits; the digests show it.
"""

import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.consumers.replay.start import Route
from headrace.consumers.worker.admission.pool import AdmissionPool
from headrace.consumers.worker.kl_references import KlReferences
from headrace.consumers.worker.rerun import RESTART_CUTS, Changes, Rerun, StepReruns, key_after
from headrace.consumers.worker.world import TrainerWorld
from headrace.core.kafka import client_options
from headrace.core.settings import Settings
from headrace.core.store import open_store, store_folder
from headrace.schemas.state import StepRecord, TrainingScalars
from headrace.schemas.training import ModelSettings
from headrace.schemas.weights import WeightsRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """The changes of a fork, from the first requested step on."""

    changes: Changes
    model: ModelSettings
    """The model's settings with the fork's optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The steps to replay, and how."""

    model: ModelSettings
    route: Route
    start: WeightsRef | None = None
    """The model's version 0; None: the base model."""
    fork: Fork | None = None
    """None: the steps as they were."""
    ranks: int | None = None
    """World size at every step; None: the ledger's."""
    keep_state: bool = False
    """Whether the state after the last step is written, into `Rerun.out_dir / "snapshot"`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedStep:
    """The outcome of one step."""

    record: StepRecord
    rerun: Rerun | None
    """None: the step trained nothing, and the next one starts again from its snapshot, here as well."""
    forked: bool
    """Changes were in force: other bits are expected."""
    seconds: float

    @property
    def equal(self) -> bool:
        """All bits are the ledger's."""
        return self.rerun is None or not self.rerun.differences


@asynccontextmanager
async def replay(settings: Settings, task: Task) -> AsyncIterator[AsyncGenerator[ReplayedStep]]:
    """The steps, one after the other.

    A step's files exist until the next step is requested, those of the last until the block ends.

    Args:
        settings: Of this process: Kafka, store, base models.
        task: What to replay.

    Raises (from the steps):
        CannotRerunError: the groups of a step are gone, or it fails here.
        HeadraceError: Kafka or the store can't be reached, or a rank ended.
    """
    run = _Run(settings, task)
    try:
        async with aclosing(run.steps()) as steps:
            yield steps
    finally:
        await asyncio.shield(run.close())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Device:
    """A world, and what it is for."""

    world: TrainerWorld
    reruns: StepReruns
    shape: dict[str, Any]
    """The worker settings that change bits: ranks, threads, ZeRO stage."""
    model: ModelSettings
    reads_carried: bool
    """It reads snapshots that were carried over from another world, not those in the object store."""


class _Run:
    """One replay, from its first process to its last."""

    def __init__(self, settings: Settings, task: Task) -> None:
        self._settings = settings
        self._task = task
        self._store = open_store(settings.store.url, settings.s3)
        self._lane = task.route.records[0].lane
        options = client_options(settings.kafka, "headrace-replay")
        self._folder = Path(tempfile.mkdtemp(prefix="headrace-replay-"))
        self._carried = open_store(f"file://{self._folder / 'carried'}", settings.s3)
        self._references = KlReferences(options, settings.topic_names.steps, self._lane, self._store, self._folder / "references")
        self._pool = AdmissionPool(settings)
        self._device: _Device | None = None
        self._scalars: TrainingScalars | None = None
        """Of a fork's state, once it differs from the ledger's."""

    async def close(self) -> None:
        """End the processes, remove the files."""
        self._pool.close()
        if self._device is not None:
            await self._device.world.close()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def steps(self) -> AsyncGenerator[ReplayedStep]:
        """Each step of the route."""
        before: StepRecord | None = None
        last = self._task.route.records[-1]
        for record in self._task.route.records:
            if record.cut in RESTART_CUTS:
                yield ReplayedStep(record=record, rerun=None, forked=False, seconds=0.0)
            else:
                fork = self._task.fork if record.step >= self._task.route.first else None
                device, snapshot = await self._device_for(before, record, self._task.model if fork is None else fork.model)
                began = time.monotonic()
                rerun = await device.reruns.run(
                    record,
                    device.model,
                    snapshot,
                    start=self._task.start,
                    evaluate=True,
                    changes=None if fork is None else fork.changes,
                    scalars=self._scalars,
                    keep_snapshot=self._task.keep_state and record is last,
                )
                if fork is not None:
                    self._scalars = rerun.result.scalars
                yield ReplayedStep(record=record, rerun=rerun, forked=fork is not None, seconds=time.monotonic() - began)
                if record is not last:
                    await asyncio.to_thread(shutil.rmtree, rerun.out_dir, ignore_errors=True)
            before = record

    async def _device_for(self, before: StepRecord | None, record: StepRecord, model: ModelSettings) -> tuple[_Device, WeightsRef | None]:
        """The world that the step needs; and the snapshot to start from, where that world does not hold the state."""
        device, ledger = self._device, record.fingerprint
        shape = {"ranks": self._task.ranks or ledger.world_size, "threads": ledger.threads, "zero_stage": ledger.zero_stage}
        fits = device is not None and (device.shape, device.model) == (shape, model)
        if before is None or before.cut in RESTART_CUTS:
            start = self._task.route.start
            snapshot = before.snapshot if before is not None else self._task.start if start is None else start.snapshot
            if device is None or not fits or device.reads_carried:
                device = await self._open(shape, model, carried=False)
            return device, snapshot
        assert device is not None  # noqa: S101 - a step has run
        if fits:
            return device, None
        snapshot = await self._carry(device, before)
        return await self._open(shape, model, carried=True), snapshot

    async def _open(self, shape: dict[str, Any], model: ModelSettings, *, carried: bool) -> _Device:
        """A world, instead of the one before it."""
        if self._device is not None:
            device, self._device = self._device, None
            await device.world.close()
        # Without ZeRO there is no sharded optimizer to put elsewhere.
        offload = self._settings.worker.offload_optimizer and shape["zero_stage"] > 0
        worker = self._settings.worker.model_copy(update={**shape, "offload_optimizer": offload, "work_dir": self._folder / "work"})
        settings = self._settings.model_copy(update={"worker": worker})
        world = TrainerWorld(settings, self._carried if carried else self._store)
        reruns = StepReruns(settings, world, self._pool, self._lane, self._references)
        self._device = _Device(world=world, reruns=reruns, shape=shape, model=model, reads_carried=carried)
        return self._device

    async def _carry(self, device: _Device, before: StepRecord) -> WeightsRef:
        """The state that a world holds, as a snapshot for the next one."""
        folder = self._folder / f"state-{before.step}"
        await device.world.save(key_after(before), folder)
        _, snapshot = await asyncio.to_thread(
            store_folder,
            self._carried,
            f"states/{before.step}",
            folder,
            kind="snapshot",
            model_id=before.model_id,
            incarnation=before.incarnation,
            step=before.step,
            attempt=before.attempt,
        )
        await asyncio.to_thread(shutil.rmtree, folder)
        return snapshot
