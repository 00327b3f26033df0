"""The pipeline: the next step computes on the device while this step is stored and committed. At most one step is prepared.

A prepared step waits for the device, runs, and is computed; at any time it is taken by the step that it is, or discarded. `PreparedPhase`
and `is_transition_valid` are its state machine. Guarantees: a prepared step is used only if it is the step that would run after the commit:
the same state, config, scalars and reference, and the very same groups. Until then it has no effect. If the commit fails, or a command
removes the batch, the prepared step is discarded, and the committed state is restored as after any lost step (the committed-state-only
invariant). Limitations: whether the plan writes a snapshot is not compared, because it changes nothing that is trained.
"""

import asyncio
import shutil
from dataclasses import replace
from enum import StrEnum

from headrace.consumers.worker.world import TrainerWorld
from headrace.trainer.plan import StateKey, StepPlan, StepResult

_GRACE_SECONDS = 5.0
"""Ranks take longer than this to start; most steps take less to end."""


class PreparedPhase(StrEnum):
    """Phases of a prepared step."""

    WAITING = "waiting"
    """For the device."""
    RUNNING = "running"
    COMPUTED = "computed"
    TAKEN = "taken"
    """It is the current step now."""
    DISCARDED = "discarded"


_VALID: dict[PreparedPhase, frozenset[PreparedPhase]] = {
    PreparedPhase.WAITING: frozenset({PreparedPhase.RUNNING, PreparedPhase.TAKEN, PreparedPhase.DISCARDED}),
    PreparedPhase.RUNNING: frozenset({PreparedPhase.COMPUTED, PreparedPhase.TAKEN, PreparedPhase.DISCARDED}),
    PreparedPhase.COMPUTED: frozenset({PreparedPhase.TAKEN, PreparedPhase.DISCARDED}),
    PreparedPhase.TAKEN: frozenset(),
    PreparedPhase.DISCARDED: frozenset(),
}


def is_transition_valid(current: PreparedPhase, to: PreparedPhase) -> bool:
    """Whether a prepared step may go from one phase to another."""
    return to in _VALID[current]


class PreparedStep:
    """A step that was begun before the step before it is committed."""

    def __init__(self, plan: StepPlan, world: TrainerWorld) -> None:
        self.plan = plan
        self.phase = PreparedPhase.WAITING
        self._world = world
        self.on_device = False
        self.task = asyncio.create_task(self._run(), name=f"prepared-step-{plan.state.step + 1}")

    def move(self, to: PreparedPhase) -> None:
        """Go to another phase.

        Raises:
            RuntimeError: the transition is not valid; always a defect of Headrace.
        """
        if not is_transition_valid(self.phase, to):
            raise RuntimeError(f"a prepared step can't go from {self.phase} to {to}")
        self.phase = to

    async def _run(self) -> StepResult:
        async with self._world.turn() as turn:
            self._advance(PreparedPhase.RUNNING)
            self.on_device = True
            try:
                result = await self._world.run(self.plan, None, turn)
            finally:
                self.on_device = False
        self._advance(PreparedPhase.COMPUTED)
        return result

    def _advance(self, to: PreparedPhase) -> None:
        if self.phase not in {PreparedPhase.TAKEN, PreparedPhase.DISCARDED}:
            self.move(to)


class Pipeline:
    """The prepared step of one lane, if there is one."""

    def __init__(self, world: TrainerWorld) -> None:
        self._world = world
        self.prepared: PreparedStep | None = None
        self.leaving = False
        """The lane is released: a discarded step gets no time to end, because snapshots must be stored within `release_seconds`."""
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def model_id(self) -> str | None:
        """The model of the prepared step."""
        return None if self.prepared is None else self.prepared.plan.state.model_id

    def prepare(self, plan: StepPlan) -> None:
        """Begin a step from the state that the device has just reached. Does nothing if another step is prepared."""
        if self.prepared is None:
            self.prepared = PreparedStep(plan, self._world)

    def from_state(self, state: StateKey) -> PreparedStep | None:
        """The prepared step that starts from this state. One of the same model from another state is discarded."""
        if self.prepared is None or self.prepared.plan.state.model_id != state.model_id:
            return None
        if self.prepared.plan.state != state:
            self.discard()
        return self.prepared

    async def take(self, prepared: PreparedStep) -> StepResult:
        """Its result. It is the current step from now on, and ends if the caller is cancelled. Raises as `TrainerWorld.run`."""
        prepared.move(PreparedPhase.TAKEN)
        self.prepared = None
        return await prepared.task

    def discard(self) -> None:
        """The prepared step is not wanted. It may end within a grace time if it runs; otherwise it is cancelled, and its ranks with it."""
        prepared, self.prepared = self.prepared, None
        if prepared is None:
            return
        prepared.move(PreparedPhase.DISCARDED)
        grace: float | None = 0.0
        if prepared.on_device:
            # Under a launcher, ranks that end would end all other ranks and this worker.
            grace = None if self._world.launched else 0.0 if self.leaving else _GRACE_SECONDS
        ending = asyncio.create_task(_end(prepared, grace), name="discarded-step-ends")
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)


async def _end(prepared: PreparedStep, grace: float | None) -> None:
    try:
        if grace != 0.0:
            await asyncio.wait({prepared.task}, timeout=grace)
    finally:
        prepared.task.cancel()
        await asyncio.gather(prepared.task, return_exceptions=True)
        await asyncio.to_thread(shutil.rmtree, prepared.plan.out_dir, ignore_errors=True)


def same_step(one: StepPlan, other: StepPlan) -> bool:
    """Whether two plans train the same. Groups are compared by identity: a group never changes once it is admitted."""
    if len(one.groups) != len(other.groups) or any(a is not b for a, b in zip(one.groups, other.groups, strict=True)):
        return False
    return _comparable(one) == _comparable(other)


def _comparable(plan: StepPlan) -> StepPlan:
    return replace(plan, groups=(), attempt="", out_dir="", snapshot=False, report_rows="none")
