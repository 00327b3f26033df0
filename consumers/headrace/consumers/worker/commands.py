"""What commands do to a lane: models are created, deleted and resumed; jobs are cancelled, paused and resumed.

Guarantees: a command takes effect once, in log order. What can't be read is dead-lettered. A repeated command changes nothing. A model
whose settings can't be trained here is created as `stopped`, with the reason in its state; one whose base model has no folder here waits
for it.
"""

import logging
from collections.abc import Iterable

from aiokafka import ConsumerRecord
from pydantic import BaseModel

from headrace.consumers.worker.base_models import base_problem, settings_problem, wait_for_base
from headrace.consumers.worker.duplicates import DuplicateWindow
from headrace.consumers.worker.lane_model import LaneModel
from headrace.consumers.worker.lane_models import LaneModels
from headrace.consumers.worker.outgoing import dead_letter
from headrace.consumers.worker.storage.deleted_weights import doom
from headrace.core.lanes import lane_of
from headrace.core.model_views import incarnation_of
from headrace.core.polling import UnreadableRecord
from headrace.core.settings import Settings
from headrace.schemas.commands import COMMANDS, CancelJob, CreateModel, DeleteCheckpoints, DeleteModel, PauseJob, ResumeJob, ResumeModel
from headrace.schemas.dead_letters import record_bytes
from headrace.schemas.envelope import header_text, open_record
from headrace.schemas.jobs import JobState
from headrace.schemas.reasons import CodecError, DeadLetterReason, RejectionReason
from headrace.schemas.state import ModelState
from headrace.schemas.topics import LANE_KEY_PREFIX

logger = logging.getLogger(__name__)

_COMMAND_BYTES = 128 * 1024
_MODEL_ID_CHARACTERS = 256
_DOOMED_SPANS = 2000
"""Spans of checkpoints to be deleted that a model's state lists, before one more command adds its own."""


class CommandHandler:
    """Applies commands to a lane's models."""

    def __init__(self, settings: Settings, models: LaneModels) -> None:
        self._settings = settings
        self._models = models

    def apply(self, records: Iterable[ConsumerRecord]) -> None:
        """Apply commands in log order and move the lane's command position."""
        for record in records:
            if record.offset >= self._models.state.commands_through:
                try:
                    self._apply(record)
                except CodecError as error:
                    letter = dead_letter(self._settings.topic_names, record, error, record.partition)
                    self._models.dead_letters.append(letter)
                self._models.state = self._models.state.model_copy(update={"commands_through": record.offset + 1})
        self._models.note_change()

    def _apply(self, record: ConsumerRecord) -> None:
        if isinstance(record, UnreadableRecord):
            raise record.error
        if (size := record_bytes(record.key, record.value, record.headers)) > _COMMAND_BYTES:
            # The model's state contains most of a command, and must fit into a record itself.
            raise CodecError(DeadLetterReason.TOO_LARGE, "", f"the command has {size} bytes: at most {_COMMAND_BYTES} are read")
        command = open_record(record.value, header_text(record.headers), COMMANDS)
        key = (record.key or b"").decode(errors="replace")
        if len(key) > _MODEL_ID_CHARACTERS or key.startswith(LANE_KEY_PREFIX):
            detail = f"{key[:_MODEL_ID_CHARACTERS]!r} is no model id: those are text of at most {_MODEL_ID_CHARACTERS} characters"
            raise CodecError(DeadLetterReason.INVALID_SCHEMA, "model_id", f"{detail} that do not begin with {LANE_KEY_PREFIX}")
        if lane_of(self._home(key, command), self._models.state.partitions) != record.partition:
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
        model = self._models.models.get(model_id)
        return (None if model is None else model.state.shadow_of) or model_id

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
        for other, model in self._models.models.items():
            if other != model_id and model.state.shadow_of == shadow_of and model.status == "active":
                return (
                    f"{model.state.name} ({other}) shadows {shadow_of} in this worker group already: delete that one and resume this one, "
                    "or run a worker group with a topics.prefix of its own for this one"
                )
        return None

    def _create(self, command: CreateModel, offset: int) -> None:
        known = self._models.models.get(command.model_id)
        if known is not None and known.status != "deleted":
            return
        if command.worker_group != self._settings.worker.group:
            logger.info("model %s belongs to worker group %s, not to this one", command.model_id, command.worker_group)
            return
        problem = self._shadow_problem(command.model_id, command.shadow_of) or settings_problem(
            command.settings, self._settings.base_models
        )
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
            scanned=self._models.position,
            created_at=command.created_at,
        )
        model = LaneModel.from_state(state, DuplicateWindow(self._settings.worker.duplicate_window), self._models.state.lane)
        model.touch(urgent=True)
        self._models.models[command.model_id] = model
        logger.info("model %s (%s) is created, %s", command.name, command.model_id, problem or "active")
        self._wait_for_base(model)

    def _wait_for_base(self, model: LaneModel) -> None:
        if model.status == "active" and (missing := base_problem(model.state.settings, self._settings.base_models)) is not None:
            wait_for_base(model, missing)

    def _delete(self, command: DeleteModel) -> None:
        model = self._models.models.get(command.model_id)
        if model is None or model.status == "deleted":
            return
        for job_id, job in list(model.jobs.items()):
            if job.document is not None:
                model.move_job(job_id, JobState.CANCELLED, message="the model was deleted")
        model.reject_all(RejectionReason.MODEL_DELETED, "the model was deleted")
        model.reject_unread(RejectionReason.MODEL_DELETED, "the model was deleted")
        model.change(intent=None, rebasing=None, start_from=None)
        model.set_status("deleted", None)
        self._models.cancel_step(command.model_id)

    def _delete_checkpoints(self, command: DeleteCheckpoints) -> None:
        model = self._models.models.get(command.model_id)
        if model is not None and model.status != "deleted" and model.state.incarnation == command.incarnation:
            if sum(len(batch.steps) for batch in model.doomed) > _DOOMED_SPANS:
                detail = f"more than {_DOOMED_SPANS} spans of checkpoints wait to be deleted already: send it again when they are"
                raise CodecError(DeadLetterReason.TOO_LARGE, "steps", detail)
            doom(model, command.steps, running=self._models.runs_step_of(command.model_id))

    def _job(self, command: CancelJob | PauseJob | ResumeJob) -> None:
        model = self._models.models.get(command.model_id)
        if model is None:
            return
        state = model.job_state(command.job_id)
        match command:
            case CancelJob():
                model.cancel_job(command.job_id, "cancelled on request")
            case PauseJob() if state in {JobState.PENDING, JobState.RUNNING}:
                model.move_job(command.job_id, JobState.PAUSED, message="paused on request")
            case ResumeJob() if state is JobState.PAUSED:
                model.move_job(command.job_id, JobState.PENDING)
            case _:
                return
        self._models.cancel_step(command.model_id, command.job_id)

    def _resume(self, command: ResumeModel) -> None:
        model = self._models.models.get(command.model_id)
        if model is None or model.status not in {"stopped", "diverged"}:
            return
        problem = self._shadow_problem(command.model_id, model.state.shadow_of) or settings_problem(
            model.state.settings, self._settings.base_models
        )
        if problem is not None:
            model.set_status("stopped", f"it was to be resumed, but {problem}")
            return
        if model.status == "diverged":
            model.change(rebasing=model.draft.status_detail or "diverged")
        model.drop_lost = True
        model.set_status("active", None)
        self._wait_for_base(model)
