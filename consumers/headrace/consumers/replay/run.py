"""Running committed steps again for a person: to the same digests, or with changes, as a fork that publishes nothing.

A replay has ranks, a tokenizing process and a working folder of its own. It reads the log `read_committed` without a group, and the object
store; it writes to neither. Guarantees: each step starts from the state that the step before it made here; the world has the ledger's size,
threads and ZeRO stage at each step (or the size that was asked for), and the state is carried over where they change; ranks, process and
folder are gone afterwards, however it ends. Limitations: judging another environment: its bits may be equal, the digests say so.
"""

import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

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
    """What is done otherwise, from the first step that was asked for on."""

    changes: Changes
    model: ModelSettings
    """The model's settings with the fork's optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What to replay."""

    model: ModelSettings
    route: Route
    start: WeightsRef | None = None
    """What the model's version 0 is; None: the base model."""
    fork: Fork | None = None
    """None: the steps as they were."""
    ranks: int | None = None
    """World size at every step; None: the ledger's."""
    keep_state: bool = False
    """Whether the state after the last step is written, into `Rerun.out_dir / "snapshot"`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedStep:
    """A step as it came out here."""

    record: StepRecord
    rerun: Rerun | None
    """None: it trained nothing, and what follows starts again from its snapshot; so it does here."""
    forked: bool
    """Changes were in force: other bits are expected."""
    seconds: float

    @property
    def equal(self) -> bool:
        """All bits are the ledger's."""
        return self.rerun is None or not self.rerun.differences


@asynccontextmanager
async def replay(settings: Settings, task: Task) -> AsyncIterator[AsyncGenerator[ReplayedStep]]:
    """The steps, as they come out.

    A step's files are there until the next step is asked for, those of the last until the block ends.

    Args:
        settings: Of this process: Kafka, store, base models.
        task: What to replay.

    Raises (from the steps):
        CannotRerunError: what a step trained on is gone, or it fails here.
        HeadraceError: Kafka or the store can't be reached, or a rank ended.
    """
    run = _Run(settings, task)
    try:
        async with aclosing(run.steps()) as steps:
            yield steps
    finally:
        await asyncio.shield(run.close())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """What of a world changes bits."""

    ranks: int
    threads: int
    zero_stage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Device:
    """A world, and what it is for."""

    world: TrainerWorld
    reruns: StepReruns
    shape: _Shape
    model: ModelSettings
    reads_carried: bool
    """It reads snapshots that were carried from another world, not those in the object store."""


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
        """Of a fork's state, once it is another one than the ledger's."""

    async def close(self) -> None:
        """End the processes, remove the files."""
        self._pool.close()
        if self._device is not None:
            await self._device.world.close()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def steps(self) -> AsyncGenerator[ReplayedStep]:
        """Each step of the route."""
        before: StepRecord | None = None
        for record in self._task.route.records:
            if record.cut in RESTART_CUTS:
                yield ReplayedStep(record=record, rerun=None, forked=False, seconds=0.0)
            else:
                step = await self._step(before, record)
                yield step
                if record is not self._task.route.records[-1] and step.rerun is not None:
                    await asyncio.to_thread(shutil.rmtree, step.rerun.out_dir, ignore_errors=True)
            before = record

    async def _step(self, before: StepRecord | None, record: StepRecord) -> ReplayedStep:
        fork = self._fork_at(record)
        device, snapshot = await self._arrive(before, record)
        began = time.monotonic()
        rerun = await device.reruns.run(
            record,
            device.model,
            snapshot,
            start=self._task.start,
            evaluate=True,
            changes=None if fork is None else fork.changes,
            scalars=self._scalars,
            keep_snapshot=self._task.keep_state and record is self._task.route.records[-1],
        )
        if fork is not None:
            self._scalars = rerun.result.scalars
        return ReplayedStep(record=record, rerun=rerun, forked=fork is not None, seconds=time.monotonic() - began)

    def _fork_at(self, record: StepRecord) -> Fork | None:
        return self._task.fork if record.step >= self._task.route.first else None

    async def _arrive(self, before: StepRecord | None, record: StepRecord) -> tuple[_Device, WeightsRef | None]:
        """The world that the step needs; and the snapshot to start from, where that world does not hold the state."""
        fork, device = self._fork_at(record), self._device
        shape, model = self._shape(record), self._task.model if fork is None else fork.model
        if before is None or before.cut in RESTART_CUTS:
            start = self._task.route.start
            snapshot = before.snapshot if before is not None else self._task.start if start is None else start.snapshot
            if device is None or (device.shape, device.model) != (shape, model) or device.reads_carried:
                device = await self._open(shape, model, carried=False)
            return device, snapshot
        assert device is not None  # noqa: S101 - a step has run
        if (device.shape, device.model) == (shape, model):
            return device, None
        snapshot = await self._carry(device, before)
        return await self._open(shape, model, carried=True), snapshot

    async def _open(self, shape: _Shape, model: ModelSettings, *, carried: bool) -> _Device:
        """A world, in the place of the one before it."""
        if self._device is not None:
            device, self._device = self._device, None
            await device.world.close()
        worker = self._settings.worker.model_copy(
            update={
                "ranks": shape.ranks,
                "threads": shape.threads,
                "zero_stage": shape.zero_stage,
                # Without ZeRO there is no sharded optimizer to put elsewhere.
                "offload_optimizer": self._settings.worker.offload_optimizer and shape.zero_stage > 0,
                "work_dir": self._folder / "work",
            }
        )
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

    def _shape(self, record: StepRecord) -> _Shape:
        ledger = record.fingerprint
        return _Shape(ranks=self._task.ranks or ledger.world_size, threads=ledger.threads, zero_stage=ledger.zero_stage)
