"""What the dashboard's pages ask for. Not a public API: no part of the OpenAPI document.

Guarantees: access as everywhere; nothing is cached by browsers; what writes needs a header that no other site's page can send.

What changes, to the process that looks on: server-sent events that name models, never their content. The page then asks for what it
shows.

Guarantees: a model is only named to a caller who sees it; nothing that changes after the stream begins is missed (where too much changed
at once, all is said to have changed); a key that was revoked ends the stream within seconds. Limitations: a replay of what changed before.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from itertools import islice
from typing import Annotated

import orjson
from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from headrace.core.job_views import asked
from headrace.core.lanes import lane_of
from headrace.gateway.access import Caller, KnownCaller, identify_again
from headrace.gateway.dashboard.answers import JobRow
from headrace.gateway.dashboard.seen import curve, job_row, model_page, overview, seen_model, sees_job, step_list
from headrace.gateway.dashboard.step_page import step_of, step_page
from headrace.gateway.dashboard.trajectory_page import trajectory_page
from headrace.gateway.gate import Gate, OpenGate
from headrace.gateway.log_writer import sealed
from headrace.gateway.problems import ProblemError
from headrace.gateway.tables import Tables
from headrace.schemas.commands import CancelJob
from headrace.schemas.topics import COMMANDS, JOBS, MODELS, STEPS, TRAINING_EVENTS, WEIGHT_ACKS, WEIGHTS

GATHER_SECONDS = 0.25
"""Changes that come so close together are reported together."""
BEAT_SECONDS = 10.0
_BY_MODEL = {COMMANDS, MODELS, STEPS, TRAINING_EVENTS, WEIGHTS}


async def changes(request: Request, gate: Gate, caller: Caller) -> AsyncIterator[bytes]:
    """Events `hello`, then `change` with `{"models": […], "all": bool}`; a comment now and then."""
    tables = gate.view.tables
    told = tables.changed
    visible: dict[str, bool] = {}
    yield _event("hello", {"account": caller.account})
    while not gate.ending.is_set():
        if tables.changed == told and not await _news(gate, tables, told):
            try:
                identify_again(request)
            except ProblemError:
                return
            yield b": still here\n\n"
            continue
        await asyncio.sleep(GATHER_SECONDS)
        count, told = tables.changed - told, tables.changed
        if count > len(tables.changes):
            yield _event("change", {"models": [], "all": True})
            continue
        latest = list(islice(tables.changes, len(tables.changes) - count, None))
        models = sorted({found for name, key in latest if (found := _model(tables, name, key)) and _sees(tables, caller, found, visible)})
        if models:
            yield _event("change", {"models": models, "all": False})


async def _news(gate: Gate, tables: Tables, told: int) -> bool:
    """Whether something came before the next beat."""
    waiting = [asyncio.create_task(gate.view.news()), asyncio.create_task(gate.ending.wait())]
    try:
        # Between the look at the tables and the wait nothing else runs: no change falls in between.
        await asyncio.wait(waiting, timeout=BEAT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
    return tables.changed != told


def _model(tables: Tables, name: str, key: str) -> str | None:
    """Which model a record is about."""
    if name in _BY_MODEL:
        return key
    if name == JOBS:
        document = tables.job(key)
        return None if document is None else document.model_id
    if name == WEIGHT_ACKS:
        ack = tables.acks.get(key)
        return None if ack is None else ack.model_id
    return None


def _sees(tables: Tables, caller: Caller, model_id: str, visible: dict[str, bool]) -> bool:
    if model_id not in visible:
        view = tables.model(model_id)
        if view is None:
            return False
        visible[model_id] = caller.sees(view.account, view.project)
    return visible[model_id]


def _event(name: str, data: dict[str, object]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), orjson.dumps(data))


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
