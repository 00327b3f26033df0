"""From records of a lane's `trajectory-groups` to groups in buckets, rejections and dead letters.

Guarantees: records take effect in log order, each once: admitted, rejected with a reason, dead-lettered, or known already. A model is only
called unknown after the commands were read to the end that was written. A record that crashes the decoder does not affect its neighbours. A
shadow trains on another worker group's records: it skips records of models that are not shadowed, and records that can't be read, because
that group handles them (the isolated-shadow invariant). Limitations: admission is provisional; batch selection judges lag and versions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from aiokafka import ConsumerRecord

from headrace.consumers.worker.admission.messages import (
    AdmissionRequest,
    AdmissionResult,
    Admitted,
    NotTokenized,
    Refused,
    Unreadable,
    check_base,
)
from headrace.consumers.worker.admission.pool import AdmissionPool
from headrace.consumers.worker.base_models import base_source, wait_for_base
from headrace.consumers.worker.commands import CommandHandler
from headrace.consumers.worker.lane_model import LaneModel
from headrace.consumers.worker.lane_models import LaneModels
from headrace.consumers.worker.outgoing import dead_letter
from headrace.consumers.worker.pending import MAX_PENDING, PendingGroup, pending_room
from headrace.consumers.worker.reader import LaneReader
from headrace.consumers.worker.selection import has_all_groups
from headrace.core.lanes import lane_of
from headrace.core.outages import outlast
from headrace.core.polling import UnreadableRecord
from headrace.core.settings import Settings
from headrace.schemas.dead_letters import record_bytes
from headrace.schemas.envelope import header_text
from headrace.schemas.jobs import JobState, TrainingJob
from headrace.schemas.reasons import CodecError, DeadLetterReason, RejectionReason

_DELETED = "the model was deleted"
_KEY_BYTES = 1024
_HEADERS, _HEADER_BYTES = 1000, 256 * 1024
"""A record with more of them is a dead letter."""
_PRODUCER_CHARACTERS = 256
"""Of a `ce_source`, which a step's report names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Routed:
    """A record and its destination: a model with a request, or the dead letters."""

    record: ConsumerRecord
    model: LaneModel | None
    error: CodecError | None = None
    request: AdmissionRequest | None = None


class LaneIntake:
    """Takes records in."""

    def __init__(self, settings: Settings, models: LaneModels, reader: LaneReader, commands: CommandHandler, pool: AdmissionPool) -> None:
        self._settings = settings
        self._models = models
        self._reader = reader
        self._commands = commands
        self._pool = pool
        self._shadows = settings.worker.shadow_prefix is not None
        self._commands_read = False

    async def recover(self, model: LaneModel, records: Sequence[ConsumerRecord]) -> None:
        """Put pending groups into their buckets, in the order of the log; the lane's position stays.

        Raises:
            BaseUnusableError: the base model can't be used; nothing has changed.
        """
        base = base_source(self._settings.base_models[model.state.settings.base_model])
        results = await self._admit([AdmissionRequest.of(record, base, model.state.settings) for record in records])
        check_base(results)
        if model.status == "active":  # no command or fault came meanwhile
            model.held = {}
            for record, result in zip(records, results, strict=True):
                self._apply(record, model, result, again=True)
            model.recovering = frozenset()
            self._models.note_change()

    async def take(self, records: Sequence[ConsumerRecord]) -> None:
        """Take records in, in their order."""
        if any(self._unknown(record) for record in records):
            # A model that was created before its groups were sent is among these commands.
            self._commands.apply(await self._reader.read_commands_to_end())
            self._commands_read = True
        routed = [self._route(record) for record in records]
        results = iter(await self._admit([r.request for r in routed if r.request is not None]))
        # No await below: a commit sees the models before or after a record, never in between.
        for item in routed:
            if item.error is not None:
                self._dead_letter(item.record, item.error)
            elif item.model is not None and item.request is not None:
                self._apply(item.record, item.model, next(results))
            self._models.position = item.record.offset + 1
        self._models.note_change()

    def _unknown(self, record: ConsumerRecord) -> bool:
        if isinstance(record, UnreadableRecord) or len(record.key or b"") > _KEY_BYTES:
            return False
        if record.offset < self._models.state.scanned or (self._shadows and self._commands_read):
            # Most records that a shadow reads may be of models that are not shadowed. It only waits for models created before the claim.
            return False
        return self._model_of((record.key or b"").decode(errors="replace")) is None

    def _model_of(self, model_id: str) -> LaneModel | None:
        """The model that trains on the groups of this model: itself, or its shadow."""
        if not self._shadows:
            return self._models.models.get(model_id)
        shadows = [model for model in self._models.models.values() if model.state.shadow_of == model_id and model.status != "deleted"]
        # Only one is active at a time.
        return min(shadows, key=lambda model: (model.status != "active", model.state.created_at), default=None)

    def _route(self, record: ConsumerRecord) -> _Routed:
        if isinstance(record, UnreadableRecord):
            return _Routed(record=record, model=None, error=record.error)
        try:
            model_id = _model_id(record, self._models.state.partitions)
        except CodecError as error:
            return _Routed(record=record, model=None, error=error)
        model = self._model_of(model_id)
        if model is None and record.offset < self._models.state.scanned:
            return _Routed(record=record, model=None)  # dead-lettered by a former claim
        if model is None:
            detail = f"no model {model_id!r}: create it first (`headrace models create`), then send its groups"
            return _Routed(record=record, model=None, error=CodecError(DeadLetterReason.UNKNOWN_MODEL, "key", detail))
        if model.handled(record.offset):
            return _Routed(record=record, model=model)
        return _Routed(record=record, model=model, request=self._request(record, model))

    def _request(self, record: ConsumerRecord, model: LaneModel) -> AdmissionRequest:
        settings = model.state.settings
        entry = self._settings.base_models.get(settings.base_model)
        # The groups of a model that does not train are only read as far as their ids, to be held or rejected.
        return AdmissionRequest.of(record, base_source(entry) if entry is not None and model.trains else None, settings)

    async def _admit(self, requests: list[AdmissionRequest]) -> list[AdmissionResult]:
        # While the store is away, payloads look missing. So this waits for the store.
        return await outlast(f"lane {self._models.state.lane}, which reads groups,", lambda: self._pool.admit(requests))

    def _apply(self, record: ConsumerRecord, model: LaneModel, result: AdmissionResult, *, again: bool = False) -> None:
        match result:
            case Unreadable():
                self._dead_letter(record, result.error())
            case TrainingJob():
                model.open_job(result, record.offset, record.timestamp)
                if model.status == "deleted" and result.job_id in model.jobs:
                    model.move_job(result.job_id, JobState.FAILED, message=_DELETED)
                elif not model.trains and result.job_id in model.jobs:
                    model.note_waiting(result.job_id, model.why_it_does_not_train())
            case Refused():
                model.reject_group(
                    offset=record.offset,
                    group_id=result.group_id,
                    job_id=result.job_id,
                    reason=result.reason,
                    detail=result.detail,
                    trajectory=result.trajectory,
                )
            case NotTokenized(group_id=group_id, job_id=job_id):
                if result.waits_for is not None and model.trains:
                    wait_for_base(model, result.waits_for)
                self._hold(model, record.offset, group_id, job_id)
            case Admitted(group=group, job_id=job_id):
                if not model.trains and not again:  # it stopped or began to wait while the group was tokenized
                    self._hold(model, record.offset, group.group_id, job_id)
                    return
                rejection = self._rejection(model, record.offset, group.group_id, job_id)
                if rejection is None:
                    # The commit that listed a pending group also reported its members.
                    report = record.offset not in model.recovering
                    waiting = PendingGroup(
                        offset=record.offset,
                        group=group,
                        job_id=job_id,
                        producer=header_text(record.headers).get("ce_source", "")[:_PRODUCER_CHARACTERS] or None,
                        timestamp_ms=record.timestamp,
                    )
                    model.admit(waiting, report_rejected=report)
                else:
                    model.reject_group(
                        offset=record.offset, group_id=group.group_id, job_id=job_id, reason=rejection[0], detail=rejection[1]
                    )

    @staticmethod
    def _hold(model: LaneModel, offset: int, group_id: str, job_id: str | None) -> None:
        """Keep a group of a model that does not train. If the model is deleted, reject the group."""
        if model.status != "deleted":
            model.hold(offset, group_id, job_id)
        else:
            model.reject_group(offset=offset, group_id=group_id, job_id=job_id, reason=RejectionReason.MODEL_DELETED, detail=_DELETED)

    def _rejection(self, model: LaneModel, offset: int, group_id: str, job_id: str | None) -> tuple[RejectionReason, str] | None:
        """Why a group that fits can't be admitted."""
        if job_id is not None and job_id in model.draft.closed_jobs:
            return RejectionReason.JOB_CLOSED, f"job {job_id} has ended"
        job = None if job_id is None or offset in model.recovering else model.jobs.get(job_id)
        if job is not None and has_all_groups(model, job):
            # When its step runs depends on timing. That the job was complete follows from the log.
            return RejectionReason.JOB_CLOSED, f"job {job_id} had all its groups before this one came"
        # A group that was pending when the lane was claimed is itself in the window already.
        if offset not in model.recovering and model.window.contains(group_id):
            return RejectionReason.DUPLICATE, f"group {group_id} was admitted among the last {self._settings.worker.duplicate_window}"
        room = pending_room(MAX_PENDING, job_id)
        if len(model.waiting) >= room:
            return RejectionReason.BACKLOG_FULL, f"{room} groups wait already"
        return None

    def _dead_letter(self, record: ConsumerRecord, error: CodecError) -> None:
        # A former claim has written it if it is below that claim's `scanned`; a shadow leaves it to the worker group that it shadows.
        if record.offset >= self._models.state.scanned and not self._shadows:
            self._models.dead_letters.append(dead_letter(self._settings.topic_names, record, error, record.partition))


def _model_id(record: ConsumerRecord, partitions: int) -> str:
    if record.key is None:
        raise CodecError(DeadLetterReason.MISSING_KEY, "key", "the key names the model; this record has none")
    if len(record.key) > _KEY_BYTES:
        raise CodecError(
            DeadLetterReason.TOO_LARGE, "key", f"the key has {len(record.key)} bytes: no model has an id of more than {_KEY_BYTES}"
        )
    if len(record.headers) > _HEADERS or record_bytes(None, None, record.headers) > _HEADER_BYTES:
        detail = f"{len(record.headers)} headers: at most {_HEADERS} of {_HEADER_BYTES} bytes in all are read"
        raise CodecError(DeadLetterReason.TOO_LARGE, "headers", detail)
    try:
        model_id: str = record.key.decode()
    except UnicodeDecodeError:
        raise CodecError(DeadLetterReason.MISSING_KEY, "key", "the key is no UTF-8 text: no model has it") from None
    if lane_of(model_id, partitions) != record.partition:
        detail = (
            f"murmur2({model_id!r}) mod {partitions} is {lane_of(model_id, partitions)}, not {record.partition}: "
            "use the Java client's partitioner (librdkafka: partitioner=murmur2_random)"
        )
        raise CodecError(DeadLetterReason.WRONG_LANE, "key", detail)
    return model_id
