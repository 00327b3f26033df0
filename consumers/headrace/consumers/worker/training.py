"""The lane's training loop: which model has the next step, and what a failed step leads to.

Guarantees: the complete batch that has waited longest is next, of all models. A step whose job or model was removed meanwhile is not
committed. A model whose state can't be recovered stops as diverged, and the other models train. `headrace.consumers.worker.step` shows the
step itself. Limitations: steps of one lane run one after another.
"""

import logging
from typing import Literal

from headrace.consumers.worker.base_models import resume_with_base, wait_for_base
from headrace.consumers.worker.commits import LaneCommitter
from headrace.consumers.worker.lane_model import LaneModel
from headrace.consumers.worker.lane_models import LaneModels
from headrace.consumers.worker.plans import state_key
from headrace.consumers.worker.recovery import ModelDivergedError
from headrace.consumers.worker.restart import restart
from headrace.consumers.worker.selection import Batch, select_batch, select_following, short_of_nodes
from headrace.consumers.worker.step import BatchGivenUpError, CannotBeginError, LaneSteps
from headrace.consumers.worker.step_tools import StepTools
from headrace.core.outages import outlast
from headrace.core.store import DigestMismatchError, InvalidKeyError, ObjectNotFoundError
from headrace.schemas.jobs import JobState
from headrace.schemas.reasons import RejectionReason
from headrace.trainer.plan import BaseUnusableError, StateKey
from headrace.trainer.rank import RankDiedError, StepDivergedError, StepFailedError, cause_of

logger = logging.getLogger(__name__)


class LaneTraining:
    """Trains what the lane's buckets contain."""

    def __init__(self, models: LaneModels, committer: LaneCommitter, tools: StepTools, counted: set[StateKey]) -> None:
        self._models = models
        self._committer = committer
        self._tools = tools
        self._pipeline = tools.pipeline
        self._counted = counted
        self._steps = LaneSteps(models, committer, tools, counted=counted, select_next=self._select_following)
        self.leaving = False
        """No step is begun any more."""
        self.stepping = False
        """Whether a step runs."""

    async def run(self) -> None:
        """Train until the lane leaves, or the task is cancelled."""
        try:
            while not self.leaving:
                await self._models.changed.wait()
                self._models.changed.clear()
                while (found := self._select()) is not None:
                    self.stepping = True
                    model, batch = found
                    if batch is not None:
                        await self._step(model, batch)
                    elif model.restarts:
                        await self._restart(model)
                    else:
                        await self._store_snapshot(model)
                    self.stepping = False
                self._models.note_unreported()  # batch selection may have rejected groups
        finally:
            self._steps.close()

    def leave(self) -> None:
        """Begin no step any more. `run` returns after the step that runs, and after the prepared one."""
        self.leaving = self._pipeline.leaving = True
        self._models.changed.set()

    def _select(self) -> tuple[LaneModel, Batch | None] | None:
        """A model that restarts, else the complete batch that has waited longest, of all models, else a model that lacks a snapshot.

        When the lane leaves, only the prepared step: the device is past the committed state, and a snapshot of that state must be stored.
        """
        models, nodes = list(self._models.models.values()), self._models.state.nodes
        if self.leaving:
            models = [model for model in models if model.state.model_id == self._pipeline.model_id]
        for model in models:
            if model.restarts:
                return model, None
        ready = [(model, batch) for model in models if (batch := select_batch(model, nodes)) is not None]
        for model in models:
            may_try = model.draft.waiting_for is not None and model.retry.step and not model.snapshot_wanted
            if may_try and all(model is not other for other, _ in ready):
                resume_with_base(model)  # no step could show whether its base model works
        self._note_short_of_nodes(nodes)
        if self._pipeline.model_id not in {model.state.model_id for model, _ in ready}:
            self._pipeline.discard()  # a command took the batch away; other models may prepare a step
        if ready:
            return min(ready, key=lambda pair: pair[1].completed_at)
        return next(((model, None) for model in models if model.snapshot_wanted and model.trains), None)

    def _select_following(self, model: LaneModel, batch: Batch) -> Batch | None:
        """The model's own next batch if this one is committed, unless a batch of another model has waited longer."""
        nodes = self._models.state.nodes
        if self.leaving or (own := select_following(model, batch, nodes)) is None:
            return None
        others = [other for other in self._models.models.values() if other is not model]
        if any(other.restarts for other in others):
            return None
        waiting = [found for other in others if (found := select_batch(other, nodes)) is not None]
        return own if all(own.completed_at < found.completed_at for found in waiting) else None

    def _note_short_of_nodes(self, nodes: int) -> None:
        for model in self._models.models.values():
            for job_id, needed in short_of_nodes(model, nodes).items():
                machines = f"it needs {needed} nodes, and the worker that owns lane {self._models.state.lane} has {nodes}"
                model.note_waiting(job_id, f"{machines}: it is trained when one with as many owns the lane (a launcher across machines)")

    async def _step(self, model: LaneModel, batch: Batch) -> None:
        try:
            await self._steps.take(model, batch)
        except BatchGivenUpError as error:
            await self._fail_batch(model, batch, str(error))
        except CannotBeginError as error:
            await self._stop(model, batch, "stopped", str(error))
        except ModelDivergedError as error:
            await self._stop(model, batch, "diverged", str(error), own=isinstance(error.__cause__, StepDivergedError))
        except BaseUnusableError as error:
            await self._wait(model, error)

    async def _restart(self, model: LaneModel) -> None:
        origin = model.draft.start_from
        why = "be resumed" if origin is None else f"begin from {origin.snapshot.uri}"
        try:
            step = await outlast(f"{model.state.name}, which is to {why},", lambda: restart(model, self._tools, self._steps))
        except BaseUnusableError as error:
            await self._wait(model, error)
            return
        except (ModelDivergedError, ObjectNotFoundError, DigestMismatchError, InvalidKeyError, StepFailedError, RankDiedError) as error:
            model.change(rebasing=None, start_from=None)
            model.set_status("diverged" if origin is None else "stopped", f"it can't {why}: {cause_of(error)}")
            await self._committer.commit()
            return

        def ready() -> bool:
            if not model.restarts:
                return False
            resume_with_base(model)
            model.use_groups(())
            return True

        await self._steps.commit(model, step, ready)

    async def _store_snapshot(self, model: LaneModel) -> None:
        """Store a snapshot of a model without a step for long: retention may delete what its last steps trained on."""
        model.snapshot_wanted = False
        what = f"the snapshot of step {model.state.policy_version} of {model.state.name}"
        try:
            taken = await outlast(what, lambda: self._tools.recover_and_save(model))
        except BaseUnusableError as error:
            model.snapshot_wanted = True
            await self._wait(model, error)
            return
        except ModelDivergedError as error:
            await self._stop(model, None, "diverged", str(error))
            return
        if taken is not None and model.status == "active":
            await self._committer.commit(snapshots={model.state.model_id: taken})
            logger.info("step %d of %s has a snapshot now", model.state.policy_version, model.state.name)

    async def _wait(self, model: LaneModel, error: BaseUnusableError) -> None:
        """The batch stays as it is until the base model can be used; this attempt does not count."""
        key = state_key(model.state)
        if model.intent is not None and model.intent.attempts and key in self._counted:
            self._counted.discard(key)
            model.change(intent=model.intent.model_copy(update={"attempts": model.intent.attempts - 1}))
        wait_for_base(model, cause_of(error), ranks=True)
        await self._committer.commit()

    async def _stop(
        self, model: LaneModel, batch: Batch | None, status: Literal["stopped", "diverged"], detail: str, *, own: bool = False
    ) -> None:
        """Stop a model; its job waits. If the batch's own step diverges (`own`), its groups are rejected: it would diverge again."""
        message = f"the model {'has diverged' if status == 'diverged' else 'is stopped'}: {detail}"
        logger.error("%s: %s", model.state.name, message)
        model.change(intent=None)
        model.set_status(status, detail)
        if batch is not None and batch.job_id is not None and batch.job_id in model.jobs:
            if own and model.job_state(batch.job_id) is not JobState.PAUSED:
                model.move_job(batch.job_id, JobState.FAILED, message=message)
                model.reject_all(RejectionReason.MODEL_STOPPED, message, batch.job_id)
            else:
                model.note_waiting(batch.job_id, message)
        elif batch is not None and own:
            for waiting in batch.groups:
                model.reject_waiting(waiting, RejectionReason.STEP_FAILED, message)
        await self._committer.commit()

    async def _fail_batch(self, model: LaneModel, batch: Batch, message: str) -> None:
        for waiting in batch.groups:
            model.reject_waiting(waiting, RejectionReason.STEP_FAILED, message)
        if batch.job_id is not None and batch.job_id in model.jobs:
            model.move_job(batch.job_id, JobState.FAILED, message=message)
        model.linger_over = False
        model.change(intent=None)
        await self._committer.commit()
