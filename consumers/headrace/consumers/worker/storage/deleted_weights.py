"""Weights of versions that a client deleted: noted in the model's state, and deleted when nothing needs them (exactly-once rule 14).

What may still read a version's weights is a step with it as its KL reference, when recovery runs that step again. So they go when a
snapshot covers the last step that may have read them: the one that ran, or was committed last, when the command was read; later ones are
refused such a reference. The newest version's stay until there is a newer one. Guarantees: once a committed state lets them go, no later
owner needs them, so an owner that was frozen in between deletes nothing that is needed; a deletion that is interrupted is repeated.
Limitations: jobs of other models that name these files by their URI (`kl_ref_adapter_path`); the process that deletes them has to know.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable

from headrace.consumers.worker.lane_model import LaneModel
from headrace.consumers.worker.storage.step_files import delete_folder, list_folders
from headrace.core.errors import HeadraceError
from headrace.core.store import ObjectStore
from headrace.schemas.state import DoomedWeights, offset_ranges

logger = logging.getLogger(__name__)

EVERY_SECONDS = 2.0


def doom(run: LaneModel, spans: Iterable[tuple[int, int]], *, running: bool) -> None:
    """Note that weights are to go.

    Args:
        run: The model.
        spans: Steps, as (first, last).
        running: A step of the model runs: it may have read them already.
    """
    newest = run.state.policy_version
    known = {step for batch in run.doomed for step in _steps(batch)}
    steps: list[int] = []
    begin = 1
    for first, last in sorted(spans):  # in order, so that no step is looked at twice, however the spans overlap
        steps.extend(step for step in range(max(first, begin), min(last, newest) + 1) if step not in known)
        begin = max(begin, last + 1)
    if steps:
        run.doomed.append(DoomedWeights(steps=_spans(steps), after=newest + int(running)))
        run.touch(urgent=True)


def is_doomed(run: LaneModel, step: int) -> bool:
    """Whether a step's weights are to go: no step begins any more that reads them."""
    return any(first <= step <= last for batch in run.doomed for first, last in batch.steps)


def due(run: LaneModel) -> list[int]:
    """Steps whose weights nothing needs, by what is committed."""
    ready = (batch for batch in run.doomed if batch in run.state.doomed and batch.after <= run.state.snapshot_step)
    return [step for batch in ready for step in _steps(batch) if step != run.state.policy_version]


class WeightsDeleter:
    """Deletes the weights of one lane that are marked for deletion.

    Args:
        store: Where they are.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def run(self, runs: Callable[[], Iterable[LaneModel]]) -> None:
        """Delete what is due, again and again, until cancelled. What fails is logged and tried again."""
        while True:
            for run in list(runs()):
                try:
                    await self.collect(run)
                except HeadraceError as error:
                    logger.warning("deleted checkpoints of %s stay for now: %s", run.state.name, error)
            await asyncio.sleep(EVERY_SECONDS)

    async def collect(self, run: LaneModel) -> None:
        """Delete what is due of one model, and note it for the next commit.

        Raises:
            HeadraceError: the store can't be used.
        """
        if not (steps := due(run)):
            return
        await asyncio.to_thread(self._delete, run.state.model_id, run.state.incarnation, steps)
        gone = frozenset(steps)
        left = [(batch, [step for step in _steps(batch) if step not in gone]) for batch in run.doomed]
        run.doomed[:] = [batch.model_copy(update={"steps": _spans(steps)}) for batch, steps in left if steps]
        run.touch()
        logger.info("the weights of %d deleted checkpoints of %s are gone", len(gone), run.state.name)

    def _delete(self, model_id: str, incarnation: str, steps: list[int]) -> None:
        for step in steps:
            for folder in list_folders(self._store, model_id, incarnation, "weights", step):
                delete_folder(self._store, folder)


def _steps(batch: DoomedWeights) -> list[int]:
    return [step for first, last in batch.steps for step in range(first, last + 1)]


def _spans(steps: list[int]) -> tuple[tuple[int, int], ...]:
    return tuple((span.first, span.last) for span in offset_ranges(steps))
