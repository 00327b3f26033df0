"""Reruns: a committed step run again, from its ledger record and the log. Recovery and replay share it (the verified-rerun invariant).

A rerun uses the ledger's offsets, config, scalars and attempt. The groups are fetched by their offsets, read and tokenized as they were,
and judged at the version that the step started from. Digests show whether the outcome is the ledger's: of the packed plan, and of the
weights.

Guarantees: a rerun publishes, stores and commits nothing. `differences` is empty only if plan and weights are equal bit for bit. If a rerun
is impossible, `CannotRerunError` says what is missing; if a store or a broker is away, another error is raised, because it may come back.
Limitations: a group's rejections are not compared; the plan's digest differs if any other token is trained.
"""

import asyncio
import logging
import shutil
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from headrace.consumers.worker.admission.messages import AdmissionRequest, Admitted, check_base
from headrace.consumers.worker.admission.pool import AdmissionPool
from headrace.consumers.worker.base_models import base_source
from headrace.consumers.worker.kl_references import KlReferences, ReferencedStep, ReferenceMissingError
from headrace.consumers.worker.plans import EvaluationSetError, evaluation_groups
from headrace.consumers.worker.selection import judge
from headrace.consumers.worker.world import TrainerWorld, Turn
from headrace.core.errors import HeadraceError
from headrace.core.fetching import fetch_offsets
from headrace.core.kafka import client_options
from headrace.core.reading import OffsetLostError
from headrace.core.settings import Settings
from headrace.core.store import open_store
from headrace.core.store.folders import folder_digest, sha256_of_file
from headrace.schemas.state import Fingerprint, OffsetRange, StepRecord, TrainingScalars
from headrace.schemas.training import ModelSettings, TrainConfig
from headrace.schemas.weights import StoredFile, WeightsRef
from headrace.trainer.groups import TokenizedGroup
from headrace.trainer.options import merged_config, resolve
from headrace.trainer.plan import BaseSource, BaseUnusableError, KlReference, StateKey, StepPlan, StepResult
from headrace.trainer.rank import BaseNotLoadedError, StepFailedError, cause_of

logger = logging.getLogger(__name__)

RESTART_CUTS = frozenset({"rebased", "forked"})
"""The `cut` of steps that train nothing: their state is that of their snapshot, whatever the steps before were."""


class CannotRerunError(HeadraceError):
    """The step can't be run again: its groups are gone, or this environment differs. Says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What a fork changes."""

    config: TrainConfig | None = None
    """Merged over the record's own."""
    exclude: frozenset[str] = frozenset()
    """Ids of groups that are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """The outcome of a step that was run again."""

    record: StepRecord
    result: StepResult
    weights_digest: str
    """Of the folder `weights/`, as `WeightsRef.digest` of the stored one."""
    differences: tuple[str, ...] = field(default=())
    """What differs from the ledger; empty: all bits are equal."""
    fingerprint_differences: tuple[str, ...] = field(default=())
    """`torch: 2.8.0, the ledger has 2.7.1`."""
    out_dir: Path
    """`weights/`, and `snapshot/` if `keep_snapshot`. The caller deletes it."""


class StepReruns:
    """Runs steps again for the models of one lane."""

    def __init__(self, settings: Settings, world: TrainerWorld, pool: AdmissionPool, lane: int, references: KlReferences) -> None:
        self._settings = settings
        self._world = world
        self._pool = pool
        self._lane = lane
        self._references = references
        self._store = open_store(settings.store.url, settings.s3)
        self._options = client_options(settings.kafka, f"headrace-rerun-{lane}")
        self._topic = settings.groups_topic

    async def run(
        self,
        record: StepRecord,
        model: ModelSettings,
        snapshot: WeightsRef | None,
        *,
        start: WeightsRef | None = None,
        changes: Changes | None = None,
        scalars: TrainingScalars | None = None,
        keep_snapshot: bool = False,
        evaluate: bool = False,
        turn: Turn | None = None,
    ) -> Rerun:
        """Run a step again.

        Args:
            record: Of the ledger.
            model: The model's settings.
            snapshot: Of the state that the step starts from; None where the world holds it, or where the step is the base model's first.
            start: What the model's version 0 is; None: the base model.
            changes: Of a fork.
            scalars: Of a fork, whose state is another one than the record's; None: the record's.
            keep_snapshot: Whether the new state is written, too.
            evaluate: Whether the evaluation set of the step's job is scored, too, if it still exists. No weight depends on it.
            turn: The device, if the caller holds it.

        Raises:
            CannotRerunError: see there.
            BaseUnusableError: the base model can't be used; the step may be run again when it can.
            StateNotHeldError, RankDiedError: as `TrainerWorld.run`; begin again from a snapshot.
            HeadraceError: the store or the broker is away.
        """
        changes = changes or Changes()
        config = record.config if changes.config is None else merged_config(record.config, changes.config)
        if record.cut in RESTART_CUTS:
            raise CannotRerunError(f"step {record.step} is {record.cut}: it trained nothing, and starts from its own snapshot")
        groups = await self._groups(record, model, config, changes.exclude)
        evaluation = await self._evaluation(record, model) if evaluate else ()
        plan = StepPlan(
            state=key_before(record),
            attempt=record.attempt,
            base=self._base(model),
            settings=model,
            config=config,
            groups=groups,
            sft=record.sft,
            forward_only=record.options.forward_only,
            evaluation=evaluation,
            scalars=record.scalars_before if scalars is None else scalars,
            reference=await self._reference(record, config, start, groups, evaluation),
            snapshot=keep_snapshot,
            out_dir=str(self._settings.worker.work_dir.absolute() / f"rerun-{uuid.uuid4()}"),
        )
        out_dir = Path(plan.out_dir)
        try:
            result = await self._world.run(plan, snapshot, turn)
            digest = await asyncio.to_thread(_digest_of, out_dir / "weights")
        except StepFailedError as error:
            await asyncio.to_thread(shutil.rmtree, out_dir, ignore_errors=True)
            if isinstance(error, BaseNotLoadedError):
                raise
            raise CannotRerunError(f"step {record.step} failed, which it did not before: {cause_of(error)}") from error
        except BaseException:
            shutil.rmtree(out_dir, ignore_errors=True)
            raise
        return Rerun(
            record=record,
            result=result,
            weights_digest=digest,
            differences=_differences(record, result, digest),
            fingerprint_differences=fingerprint_differences(record.fingerprint, result.fingerprint),
            out_dir=out_dir,
        )

    def _base(self, model: ModelSettings) -> BaseSource:
        entry = self._settings.base_models.get(model.base_model)
        if entry is None:
            raise BaseUnusableError(f"base model {model.base_model!r} is not in this worker's catalogue")
        return base_source(entry)

    async def _evaluation(self, record: StepRecord, model: ModelSettings) -> tuple[TokenizedGroup, ...]:
        try:
            return await evaluation_groups(self._store, self._pool, record.options.evaluation, self._base(model), model)
        except EvaluationSetError as error:
            logger.warning("step %d is run again without its evaluation: %s", record.step, error)
            return ()

    async def _reference(
        self,
        record: StepRecord,
        config: TrainConfig,
        start: WeightsRef | None,
        groups: tuple[TokenizedGroup, ...],
        evaluation: tuple[TokenizedGroup, ...],
    ) -> KlReference | None:
        options = resolve(config)
        if not options.needs_reference or record.sft is not None:
            return None
        needed = ReferencedStep(
            model_id=record.model_id,
            incarnation=record.incarnation,
            version=record.policy_version_before,
            start=start,
            groups=groups,
            evaluation=evaluation,
        )
        try:
            return await self._references.find(needed, options.kl)
        except ReferenceMissingError as error:
            raise CannotRerunError(str(error)) from error

    async def _groups(
        self, record: StepRecord, model: ModelSettings, config: TrainConfig, exclude: frozenset[str]
    ) -> tuple[TokenizedGroup, ...]:
        try:
            records = await fetch_offsets(self._options, self._topic, self._lane, offsets_of(record.offsets))
        except OffsetLostError as error:
            raise CannotRerunError(f"step {record.step}: {error}") from error
        base = self._base(model)
        requests = [AdmissionRequest.of(found, base, model) for found in records.values()]
        groups = []
        answers = await self._pool.admit(requests)
        check_base(answers)
        for offset, answer in zip(records, answers, strict=True):
            if not isinstance(answer, Admitted):
                why = getattr(answer, "detail", type(answer).__name__)
                raise CannotRerunError(
                    f"step {record.step}: the group at offset {offset}, which it trained on, can't be read any more: {why}"
                )
            if answer.group.group_id in exclude:
                continue
            shadow = self._settings.worker.shadow_prefix is not None
            verdict = judge(model, record.policy_version_before, answer.group, config.packed_sequence_length, shadow=shadow)
            if verdict.refusal is not None:
                detail = (
                    f"step {record.step}: the group at offset {offset}, which it trained on, would be refused now: {verdict.refusal.detail}"
                )
                raise CannotRerunError(detail)
            groups.append(verdict.group)
        return tuple(groups)


def key_before(record: StepRecord) -> StateKey:
    """The state that a step started from."""
    return StateKey(
        model_id=record.model_id, incarnation=record.incarnation, step=record.policy_version_before, attempt=record.attempt_before
    )


def key_after(record: StepRecord) -> StateKey:
    """The state that a step made."""
    return StateKey(model_id=record.model_id, incarnation=record.incarnation, step=record.step, attempt=record.attempt)


def offsets_of(ranges: Iterable[OffsetRange]) -> list[int]:
    """Every offset in the ranges."""
    return [offset for found in ranges for offset in range(found.first, found.last + 1)]


def fingerprint_differences(ledger: Fingerprint, here: Fingerprint) -> tuple[str, ...]:
    """What differs between two environments, field by field."""
    now, then = here.model_dump(), ledger.model_dump()
    return tuple(f"{name}: {now.get(name)}, the ledger has {value}" for name, value in then.items() if now.get(name) != value)


def _differences(record: StepRecord, result: StepResult, weights_digest: str) -> tuple[str, ...]:
    pairs = (("plan", result.plan_digest, record.plan_digest), ("weights", weights_digest, record.weights.digest))
    return tuple(f"{name} digest {found}, the ledger has {expected}" for name, found, expected in pairs if found != expected)


def _digest_of(folder: Path) -> str:
    return folder_digest(
        StoredFile(path=path.relative_to(folder).as_posix(), size=path.stat().st_size, sha256=sha256_of_file(path))
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    )
