"""Plans at one rank: each is run, and the one that was handed over to follow it is continued to without a word from the worker.

Guarantees: results come out in the order of the steps, each when its files are there; where one can't be finished, nothing is said of the
step that continued from it, and its state is dropped. All ranks of a world continue, or none. Limitations: finishing more than one step
at a time.
"""

import shutil
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from headrace.core.outages import outage_of
from headrace.schemas.state import TrainingScalars
from headrace.trainer.plan import Answer, BaseUnusableError, DivergedError, Failure, SavePlan, StateKey, StepPlan
from headrace.trainer.store_words import tell
from headrace.trainer.world import Seat, WorldSettings

if TYPE_CHECKING:  # they import torch, which only a rank does
    from headrace.trainer.computed import ComputedStep
    from headrace.trainer.engine import TrainingEngine

P = TypeVar("P")


class PlanRunner:
    """Runs plans on this rank.

    Args:
        engine: What runs them.
        world: Of how many ranks.
        seat: This rank's place.
        answer: Tells the worker; may be called from another thread.
        following: The plan that may follow a step, given the state that the step made and its scalars; asked at rank 0.
    """

    def __init__(
        self,
        engine: "TrainingEngine",
        world: WorldSettings,
        seat: Seat,
        answer: Callable[[Answer], None],
        following: Callable[[StateKey, TrainingScalars], StepPlan | None],
    ) -> None:
        self._engine = engine
        self._world = world
        self._seat = seat
        self._answer = answer
        self._following = following
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="finishes")
        self._finishing: Future[Failure | None] | None = None

    def run(self, plan: StepPlan | SavePlan | None) -> Failure | None:
        """Run a plan, and those that follow it. Only rank 0 gets the plan itself.

        Returns:
            What has failed, and was answered; the device holds nothing then.
        """
        try:
            shared = self._shared(plan)
            if isinstance(shared, SavePlan):
                saved = self._engine.save(shared)
                if self._seat.rank == 0:
                    self._answer(saved)
                return None
            return self._steps(shared)
        except Exception as error:  # noqa: BLE001 - reported, and judged by the worker
            return self._fail(_failure(error))

    def _steps(self, first: StepPlan) -> Failure | None:
        plan: StepPlan | None = first
        while plan is not None:
            running = plan
            try:
                plan, failure = self._step(running)
            except Exception as error:  # noqa: BLE001 - as in `run`
                found = _failure(error)
                self._engine.drop()  # its state is no one's
                failure = self._without(running) or self._fail(found)
            if failure is not None:
                return failure
        return None

    def _step(self, plan: StepPlan) -> tuple[StepPlan | None, Failure | None]:
        """Run one; what it is continued from to, and what failed. Nothing of it is held here when the next one runs."""
        computed = self._engine.compute(plan)
        if (failure := self._without(plan)) is not None:
            self._engine.drop()  # what was continued from is no state
            return None, failure
        following = self._broadcast(self._following(computed.key, computed.scalars) if self._seat.rank == 0 else None)
        if self._seat.rank != 0:
            return following, None
        if following is None:
            return None, self._finish(computed, None)
        computed.beside = True
        self._finishing = self._thread.submit(self._finish, computed, following.out_dir)
        return following, None

    def _finish(self, computed: "ComputedStep", goes_on: str | None) -> Failure | None:
        try:
            result = computed.finish()
        except Exception as error:  # noqa: BLE001 - as in `run`
            found = _failure(error)
        else:
            self._answer(replace(result, goes_on=goes_on))
            return None
        if goes_on is None:
            self._engine.drop()
        return self._fail(found)

    def _fail(self, failure: Failure) -> Failure:
        self._answer(failure)
        return failure

    def _without(self, plan: StepPlan) -> Failure | None:
        """Wait until the step before is finished; its failure, without which no one hears of the plan: its files go, too."""
        finishing, self._finishing = self._finishing, None
        failure = None if finishing is None else finishing.result()
        if failure is not None:
            shutil.rmtree(plan.out_dir, ignore_errors=True)
        return failure

    def _shared(self, plan: StepPlan | SavePlan | None) -> StepPlan | SavePlan:
        """The plan at every rank."""
        if self._world.size > 1 and self._seat.rank == 0:
            tell("run")
        shared = self._broadcast(plan)
        if shared is None:
            raise RuntimeError("rank 0 was asked to run without a plan")
        return shared

    def _broadcast(self, plan: P) -> P:
        """What rank 0 has, at every rank."""
        if self._world.size == 1:
            return plan
        import torch  # noqa: PLC0415 - the engine imported it

        box = [plan]
        torch.distributed.broadcast_object_list(box, src=0)
        return box[0]


def _failure(error: Exception) -> Failure:
    if isinstance(error, BaseUnusableError):
        return Failure(text=str(error), of_base=True)
    return Failure(text="".join(traceback.format_exception(error)), outage=outage_of(error), diverged=isinstance(error, DivergedError))
