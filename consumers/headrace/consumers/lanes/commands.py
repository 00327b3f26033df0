"""What commands do to a lane: models are created, deleted and resumed, jobs are cancelled, paused and resumed.

Guarantees: a command takes effect once, in log order; what can't be read is dead-lettered; repeating a command changes nothing. A
model whose settings can't be trained here is created as `stopped`, with the reason in its state; one whose base model has no folder here
waits for it.
"""

import logging
from collections.abc import Iterable

from aiokafka import ConsumerRecord
from pydantic import BaseModel

from headrace.consumers.lanes.dead_letters import dead_letter
from headrace.consumers.memory.book import LaneBook
from headrace.consumers.memory.duplicates import DuplicateWindow
from headrace.consumers.memory.held import refuse_unread, wait
from headrace.consumers.memory.model_run import ModelRun
from headrace.consumers.steps.catalogue import base_problem, problem_of
from headrace.consumers.steps.doomed_weights import doom
from headrace.core.lanes import lane_of
from headrace.core.model_views import incarnation_of
from headrace.core.polling import UnreadableRecord
from headrace.core.settings import Settings
from headrace.schemas.commands import COMMANDS, CancelJob, CreateModel, DeleteCheckpoints, DeleteModel, PauseJob, ResumeJob, ResumeModel
from headrace.schemas.dead_letters import record_bytes
from headrace.schemas.envelope import header_text, open_record
from headrace.schemas.errors import CodecError
from headrace.schemas.jobs import JobState
from headrace.schemas.reasons import DeadLetterReason, RejectionReason
from headrace.schemas.state import ModelState
from headrace.schemas.topics import LANE_KEY_PREFIX

logger = logging.getLogger(__name__)

_COMMAND_BYTES = 128 * 1024
_MODEL_ID_CHARACTERS = 256
_DOOMED_SPANS = 2000
"""Of checkpoints that wait to be deleted, which the model's state lists; one command may add more than are left."""


class CommandHandler:
    """Applies commands to a lane's book.

    Args:
        settings: Worker group, catalogue of base models, duplicate window.
        book: The lane's memory.
    """

    def __init__(self, settings: Settings, book: LaneBook) -> None:
        self._settings = settings
        self._book = book

    def apply(self, records: Iterable[ConsumerRecord]) -> None:
        """Apply commands in log order and move the lane's command position."""
        for record in records:
            if record.offset >= self._book.state.commands_through:
                try:
                    self._apply(record)
                except CodecError as error:
                    letter = dead_letter(self._settings.topic_names, record, error, record.partition)
                    self._book.dead_letters.append(letter)
                self._book.state = self._book.state.model_copy(update={"commands_through": record.offset + 1})
        self._book.note_news()

    def _apply(self, record: ConsumerRecord) -> None:
        if isinstance(record, UnreadableRecord):
            raise record.error
        if (size := record_bytes(record.key, record.value, record.headers)) > _COMMAND_BYTES:
            # The model's state has most of what a command says, and must fit into a record itself.
            raise CodecError(DeadLetterReason.TOO_LARGE, "", f"the command has {size} bytes: at most {_COMMAND_BYTES} are read")
        command = open_record(record.value, header_text(record.headers), COMMANDS)
        key = (record.key or b"").decode(errors="replace")
        if len(key) > _MODEL_ID_CHARACTERS or key.startswith(LANE_KEY_PREFIX):
            detail = f"{key[:_MODEL_ID_CHARACTERS]!r} is no model id: those are text of at most {_MODEL_ID_CHARACTERS} characters"
            raise CodecError(DeadLetterReason.INVALID_SCHEMA, "model_id", f"{detail} that do not begin with {LANE_KEY_PREFIX}")
        if lane_of(self._home(key, command), self._book.state.partitions) != record.partition:
            raise CodecError(DeadLetterReason.WRONG_LANE, "key", f"{key!r} does not belong to partition {record.partition}")
        if getattr(command, "model_id", None) != key:
            found = getattr(command, "model_id", None)
            raise CodecError(DeadLetterReason.INVALID_SCHEMA, "model_id", f"{found!r} differs from the key {key!r}")
        match command:
            case CreateModel():
                self._create(command, record.offset)
            case DeleteModel():
                self._delete(command)
            case CancelJob() | PauseJob() | ResumeJob():
                self._job(command)
            case ResumeModel():
                self._resume(command)
            case DeleteCheckpoints():
                self._delete_checkpoints(command)

    def _home(self, model_id: str, command: BaseModel) -> str:
        """The model whose lane a command belongs to: a shadow is on the lane of the model that it shadows."""
        if isinstance(command, CreateModel):
            return command.shadow_of or model_id
        run = self._book.runs.get(model_id)
        return (None if run is None else run.state.shadow_of) or model_id

    def _shadow_problem(self, model_id: str, shadow_of: str | None) -> str | None:
        """Why a model can't train in this worker group, shadow or not; None if it can."""
        worker = self._settings.worker
        if worker.shadow_prefix is None and shadow_of is not None:
            return (
                f"it is to shadow {shadow_of}, but worker group {worker.group!r} does not shadow: delete it, and create it with the "
                "settings of a worker group that has worker.shadow_prefix"
            )
        if worker.shadow_prefix is None:
            return None
        if shadow_of is None:
            return (
                f"worker group {worker.group!r} shadows the models under {worker.shadow_prefix!r} (worker.shadow_prefix) and trains on "
                "nothing else: delete it, and create it with --shadow-of, or with the settings of another worker group"
            )
        for other, run in self._book.runs.items():
            if other != model_id and run.state.shadow_of == shadow_of and run.status == "active":
                return (
                    f"{run.state.name} ({other}) shadows {shadow_of} in this worker group already: delete that one and resume this one, or "
                    "run a worker group with a topics.prefix of its own for this one"
                )
        return None

    def _create(self, command: CreateModel, offset: int) -> None:
        known = self._book.runs.get(command.model_id)
        if known is not None and known.status != "deleted":
            return
        if command.worker_group != self._settings.worker.group:
            logger.info("model %s belongs to worker group %s, not ours", command.model_id, command.worker_group)
            return
        problem = self._shadow_problem(command.model_id, command.shadow_of) or problem_of(command.settings, self._settings.base_models)
        state = ModelState(
            model_id=command.model_id,
            incarnation=incarnation_of(command.model_id, offset),
            status="active" if problem is None else "stopped",
            status_detail=problem,
            account=command.account,
            project=command.project,
            name=command.name,
            worker_group=command.worker_group,
            settings=command.settings,
            shadow_of=command.shadow_of,
            start_from=command.start_from,
            start_weights=command.start_weights,
            scanned=self._book.position,
            created_at=command.created_at,
        )
        run = ModelRun.of(state, DuplicateWindow(self._settings.worker.duplicate_window), self._book.state.lane)
        run.touch(urgent=True)
        self._book.runs[command.model_id] = run
        logger.info("model %s (%s) is created, %s", command.name, command.model_id, problem or "active")
        self._wait_for_base(run)

    def _wait_for_base(self, run: ModelRun) -> None:
        if run.status == "active" and (missing := base_problem(run.state.settings, self._settings.base_models)) is not None:
            wait(run, missing)

    def _delete(self, command: DeleteModel) -> None:
        run = self._book.runs.get(command.model_id)
        if run is None or run.status == "deleted":
            return
        for job_id, job in list(run.jobs.items()):
            if job.document is not None:
                run.move_job(job_id, JobState.CANCELLED, message="the model was deleted")
        run.refuse_all(RejectionReason.MODEL_DELETED, "the model was deleted")
        refuse_unread(run, RejectionReason.MODEL_DELETED, "the model was deleted")
        run.intent = run.rebasing = run.start_from = None
        run.set_status("deleted", None)
        self._book.give_up(command.model_id)

    def _delete_checkpoints(self, command: DeleteCheckpoints) -> None:
        run = self._book.runs.get(command.model_id)
        if run is not None and run.status != "deleted" and run.state.incarnation == command.incarnation:
            if sum(len(batch.steps) for batch in run.doomed) > _DOOMED_SPANS:
                detail = f"more than {_DOOMED_SPANS} spans of checkpoints wait to be deleted already: send it again when they are"
                raise CodecError(DeadLetterReason.TOO_LARGE, "steps", detail)
            running = self._book.running
            doom(run, command.steps, running=running is not None and running.model_id == command.model_id)

    def _job(self, command: CancelJob | PauseJob | ResumeJob) -> None:
        run = self._book.runs.get(command.model_id)
        if run is None:
            return
        job = run.jobs.get(command.job_id)
        state = None if job is None or job.document is None else job.document.state
        match command:
            case CancelJob():
                run.cancel_job(command.job_id, "cancelled on request")
            case PauseJob() if state in {JobState.PENDING, JobState.RUNNING}:
                run.move_job(command.job_id, JobState.PAUSED, message="paused on request")
            case ResumeJob() if state is JobState.PAUSED:
                run.move_job(command.job_id, JobState.PENDING)
            case _:
                return
        self._book.give_up(command.model_id, command.job_id)

    def _resume(self, command: ResumeModel) -> None:
        run = self._book.runs.get(command.model_id)
        if run is None or run.status not in {"stopped", "diverged"}:
            return
        problem = self._shadow_problem(command.model_id, run.state.shadow_of) or problem_of(run.state.settings, self._settings.base_models)
        if problem is not None:
            run.set_status("stopped", f"it was to be resumed, but {problem}")
            return
        if run.status == "diverged":
            run.rebasing = run.status_detail or "diverged"
        run.expire_lost = True
        run.set_status("active", None)
        self._wait_for_base(run)
