"""What changes, to the process that looks on: server-sent events that name models, never their content. The page then asks for what it
shows.

Guarantees: a model is only named to a caller who sees it; nothing that changes after the stream begins is missed (where too much changed
at once, all is said to have changed); a key that was revoked ends the stream within seconds. Limitations: a replay of what changed before.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from itertools import islice

import orjson
from fastapi import Request

from headrace.gateway.access import Caller, identify_again
from headrace.gateway.gate import Gate
from headrace.gateway.problems import ProblemError
from headrace.gateway.tables import Tables
from headrace.schemas.topics import COMMANDS, JOBS, MODELS, STEPS, TRAINING_EVENTS, WEIGHT_ACKS, WEIGHTS

GATHER_SECONDS = 0.25
"""Changes that come so close together are told at once."""
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
