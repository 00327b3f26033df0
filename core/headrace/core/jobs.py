"""Jobs as everyone but their owner sees them, and how to cancel, pause and resume them: by command to the owner of the model's lane.

Guarantees: a job shows as soon as its owner has read its record, and what was asked of it as soon as the command is in the log, also with
no worker alive (`job_views` says how); what can't be is refused here, before a command is written. Limitations: jobs that no owner has
read yet. They stand in `trajectory-groups`, however long that is; the process that knows the model can cancel one all the same.
"""

from contextlib import aclosing
from dataclasses import replace

from headrace.core.commands import commands_through, lane_states, read_lanes, send_command
from headrace.core.deadline import deadline
from headrace.core.errors import HeadraceError
from headrace.core.job_views import CANCELLING, JobCommand, JobView, Request, ShownState, asked, fold_jobs, open_document
from headrace.core.kafka import client_options
from headrace.core.kafka_outage import folding
from headrace.core.lanes import lane_of
from headrace.core.models import get_model
from headrace.core.reading import follow, read_to_end
from headrace.core.settings import Settings
from headrace.core.topic_admin import lane_count, partition_count
from headrace.schemas.commands import CancelJob, PauseJob, ResumeJob
from headrace.schemas.jobs import TRANSITIONS, JobDocument, JobState

_SOURCE = "headrace/jobs"
_COMMANDS: dict[Request, type[JobCommand]] = {"cancel": CancelJob, "pause": PauseJob, "resume": ResumeJob}
_DONE: dict[Request, str] = {"cancel": "cancelled", "pause": "paused", "resume": "resumed"}
_NOWHERE = (-1, -1)


class UnknownJobError(HeadraceError):
    """No owner has read such a job."""


class JobRefusedError(HeadraceError):
    """What was asked of a job can't be; says in which state it is."""


class JobNotTakenUpError(HeadraceError):
    """No worker has read a job's command in time."""


async def list_jobs(settings: Settings, *, model_id: str | None = None, state: ShownState | None = None) -> list[JobView]:
    """Jobs by the time they were made; those of one model, or in one state (as shown), if asked.

    Raises:
        KafkaUnavailableError: no broker, or a topic is missing.
    """
    chosen = [
        view
        for view in (await _read(settings)).values()
        if (model_id is None or view.model_id == model_id) and (state is None or view.state == state)
    ]
    # One without a document is the newest there can be.
    return sorted(chosen, key=lambda view: (view.document is None, view.document.created_at if view.document else 0, view.job_id))


async def get_job(settings: Settings, job_id: str) -> JobView:
    """One job.

    Raises:
        UnknownJobError: see there.
        KafkaUnavailableError: no broker, or a topic is missing.
    """
    found = (await _read(settings)).get(job_id)
    if found is None:
        raise _unknown(job_id)
    return found


async def ask(settings: Settings, request: Request, job_id: str, *, model_id: str | None = None) -> JobView:
    """Ask for a job's cancellation, pause or resumption. Asking again for what was asked already writes nothing.

    Args:
        settings: Of this process.
        request: What.
        job_id: Of which job.
        model_id: Its model; needed only to cancel a job that no owner has read yet.

    Raises:
        UnknownJobError: no owner has read it, and it is not to be cancelled by its model.
        UnknownModelError: there is no such model.
        JobRefusedError: the job has ended, is to be cancelled, is not paused, or is of another model.
        KafkaUnavailableError: no broker; nothing was sent, or it is not known: repeating is harmless.
    """
    known = (await _read(settings)).get(job_id)
    if known is None:
        if model_id is None or request != "cancel":
            raise _unknown(job_id)
        model = await get_model(settings, model_id)
        known = JobView(
            job_id=job_id,
            model_id=model_id,
            state=JobState.PENDING,
            document=None,
            worker_group=model.worker_group,
            shadow_of=model.shadow_of,
        )
    if model_id not in {None, known.model_id}:
        raise JobRefusedError(f"job {job_id} is of model {known.model_id}, not of {model_id}")
    if _is_asked_already(known, request):
        return known
    command = _COMMANDS[request](model_id=known.model_id, job_id=job_id)
    if asked(known, command, _NOWHERE).command != _NOWHERE:
        why = "which is final" if known.final else "and only a paused job can be" if request == "resume" else "which is to end"
        raise JobRefusedError(f"job {job_id} can't be {_DONE[request]}: it is {known.state}, {why}")
    return asked(known, command, await send_command(settings, command, source=_SOURCE, shadow_of=known.shadow_of))


async def wait_for_job(settings: Settings, view: JobView, seconds: float) -> JobView:
    """Wait until the owner of its lane has read the command; the job as it stands then.

    A job whose step was committed before that is COMPLETED, whatever was asked of it.

    Args:
        settings: Of this process.
        view: What `ask` returned.
        seconds: Give up after.

    Raises:
        JobNotTakenUpError: no worker has answered by then.
    """
    if view.command is None:
        return view
    lane, offset = view.command
    try:
        with folding(lambda: client_options(settings.kafka, "headrace-jobs")):
            async with deadline(seconds), aclosing(lane_states(settings, lane)) as batches:
                async for states in batches:
                    if commands_through(states).get(lane, 0) > offset:
                        break
                found = (await _read(settings)).get(view.job_id)
    except TimeoutError as error:
        raise JobNotTakenUpError(
            f"no worker has read the command to {view.requested} job {view.job_id} within {seconds:g} s: is one of group "
            f"{view.worker_group!r} running (`headrace worker`)? The command stays in the log and is read when one starts"
        ) from error
    return found if found is not None else replace(view, requested=None, command=None)


async def wait_until_over(settings: Settings, job_id: str, seconds: float) -> JobDocument | None:
    """Wait until a job has ended; its last document, or the one that there is after `seconds` (None: no owner has read the job yet).

    Raises:
        KafkaUnavailableError: no broker, or a topic is missing.
    """
    options, topic = client_options(settings.kafka, "headrace-jobs"), settings.topic_names.jobs
    partition = lane_of(job_id, await partition_count(options, topic))
    latest: JobDocument | None = None
    try:
        with folding(lambda: options):
            async with deadline(seconds), aclosing(follow(options, topic, partition)) as batches:
                async for records in batches:
                    for record in records:
                        if record.key == job_id.encode() and record.value is not None:
                            latest = open_document(record)
                    if latest is not None and not TRANSITIONS[latest.state]:
                        break
    except TimeoutError:
        pass
    return latest


def _is_asked_already(view: JobView, request: Request) -> bool:
    match request:
        case "cancel":
            return view.state == CANCELLING
        case "pause":
            return view.requested == "pause" or view.state is JobState.PAUSED
        case "resume":
            return view.requested == "resume"


async def _read(settings: Settings) -> dict[str, JobView]:
    options, topics = client_options(settings.kafka, "headrace-jobs"), settings.topic_names
    await lane_count(options, topics)  # says what to do where the topics are missing
    states, commands = await read_lanes(options, topics, None)
    return fold_jobs(states, commands, await read_to_end(options, topics.jobs))


def _unknown(job_id: str) -> UnknownJobError:
    return UnknownJobError(
        f"there is no job {job_id}: `headrace jobs list` shows those that a worker has read. One that none has read yet can be cancelled "
        "by naming its model: `headrace jobs cancel JOB --model MODEL`"
    )
