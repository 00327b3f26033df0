"""The plan of a step: what the ranks are told.

Guarantees: a pure function of the batch, the config, the model's state and the step number, but for the attempt, and for whether a snapshot
is due, which changes nothing that is trained. Gives up: nothing; what a plan needs and can't be had raises.
"""

from functools import partial
from pathlib import Path

from headrace.consumers.intake.admission_pool import AdmissionPool
from headrace.consumers.memory.job_documents import options_of
from headrace.consumers.memory.model_run import ModelRun
from headrace.consumers.steps.ahead import state_after
from headrace.consumers.steps.catch_up import state_key
from headrace.consumers.steps.cut import Batch
from headrace.consumers.steps.doomed_weights import is_doomed
from headrace.consumers.steps.evaluation_sets import evaluation_groups
from headrace.consumers.steps.kl_references import KlReferences, ReferencedStep, ReferenceMissingError
from headrace.consumers.steps.world import base_source
from headrace.core.settings import Settings
from headrace.core.store import ObjectStore
from headrace.schemas.state import ModelState
from headrace.schemas.training import SftConfig, TrainConfig
from headrace.trainer.options import merged_config, resolve
from headrace.trainer.plan import BaseSource, KlReference, StepPlan

MAX_WINDOW_IDS = 16_384
"""Ids admitted since the snapshot that a model's state lists: beyond them a snapshot is due (rule 15)."""


class StepPlans:
    """Makes the plans of one lane.

    Args:
        settings: Catalogue, working folder.
        store: Where evaluation sets are.
        pool: Reads them.
        references: Policies that KL is measured against.
    """

    def __init__(self, settings: Settings, store: ObjectStore, pool: AdmissionPool, references: KlReferences) -> None:
        self._settings = settings
        self._store = store
        self._pool = pool
        self._references = references
        self._work_dir = settings.worker.work_dir.absolute()

    async def of(self, run: ModelRun, batch: Batch, attempt: str) -> StepPlan:
        """The step that trains this batch, from the committed state.

        Raises:
            ReferenceMissingError, EvaluationSetError: it needs what can't be had.
            HeadraceError: Kafka or the store can't be reached.
        """
        return await self._plan(run, run.state, batch, attempt)

    async def after(self, run: ModelRun, before: StepPlan, batch: Batch, attempt: str) -> StepPlan:
        """The step after `before`, which starts from the committed state; all but the scalars that `before` leads to.

        Raises:
            ReferenceMissingError: as `of`, or its reference is a step that no ledger has yet, or arrays that would have to be compared.
            HeadraceError: Kafka or the store can't be reached.
        """
        options = resolve(config_of(run, batch))
        if options.needs_reference and (options.kl.step_lag is not None or options.kl.logprobs_uri is not None):
            raise ReferenceMissingError("its KL reference is not known before the step before it is committed")
        return await self._plan(run, state_after(run.state, before), batch, attempt)

    async def _plan(self, run: ModelRun, state: ModelState, batch: Batch, attempt: str) -> StepPlan:
        config, sft, asked = config_of(run, batch), _sft(run, batch), options_of(run.jobs, batch.job_id)
        options = resolve(config)
        base = self.base(state)
        groups = tuple(waiting.group for waiting in batch.groups)
        evaluation = await evaluation_groups(self._store, self._pool, asked.evaluation, base, state.settings)
        reference: KlReference | None = None
        if options.needs_reference and sft is None:
            needed = ReferencedStep(
                model_id=state.model_id,
                incarnation=state.incarnation,
                version=state.policy_version,
                start=state.start_weights,
                groups=groups,
                evaluation=evaluation,
                is_doomed=partial(is_doomed, run),
            )
            reference = await self._references.of(needed, options.kl)
        return StepPlan(
            state=state_key(state),
            attempt=attempt,
            base=base,
            settings=state.settings,
            config=config,
            groups=groups,
            sft=sft,
            forward_only=asked.forward_only,
            evaluation=evaluation,
            scalars=state.scalars,
            reference=reference,
            snapshot=self._snapshot_due(state, run),
            report_rows="none" if asked.forward_only else self._settings.worker.report_rows,
            out_dir=self.out_dir(attempt),
        )

    def base(self, state: ModelState) -> BaseSource:
        """The base model of a model."""
        return base_source(self._settings.base_models[state.settings.base_model])

    def out_dir(self, attempt: str) -> str:
        """The local folder of an attempt."""
        return str(Path(self._work_dir, attempt))

    def _snapshot_due(self, state: ModelState, run: ModelRun) -> bool:
        since = state.policy_version + 1 - state.snapshot_step
        return since >= self._settings.worker.snapshot_every or run.window.since >= MAX_WINDOW_IDS


def config_of(run: ModelRun, batch: Batch) -> TrainConfig:
    """The job's config over the model's."""
    job = run.jobs.get(batch.job_id) if batch.job_id is not None else None
    own = job.document.config if job is not None and job.document is not None else None
    return merged_config(run.state.settings.train, own)


def _sft(run: ModelRun, batch: Batch) -> SftConfig | None:
    """The settings of a supervised job; None for any other step."""
    job = run.jobs.get(batch.job_id) if batch.job_id is not None else None
    document = job.document if job is not None else None
    return None if document is None or document.kind != "sft" else document.sft or SftConfig()
