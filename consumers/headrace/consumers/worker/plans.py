"""The plan of a step, and the evaluation set that a job's step scores.

Guarantees: a plan is a pure function of the batch, the config, the model's state and the step number, except its attempt, and whether a
snapshot is due, which changes nothing that is trained. An evaluation set that is missing, that differs from the one that the job named, or
of which no group can be scored, raises with the reason; its groups are no part of the model's batch policy, so groups without variance
stay. Limitations: single groups of an evaluation set that can't be tokenized are left out, and the log counts them. Each step reads its set
again.
"""

import asyncio
import logging
from functools import partial
from pathlib import Path

from headrace.consumers.worker.admission.messages import AdmissionRequest, Admitted, check_base
from headrace.consumers.worker.admission.pool import AdmissionPool
from headrace.consumers.worker.base_models import base_source
from headrace.consumers.worker.jobs import options_of
from headrace.consumers.worker.kl_references import KlReferences, ReferencedStep, ReferenceMissingError
from headrace.consumers.worker.lane_model import LaneModel
from headrace.consumers.worker.selection import Batch
from headrace.consumers.worker.storage.deleted_weights import is_doomed
from headrace.core.errors import HeadraceError
from headrace.core.group_sets import read_lines
from headrace.core.payloads import PayloadError
from headrace.core.settings import Settings
from headrace.core.store import ObjectStore
from headrace.schemas.jobs import GroupSet
from headrace.schemas.state import ModelState
from headrace.schemas.training import BatchPolicy, ModelSettings, SftConfig, TrainConfig
from headrace.trainer.groups import TokenizedGroup
from headrace.trainer.options import merged_config, resolve
from headrace.trainer.plan import BaseSource, KlReference, StateKey, StepPlan, StepResult

logger = logging.getLogger(__name__)

MAX_WINDOW_IDS = 16_384
"""Ids admitted since the snapshot that a model's state lists. With more of them a snapshot is due (the bounded-records invariant)."""


class EvaluationSetError(HeadraceError):
    """An evaluation set that can't be used; says which and why."""


class StepPlans:
    """Makes the plans of one lane."""

    def __init__(self, settings: Settings, store: ObjectStore, pool: AdmissionPool, references: KlReferences) -> None:
        self._settings = settings
        self._store = store
        self._pool = pool
        self._references = references
        self._work_dir = settings.worker.work_dir.absolute()

    async def of_batch(self, model: LaneModel, batch: Batch, attempt: str) -> StepPlan:
        """The step that trains this batch, from the committed state.

        Raises:
            ReferenceMissingError, EvaluationSetError: it needs something that is missing.
            HeadraceError: Kafka or the store can't be reached.
        """
        return await self._plan(model, model.state, batch, attempt)

    async def after(self, model: LaneModel, before: StepPlan, result: StepResult, batch: Batch, attempt: str) -> StepPlan:
        """The step after `before`, which has run from the committed state and is not committed.

        Raises:
            ReferenceMissingError: as `of_batch`; or its reference is only known after that commit, or is an array that is not compared.
            HeadraceError: Kafka or the store can't be reached.
        """
        options = resolve(config_of(model, batch))
        if options.needs_reference and (options.kl.step_lag is not None or options.kl.logprobs_uri is not None):
            raise ReferenceMissingError("its KL reference is not known before the step before it is committed")
        step = model.state.policy_version + 1
        changes = {"policy_version": step, "last_attempt": before.attempt, "scalars": result.scalars}
        state = model.state.model_copy(update=changes | ({"snapshot_step": step} if before.snapshot else {}))
        return await self._plan(model, state, batch, attempt)

    async def _plan(self, model: LaneModel, state: ModelState, batch: Batch, attempt: str) -> StepPlan:
        config, sft, options = config_of(model, batch), _sft(model, batch), options_of(model.jobs, batch.job_id)
        resolved = resolve(config)
        base = self.base(state)
        groups = tuple(waiting.group for waiting in batch.groups)
        evaluation = await evaluation_groups(self._store, self._pool, options.evaluation, base, state.settings)
        reference: KlReference | None = None
        if resolved.needs_reference and sft is None:
            needed = ReferencedStep(
                model_id=state.model_id,
                incarnation=state.incarnation,
                version=state.policy_version,
                start=state.start_weights,
                groups=groups,
                evaluation=evaluation,
                is_doomed=partial(is_doomed, model),
            )
            reference = await self._references.find(needed, resolved.kl)
        since_snapshot = state.policy_version + 1 - state.snapshot_step
        return StepPlan(
            state=state_key(state),
            attempt=attempt,
            base=base,
            settings=state.settings,
            config=config,
            groups=groups,
            sft=sft,
            forward_only=options.forward_only,
            evaluation=evaluation,
            scalars=state.scalars,
            reference=reference,
            snapshot=since_snapshot >= self._settings.worker.snapshot_every or model.window.since >= MAX_WINDOW_IDS,
            report_rows="none" if options.forward_only else self._settings.worker.report_rows,
            out_dir=self.out_dir(attempt),
        )

    def restart(self, model: LaneModel, begins: StateKey, attempt: str) -> StepPlan:
        """A plan that trains nothing: it writes the state `begins` as the model's next version."""
        state = model.state
        becomes = StateKey(model_id=state.model_id, incarnation=state.incarnation, step=state.policy_version + 1, attempt=attempt)
        return StepPlan(
            state=begins,
            attempt=attempt,
            base=self.base(state),
            settings=state.settings,
            config=state.settings.train,
            groups=(),
            becomes=becomes,
            out_dir=self.out_dir(attempt),
        )

    def base(self, state: ModelState) -> BaseSource:
        """The base model of a model."""
        return base_source(self._settings.base_models[state.settings.base_model])

    def out_dir(self, attempt: str) -> str:
        """The local folder of an attempt."""
        return str(Path(self._work_dir, attempt))


def state_key(state: ModelState) -> StateKey:
    """The identity of a committed state."""
    return StateKey(model_id=state.model_id, incarnation=state.incarnation, step=state.policy_version, attempt=state.last_attempt)


def config_of(model: LaneModel, batch: Batch) -> TrainConfig:
    """The job's config over the model's."""
    job = model.jobs.get(batch.job_id) if batch.job_id is not None else None
    own = job.document.config if job is not None and job.document is not None else None
    return merged_config(model.state.settings.train, own)


def _sft(model: LaneModel, batch: Batch) -> SftConfig | None:
    """The settings of a supervised job; None for any other step."""
    job = model.jobs.get(batch.job_id) if batch.job_id is not None else None
    document = job.document if job is not None else None
    return None if document is None or document.kind != "sft" else document.sft or SftConfig()


async def evaluation_groups(
    store: ObjectStore, pool: AdmissionPool, stored: GroupSet | None, base: BaseSource, settings: ModelSettings
) -> tuple[TokenizedGroup, ...]:
    """The groups of an evaluation set, tokenized as the model's groups are; none without a set.

    Raises:
        EvaluationSetError: see there.
        BaseUnusableError: the base model can't be used.
        HeadraceError: the store can't be reached.
    """
    if stored is None:
        return ()
    try:
        lines = await asyncio.to_thread(read_lines, store, stored)
    except PayloadError as error:
        raise EvaluationSetError(f"the evaluation set can't be used: {error}") from error
    plain = settings.model_copy(update={"batch": BatchPolicy(over_long=settings.batch.over_long)})
    requests = [
        AdmissionRequest(value=line, headers={}, fallback_id=f"line {number}", base=base, settings=plain)
        for number, line in enumerate(lines, start=1)
    ]
    answers = await pool.admit(requests)
    check_base(answers)
    groups = tuple(answer.group for answer in answers if isinstance(answer, Admitted))
    rejected = [(number, answer) for number, answer in enumerate(answers, start=1) if not isinstance(answer, Admitted)]
    if rejected:
        number, answer = rejected[0]
        first = f"line {number}: {getattr(answer, 'detail', type(answer).__name__)}"
        if not groups:
            raise EvaluationSetError(f"no group of the evaluation set {stored.uri} can be scored, the first is {first}")
        logger.warning(
            "%d of %d groups of the evaluation set %s are left out, the first is %s", len(rejected), len(answers), stored.uri, first
        )
    if not any(group.trainable_tokens for group in groups):
        raise EvaluationSetError(f"the evaluation set {stored.uri} has no sampled token: each sample needs an assistant's answer")
    return groups
