"""What the dashboard's pages ask for. Not a public API: no part of the OpenAPI document.

Guarantees: access as everywhere; nothing is cached by browsers; what writes needs a header that no other site's page can send.
"""

from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from headrace.core.job_views import asked
from headrace.core.lanes import lane_of
from headrace.gateway.access import KnownCaller
from headrace.gateway.dashboard.answers import JobRow
from headrace.gateway.dashboard.changes import changes
from headrace.gateway.dashboard.curves import curve
from headrace.gateway.dashboard.model_page import model_page, step_list
from headrace.gateway.dashboard.seen import job_row, overview, seen_model, sees_job
from headrace.gateway.dashboard.step_page import step_of, step_page
from headrace.gateway.dashboard.trajectory_page import trajectory_page
from headrace.gateway.gate import OpenGate
from headrace.gateway.log_writer import sealed
from headrace.gateway.problems import ProblemError
from headrace.schemas.commands import CancelJob

router = APIRouter(prefix="/dashboard/api", include_in_schema=False)
_POINTS = 300
_NO_STORE = {"Cache-Control": "no-store"}
_NOWHERE = (-1, -1)


@router.get("/overview")
async def get_overview(gate: OpenGate, caller: KnownCaller) -> Response:
    """Models and jobs."""
    return _json(await overview(await gate.view.fresh(), caller))


@router.get("/stream")
async def get_stream(request: Request, gate: OpenGate, caller: KnownCaller) -> StreamingResponse:
    """What changes, as server-sent events."""
    headers = {**_NO_STORE, "X-Accel-Buffering": "no"}
    return StreamingResponse(changes(request, gate, caller), media_type="text/event-stream", headers=headers)


@router.get("/models/{model_id}")
async def get_model(model_id: str, gate: OpenGate, caller: KnownCaller) -> Response:
    """One model."""
    tables = await gate.view.fresh()
    return _json(await model_page(tables, caller, seen_model(tables, caller, model_id)))


@router.get("/models/{model_id}/curves/{metric:path}")
async def get_curve(
    model_id: str, metric: str, gate: OpenGate, caller: KnownCaller, points: Annotated[int, Query(ge=10, le=2000)] = _POINTS
) -> Response:
    """A metric over the steps."""
    tables = await gate.view.fresh()
    return _json(curve(tables.history(seen_model(tables, caller, model_id)), metric, points))


@router.get("/models/{model_id}/steps")
async def get_steps(
    model_id: str,
    gate: OpenGate,
    caller: KnownCaller,
    before: Annotated[int | None, Query(ge=1)] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 25,
) -> Response:
    """Steps, newest first."""
    tables = await gate.view.fresh()
    return _json(await step_list(gate.settings, tables.history(seen_model(tables, caller, model_id)), before, limit))


@router.get("/models/{model_id}/steps/{step}")
async def get_step(model_id: str, step: int, gate: OpenGate, caller: KnownCaller) -> Response:
    """One step."""
    tables = await gate.view.fresh()
    view = seen_model(tables, caller, model_id)
    return _json(await step_page(gate, tables, view, await step_of(gate, tables, view, step)))


@router.get("/models/{model_id}/steps/{step}/trajectory")
async def get_trajectory(
    *,
    model_id: str,
    step: int,
    gate: OpenGate,
    caller: KnownCaller,
    group: str,
    trajectory: Annotated[int | None, Query(ge=0)] = None,
    update: Annotated[int | None, Query(ge=0)] = None,
) -> Response:
    """One trajectory."""
    tables = await gate.view.fresh()
    view = seen_model(tables, caller, model_id)
    entry = await step_of(gate, tables, view, step)
    return _json(await trajectory_page(gate, tables, view, entry, group_id=group, index=trajectory, update=update))


@router.post("/jobs/{job_id}/cancel")
async def cancel(job_id: str, gate: OpenGate, caller: KnownCaller, x_headrace_dashboard: Annotated[str | None, Header()] = None) -> JobRow:
    """Ask for a job's cancellation."""
    if x_headrace_dashboard is None:
        # A page of another site can post here without asking; with this header its browser asks first, and is refused.
        raise ProblemError(403, "send the header X-Headrace-Dashboard")
    tables = await gate.view.fresh()
    view = tables.job(job_id)
    if view is None or not sees_job(tables, caller, view):
        raise ProblemError(404, f"there is no job {job_id} here")
    command = CancelJob(model_id=view.model_id, job_id=job_id)
    if asked(view, command, _NOWHERE).command != _NOWHERE:
        raise ProblemError(409, f"job {job_id} has ended: it is {view.state}")
    if view.requested != "cancel":
        lane = lane_of(view.shadow_of or view.model_id, gate.view.lanes)
        record = sealed(command, topic=gate.settings.topic_names.commands, key=view.model_id, partition=lane)

        def is_in() -> bool:
            now = tables.job(job_id)
            return now is not None and (now.requested == "cancel" or now.final)

        await gate.writer.commit([record], is_in=is_in)
    return job_row(tables, tables.job(job_id) or view)


def _json(answer: BaseModel) -> Response:
    return Response(answer.model_dump_json(), media_type="application/json", headers=_NO_STORE)
