"""Is it there (`/v1/health`), and is what it needs there (`/v1/system-check`); neither asks for a key."""

import asyncio
from collections.abc import Awaitable
from contextlib import suppress

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from headrace.core.errors import HeadraceError
from headrace.core.store import ObjectNotFoundError
from headrace.gateway.gate import Gate, OpenGate

router = APIRouter(tags=["health"])


class Health(BaseModel):
    """It runs."""

    status: str = "ok"


class SystemCheck(BaseModel):
    """Each part: `ok`, or what is wrong."""

    status: str
    kafka: str
    store: str


@router.get("/v1/health")
async def health() -> Health:
    """Whether this process answers."""
    return Health()


@router.get("/v1/system-check", response_model=SystemCheck, responses={503: {"model": SystemCheck}})
async def system_check(gate: OpenGate) -> JSONResponse:
    """Whether Kafka and the object store answer."""
    kafka = await _said(gate.view.fresh())
    store = await _said(asyncio.to_thread(_look, gate))
    good = kafka == store == "ok"
    body = SystemCheck(status="ok" if good else "unavailable", kafka=kafka, store=store)
    return JSONResponse(body.model_dump(), status_code=200 if good else 503, headers={} if good else {"Retry-After": "2"})


def _look(gate: Gate) -> None:
    with suppress(ObjectNotFoundError):  # then it has answered
        gate.store.head("system-check")


async def _said(asked: Awaitable[object]) -> str:
    try:
        await asked
    except HeadraceError as error:
        return str(error)
    return "ok"
