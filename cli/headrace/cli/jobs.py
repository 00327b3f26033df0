"""`headrace jobs list|show|pause|resume|cancel`."""

import asyncio
from typing import Annotated, Any

import orjson
import typer
import yaml

from headrace.cli.arguments import Project, model_id, plain, print_table
from headrace.core.job_views import CANCELLING, JobView, Request, ShownState, outcome_messages
from headrace.core.jobs import ask, get_job, list_jobs, wait_for_job
from headrace.core.settings import Settings
from headrace.schemas.jobs import JobState

app = typer.Typer(help="Training jobs: follow them, pause, resume and cancel them.", no_args_is_help=True, add_completion=False)

Job = Annotated[str, typer.Argument(metavar="JOB", help="Id of the job.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]
OfModel = Annotated[str | None, typer.Option("--model", "-m", help="Its model: id, or name in the project.")]
Wait = Annotated[bool, typer.Option("--wait", help="Wait until a worker has read it, and say what came of it.")]
Seconds = Annotated[float, typer.Option("--timeout", min=0, help="Seconds that --wait waits at most.")]

_PREFIX = "JOB_STATE_"


@app.command("list")
def list_(
    model: OfModel = None,
    project: Project = None,
    state: Annotated[str | None, typer.Option(help="Only in this state: RUNNING, or JOB_STATE_RUNNING.")] = None,
    as_json: AsJson = False,
) -> None:
    """List jobs, oldest first: those that a worker has read."""
    wanted = None if state is None else _state(state)
    process = Settings()

    async def read() -> list[JobView]:
        return await list_jobs(process, model_id=await _model(process, project, model), state=wanted)

    views = asyncio.run(read())
    if as_json:
        typer.echo(orjson.dumps([_as_dict(view) for view in views]))
        return
    columns = ("job", "model", "kind", "state", "groups", "refused", "step", "created (UTC)", "message")
    rows = []
    for view in views:
        document = view.document
        if document is None:
            cells = [view.job_id, view.model_id, "", _said(view), "", "", "", "", "no worker has read its record yet"]
        else:
            created, step = f"{document.created_at:%Y-%m-%d %H:%M:%S}", "" if document.step is None else str(document.step)
            counts = [str(document.num_groups), str(document.groups_rejected), step]
            told = document.error_message or next(iter(outcome_messages(document)), "")
            cells = [view.job_id, view.model_id, document.kind, _said(view), *counts, created, told]
        rows.append([*map(plain, cells)])
    print_table(columns, rows, important=("job", "state", "message", "step", "groups", "refused"), right={"groups", "refused", "step"})


@app.command()
def show(job: Job, as_json: AsJson = False) -> None:
    """Show a job: its document as its owner wrote it last, with what was asked since."""
    _print(asyncio.run(get_job(Settings(), job)), as_json)


@app.command()
def pause(job: Job, wait: Wait = False, timeout: Seconds = 120, as_json: AsJson = False) -> None:
    """Pause a job. A pending job does not begin; a running one drops its step and begins it again after `resume`."""
    _ask("pause", job, wait=wait, timeout=timeout, as_json=as_json)


@app.command()
def resume(job: Job, wait: Wait = False, timeout: Seconds = 120, as_json: AsJson = False) -> None:
    """Put a paused job back into the queue."""
    _ask("resume", job, wait=wait, timeout=timeout, as_json=as_json)


@app.command()
def cancel(  # noqa: PLR0917 - typer passes them by name
    job: Job,
    model: OfModel = None,
    project: Project = None,
    wait: Wait = False,
    timeout: Seconds = 120,
    as_json: AsJson = False,
) -> None:
    """Cancel a job: its groups are refused. One whose step is committed by then ends as COMPLETED.

    Name its model to cancel a job that no worker has read yet.
    """
    _ask("cancel", job, wait=wait, timeout=timeout, as_json=as_json, model=model, project=project)


def _ask(
    request: Request, job: str, *, wait: bool, timeout: float, as_json: bool, model: str | None = None, project: str | None = None
) -> None:

    process = Settings()

    async def run() -> JobView:
        view = await ask(process, request, job, model_id=await _model(process, project, model))
        return await wait_for_job(process, view, timeout) if wait else view

    view = asyncio.run(run())
    if as_json:
        _print(view, as_json)
    else:
        typer.echo(plain(f"{view.job_id} {_said(view)}"))


async def _model(process: Settings, project: str | None, model: str | None) -> str | None:
    return None if model is None else await model_id(process, project, model)


def _state(text: str) -> ShownState:

    known: dict[str, ShownState] = {state.removeprefix(_PREFIX): state for state in JobState} | {
        CANCELLING.removeprefix(_PREFIX): CANCELLING
    }
    found = known.get(text.upper().removeprefix(_PREFIX))
    if found is None:
        raise typer.BadParameter(f"{text!r} is no state; there are {', '.join(known)}", param_hint="--state")
    return found


def _said(view: JobView) -> str:
    """The state for people: `RUNNING, to be paused`."""
    asked = {"pause": ", to be paused", "resume": ", to be resumed"}.get(view.requested or "", "")
    return view.state.removeprefix(_PREFIX) + asked


def _as_dict(view: JobView) -> dict[str, Any]:
    document = {} if view.document is None else view.document.model_dump(mode="json")
    # The state as shown, not as stored.
    return document | {
        "job_id": view.job_id,
        "model_id": view.model_id,
        "state": str(view.state),
        "requested": view.requested,
        "worker_group": view.worker_group,
    }


def _print(view: JobView, as_json: bool) -> None:

    document = _as_dict(view)
    typer.echo(orjson.dumps(document) if as_json else yaml.safe_dump(document, sort_keys=False, allow_unicode=True).rstrip())
