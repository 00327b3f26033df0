"""From records of a lane's `trajectory-groups` to groups in buckets, refusals and dead letters.

Guarantees: records take effect in log order, each once: admitted, refused with a reason, dead-lettered, or known already. An
unknown model is only called unknown after the commands were read to the end that was written. One poisonous record never takes
its neighbours down. A shadow trains on another worker group's records: those of models that nobody shadows, and what can't be read, are
that group's business and passed by (rule 18). Gives up: nothing by time; admission is provisional (lag and versions are judged at the cut).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from aiokafka import ConsumerRecord

from headrace.consumers.intake.admission import (
    AdmissionRequest,
    AdmissionResult,
    Admitted,
    NotTokenized,
    Refused,
    Unreadable,
    check_base,
)
from headrace.consumers.intake.admission_pool import AdmissionPool
from headrace.consumers.lanes.commands import CommandHandler
from headrace.consumers.lanes.dead_letters import dead_letter
from headrace.consumers.lanes.reader import LaneReader
from headrace.consumers.memory.book import LaneBook
from headrace.consumers.memory.held import MAX_PENDING, hold, wait, why_it_waits
from headrace.consumers.memory.model_run import ModelRun
from headrace.consumers.memory.state_bounds import pending_room
from headrace.consumers.memory.waiting import Waiting
from headrace.consumers.steps.cut import has_all_groups
from headrace.consumers.steps.world import base_source
from headrace.core.lanes import lane_of
from headrace.core.outages import outlast
from headrace.core.polling import UnreadableRecord
from headrace.core.settings import Settings
from headrace.schemas.dead_letters import record_bytes
from headrace.schemas.envelope import header_text
from headrace.schemas.errors import CodecError
from headrace.schemas.jobs import JobState, TrainingJob
from headrace.schemas.reasons import DeadLetterReason, RejectionReason

_DELETED = "the model was deleted"
_KEY_BYTES = 1024
_HEADERS, _HEADER_BYTES = 1000, 256 * 1024
"""A record with more of them is a dead letter."""
_PRODUCER_CHARACTERS = 256
"""Of a `ce_source`, which a step's report names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Routed:
    """A record and where it goes: to a model with a request, or to the dead letters."""

    record: ConsumerRecord
    run: ModelRun | None
    error: CodecError | None = None
    request: AdmissionRequest | None = None


class LaneIntake:
    """Takes records in.

    Args:
        settings: Catalogue, limits.
        book: The lane's memory.
        reader: For the commands behind an unknown model.
        commands: Applies them.
        pool: Decodes and tokenizes.
    """

    def __init__(self, settings: Settings, book: LaneBook, reader: LaneReader, commands: CommandHandler, pool: AdmissionPool) -> None:
        self._settings = settings
        self._book = book
        self._reader = reader
        self._commands = commands
        self._pool = pool
        self._shadows = settings.worker.shadow_prefix is not None
        self._commands_read = False

    async def recover(self, run: ModelRun, records: Sequence[ConsumerRecord]) -> None:
        """Put pending groups into their buckets, in the order of the log; the lane's position stays.

        Raises:
            BaseUnusableError: the base model can't be used; nothing has changed.
        """
        base = base_source(self._settings.base_models[run.state.settings.base_model])
        results = await self._admit([AdmissionRequest.of(record, base, run.state.settings) for record in records])
        check_base(results)
        if run.status == "active":  # no command or fault came meanwhile
            run.held = {}
            for record, result in zip(records, results, strict=True):
                self._apply(record, run, result, again=True)
            run.recovering = frozenset()
            self._book.note_news()

    async def take(self, records: Sequence[ConsumerRecord]) -> None:
        """Take a run of records in, in order."""
        if any(self._unknown(record) for record in records):
            # They were read before this: a model created before its groups were sent is among the commands.
            self._commands.apply(await self._reader.read_commands_to_end())
            self._commands_read = True
        routed = [self._route(record) for record in records]
        results = iter(await self._admit([r.request for r in routed if r.request is not None]))
        # No await below: a commit sees the book before or after a record, never in between.
        for item in routed:
            if item.error is not None:
                self._dead_letter(item.record, item.error)
            elif item.run is not None and item.request is not None:
                self._apply(item.record, item.run, next(results))
            self._book.position = item.record.offset + 1
        self._book.note_news()

    def _unknown(self, record: ConsumerRecord) -> bool:
        if isinstance(record, UnreadableRecord) or len(record.key or b"") > _KEY_BYTES:
            return False
        if record.offset < self._book.state.scanned or (self._shadows and self._commands_read):
            # Most of what a shadow reads may be nobody's that it shadows: only what was asked for before the claim is waited for.
            return False
        return self._run_of((record.key or b"").decode(errors="replace")) is None

    def _run_of(self, model_id: str) -> ModelRun | None:
        """The model that trains on the groups of this one: itself, or its shadow."""
        if not self._shadows:
            return self._book.runs.get(model_id)
        shadows = [run for run in self._book.runs.values() if run.state.shadow_of == model_id and run.status != "deleted"]
        # Only one is active at a time.
        return min(shadows, key=lambda run: (run.status != "active", run.state.created_at), default=None)

    def _route(self, record: ConsumerRecord) -> _Routed:
        if isinstance(record, UnreadableRecord):
            return _Routed(record=record, run=None, error=record.error)
        try:
            model_id = _model_id(record, self._book.state.partitions)
        except CodecError as error:
            return _Routed(record=record, run=None, error=error)
        run = self._run_of(model_id)
        if run is None and record.offset < self._book.state.scanned:
            return _Routed(record=record, run=None)  # dead-lettered by a former claim
        if run is None:
            detail = f"no model {model_id!r}: create it first (`headrace models create`), then send its groups"
            return _Routed(record=record, run=None, error=CodecError(DeadLetterReason.UNKNOWN_MODEL, "key", detail))
        if run.handled(record.offset):
            return _Routed(record=record, run=run)
        return _Routed(record=record, run=run, request=self._request(record, run))

    def _request(self, record: ConsumerRecord, run: ModelRun) -> AdmissionRequest:
        settings = run.state.settings
        entry = self._settings.base_models.get(settings.base_model)
        # The groups of a model that does not train are read, to be held or refused by their ids.
        return AdmissionRequest.of(record, base_source(entry) if entry is not None and run.trains else None, settings)

    async def _admit(self, requests: list[AdmissionRequest]) -> list[AdmissionResult]:
        # A store that is away looks like missing payloads and is none: it is waited for (rule 13).
        return await outlast(f"lane {self._book.state.lane}, which reads groups,", lambda: self._pool.admit(requests))

    def _apply(self, record: ConsumerRecord, run: ModelRun, result: AdmissionResult, *, again: bool = False) -> None:
        match result:
            case Unreadable():
                self._dead_letter(record, result.error())
            case TrainingJob():
                run.open_job(result, record.offset, record.timestamp)
                if run.status == "deleted" and result.job_id in run.jobs:
                    run.move_job(result.job_id, JobState.FAILED, message=_DELETED)
                elif not run.trains and result.job_id in run.jobs:
                    run.note_waiting(result.job_id, why_it_waits(run))
            case Refused():
                run.refuse(
                    offset=record.offset,
                    group_id=result.group_id,
                    job_id=result.job_id,
                    reason=result.reason,
                    detail=result.detail,
                    trajectory=result.trajectory,
                )
            case NotTokenized(group_id=group_id, job_id=job_id):
                if result.waits_for is not None and run.trains:
                    wait(run, result.waits_for)
                self._hold(run, record.offset, group_id, job_id)
            case Admitted(group=group, job_id=job_id):
                if not run.trains and not again:  # it has stopped, or waits, since the group was handed over
                    self._hold(run, record.offset, group.group_id, job_id)
                    return
                refusal = self._refusal(run, record.offset, group.group_id, job_id)
                if refusal is None:
                    # What was pending in the committed state was reported with it: the same transaction holds both.
                    report = record.offset not in run.recovering
                    waiting = Waiting(
                        offset=record.offset,
                        group=group,
                        job_id=job_id,
                        producer=header_text(record.headers).get("ce_source", "")[:_PRODUCER_CHARACTERS] or None,
                        timestamp_ms=record.timestamp,
                    )
                    run.admit(waiting, report_rejected=report)
                else:
                    run.refuse(offset=record.offset, group_id=group.group_id, job_id=job_id, reason=refusal[0], detail=refusal[1])

    @staticmethod
    def _hold(run: ModelRun, offset: int, group_id: str, job_id: str | None) -> None:
        """Keep a group of a model that does not train; of a deleted one it is refused."""
        if run.status != "deleted":
            hold(run, offset, group_id, job_id)
        else:
            run.refuse(offset=offset, group_id=group_id, job_id=job_id, reason=RejectionReason.MODEL_DELETED, detail=_DELETED)

    def _refusal(self, run: ModelRun, offset: int, group_id: str, job_id: str | None) -> tuple[RejectionReason, str] | None:
        """Why a group that fits can't be admitted."""
        if job_id is not None and job_id in run.closed:
            return RejectionReason.JOB_CLOSED, f"job {job_id} has ended"
        job = None if job_id is None or offset in run.recovering else run.jobs.get(job_id)
        if job is not None and has_all_groups(run, job):
            # Whether its step has run by now is a matter of time; that it had all it names stands in the log (rule 9).
            return RejectionReason.JOB_CLOSED, f"job {job_id} had all its groups before this one came"
        # A group that was pending when the lane was claimed is in the window already, by itself.
        if offset not in run.recovering and run.window.seen(group_id):
            return RejectionReason.DUPLICATE, f"group {group_id} was admitted among the last {self._settings.worker.duplicate_window}"
        room = pending_room(MAX_PENDING, job_id)
        if len(run.waiting) >= room:
            return RejectionReason.BACKLOG_FULL, f"{room} groups wait already"
        return None

    def _dead_letter(self, record: ConsumerRecord, error: CodecError) -> None:
        # A former claim has written it if it stands below what was scanned then; a shadow leaves it to the group that it shadows.
        if record.offset >= self._book.state.scanned and not self._shadows:
            self._book.dead_letters.append(dead_letter(self._settings.topic_names, record, error, record.partition))


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
