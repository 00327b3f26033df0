"""The next step: handed over while this one runs, and on the device while this one is written, stored and committed.

Guarantees: what was begun ahead is used only if it is what would be run after the commit: the same state, config, scalars and reference,
and the very groups. It is nobody's before that: a commit that fails, or a command that takes the batch away, ends it, and the committed
state is had again as after any lost step (exactly-once rule 5). Gives up: whether the plan writes a snapshot, which changes nothing that is
trained; more than one step ahead.
"""

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from headrace.consumers.steps.cut import Batch
from headrace.consumers.steps.world import TrainerWorld
from headrace.schemas.state import ModelState
from headrace.trainer.plan import StateKey, StepPlan, StepResult

_GRACE_SECONDS = 5.0
"""Ranks take longer than this to start, most steps less to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Following:
    """How a step learns of the one after it."""

    now: Callable[[], Batch | None] = lambda: None
    """The batch that comes next if the step is committed; None while that can't be known."""
    may_still: Callable[[Batch], bool] = lambda _batch: True
    """Whether one that came next may still do so: a quick look, since it is asked with every record that the lane takes in."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when either may be another."""


class NextPlan:
    """The plan of the next step, made and handed over while a step runs.

    Args:
        following: The batch.
        make: Makes the plan of a batch, from the state that the running step will lead to.
        world: The device.
        free: Whether the ranks may go on to it by themselves; asked when it is handed over.
    """

    def __init__(
        self, following: Following, make: Callable[[Batch], Awaitable[StepPlan]], world: TrainerWorld, free: Callable[[], bool]
    ) -> None:
        self._following = following
        self._make = make
        self._world = world
        self._free = free
        self._batch: Batch | None = None
        self._made: asyncio.Task[StepPlan] | None = None
        self._task = asyncio.create_task(self._run(), name="next-plan")

    async def _run(self) -> None:
        while (batch := self._following.now()) is None:
            await self._following.changed.wait()
            self._following.changed.clear()  # the lane looks at everything again when the step has ended
        self._batch, self._made = batch, asyncio.ensure_future(self._make(batch))
        await self._world.hand_over(await self._made, goes_on=self._free())
        while self._following.may_still(batch):
            await self._following.changed.wait()
            self._following.changed.clear()
        await self._world.hold_back()  # what is gone on to and not wanted costs the state on the ranks

    def gone_on_to(self, result: StepResult) -> StepPlan | None:
        """The plan that the ranks have gone on to after the step; None: to none, or to none of this step's."""
        if result.goes_on is None or self._made is None or not self._made.done() or self._made.cancelled():
            return None
        plan = None if self._made.exception() is not None else self._made.result()
        return replace(plan, scalars=result.scalars) if plan is not None and plan.out_dir == result.goes_on else None

    async def plan(self) -> StepPlan | None:
        """The plan of what comes next, now that the step has run; None where that can't be known.

        Whether it is handed over by now is not waited for: a rank that is stopped is only noticed where a result of it is.

        Raises:
            HeadraceError: it could not be made.
        """
        batch = self._following.now()
        if batch is not None and self._batch is not None and self._made is not None and batch.offsets == self._batch.offsets:
            return await self._made
        await self.cancel()
        return None if batch is None else await self._make(batch)

    async def cancel(self) -> None:
        """It is not wanted."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A step that waits for the device, runs or has run."""

    plan: StepPlan
    task: "asyncio.Task[StepResult]"


class StepAhead:
    """At most one step ahead of the committed state, for one lane.

    Args:
        world: The device.
    """

    def __init__(self, world: TrainerWorld) -> None:
        self._world = world
        self._begun: Begun | None = None
        self.leaving = False
        """What is dropped gets no time to end: snapshots are to be stored in what is left of `release_seconds`."""
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def model_id(self) -> str | None:
        """Whose step was begun and is not used yet."""
        return None if self._begun is None else self._begun.plan.state.model_id

    def begin(self, plan: StepPlan) -> None:
        """Begin a step from the state that the device has just reached; nothing is begun while another waits to be used."""
        if self._begun is None:
            self._begun = Begun(plan=plan, task=asyncio.create_task(self._world.run(plan, None), name=f"ahead-{plan.state.step + 1}"))

    def of(self, state: StateKey) -> Begun | None:
        """The step that was begun from this state; one that the same model began from another state is ended."""
        if self._begun is None or self._begun.plan.state.model_id != state.model_id:
            return None
        if self._begun.plan.state != state:
            self.drop()
        return self._begun

    async def take(self, begun: Begun) -> StepResult:
        """Its result: it is the caller's now, and ends if the caller is cancelled. Raises as `TrainerWorld.run`."""
        if self._begun is begun:
            self._begun = None
        return await begun.task

    def drop(self) -> None:
        """It is not wanted. What is nearly done may end on the device; what is not, ends with its ranks; what waits takes no turn."""
        begun, self._begun = self._begun, None
        if begun is not None:
            grace: float | None = 0.0
            if self._world.has_turn(begun.plan):
                # Under a launcher the end of ranks is the launcher's to judge, and this worker's end, too.
                grace = None if self._world.launched else 0.0 if self.leaving else _GRACE_SECONDS
            ending = asyncio.create_task(_end(begun, grace), name="ahead-ends")
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)


async def _end(begun: Begun, grace: float | None) -> None:
    try:
        if grace != 0.0:
            await asyncio.wait({begun.task}, timeout=grace)
    finally:
        begun.task.cancel()
        await asyncio.gather(begun.task, return_exceptions=True)
        await asyncio.to_thread(shutil.rmtree, begun.plan.out_dir, ignore_errors=True)


def state_after(state: ModelState, plan: StepPlan) -> ModelState:
    """What the model's state will be once the step is committed, as far as a plan looks at it; its scalars the step itself tells."""
    step = state.policy_version + 1
    kept = {"snapshot_step": step} if plan.snapshot else {}
    return state.model_copy(update={"policy_version": step, "last_attempt": plan.attempt, **kept})


def same_step(one: StepPlan, other: StepPlan) -> bool:
    """Whether two plans train the same; groups are compared as the objects that they are, none is changed once it is admitted."""
    if len(one.groups) != len(other.groups) or any(a is not b for a, b in zip(one.groups, other.groups, strict=True)):
        return False
    return _bare(one) == _bare(other)


def _bare(plan: StepPlan) -> StepPlan:
    return replace(plan, groups=(), attempt="", out_dir="", snapshot=False, report_rows="none")
