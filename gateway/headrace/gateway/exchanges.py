"""Exchanges with a model that a caller asked to keep (`x-headrace-trajectory`): request and answer, in the object store, for its capture.

Guarantees: nothing is kept unless asked; what is kept holds no header, so no key; exchanges of a trajectory come back in the order in which
they were kept, and a key sees those of its projects only. A streamed answer is kept as the one that it adds up to. Limitations: expiry;
they stay until they are deleted in the store.
"""

import asyncio
import re
import time
import uuid
from datetime import datetime
from hashlib import sha256
from typing import Any

import cramjam
import orjson
from fastapi import APIRouter

from headrace.core.model_views import ModelView
from headrace.core.store import ObjectStore
from headrace.core.unpacking import unpack_zstd
from headrace.gateway.access import Caller, KnownCaller
from headrace.gateway.gate import OpenGate
from headrace.gateway.problems import ProblemError
from headrace.schemas.base import Record, utc_now

HEADER = "x-headrace-trajectory"
router = APIRouter(tags=["inference"])
_MOST_BYTES = 256 * 1024 * 1024
"""Of an exchange that is read again."""
_NAME = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Exchange(Record):
    """One request to a model and its answer."""

    trajectory: str
    model_id: str
    project: str | None = None
    """Of the model; only keys of this project see the exchange. Null in what older releases kept: keys of all projects see it."""
    policy_version: int
    request: dict[str, Any]
    response: dict[str, Any]
    kept_at: datetime


class Exchanges(Record):
    """Those of one trajectory."""

    object: str = "list"
    data: tuple[Exchange, ...]


def check_name(trajectory: str) -> str:
    """The trajectory that a header names.

    Raises:
        ProblemError: 400.
    """
    if _NAME.fullmatch(trajectory) is None:
        raise ProblemError(400, f"{HEADER}: 1 to 128 letters, digits, dots, dashes, colons and underscores are needed")
    return trajectory


async def keep(store: ObjectStore, caller: Caller, exchange: Exchange) -> None:
    """Store an exchange; it is durable when this returns. Raises StoreError."""
    body = bytes(cramjam.zstd.compress(orjson.dumps(exchange.model_dump(mode="json")), level=1))
    # Sorts by time; the random part keeps two of one moment apart.
    name = f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}.json.zst"
    await asyncio.to_thread(store.put_bytes_if_absent, f"{_folder(caller, exchange.trajectory)}/{name}", body)


@router.get("/v1/headrace/trajectories/{trajectory}/exchanges")
async def exchanges(gate: OpenGate, caller: KnownCaller, trajectory: str) -> Exchanges:
    """The exchanges of a trajectory that were kept, oldest first."""
    check_name(trajectory)
    found = await asyncio.to_thread(_read, gate.store, _folder(caller, trajectory))
    return Exchanges(data=tuple(exchange for exchange in found if _sees(caller, exchange)))


def exchange_of(trajectory: str, model: ModelView, version: int, request: dict[str, Any], response: dict[str, Any]) -> Exchange:
    """An exchange that was made just now."""
    return Exchange(
        trajectory=trajectory,
        model_id=model.model_id,
        project=model.project,
        policy_version=version,
        request=request,
        response=response,
        kept_at=utc_now(),
    )


def assembled(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer that the chunks of a stream add up to."""
    answer: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        answer |= {key: value for key, value in chunk.items() if key not in {"choices", "object"} and value is not None}
        for part in chunk.get("choices") or []:
            _add(choices.setdefault(part.get("index", 0), {"index": part.get("index", 0), "message": {"role": "assistant"}}), part)
    return {"object": "chat.completion", **answer, "choices": [choices[index] for index in sorted(choices)]}


def _add(choice: dict[str, Any], part: dict[str, Any]) -> None:
    for key, value in (part.get("delta") or {}).items():
        if key == "tool_calls":
            _add_calls(choice["message"].setdefault("tool_calls", []), value or [])
        elif isinstance(value, str) and key != "role":
            choice["message"][key] = (choice["message"].get(key) or "") + value
        elif value is not None:
            choice["message"][key] = value
    for key, value in part.items():
        if key in {"delta", "index"} or value is None:
            continue
        if key == "logprobs":
            kept = choice.setdefault("logprobs", {})
            for kind, entries in value.items():
                kept[kind] = (kept.get(kind) or []) + (entries or [])
        elif isinstance(value, list):
            choice[key] = choice.get(key, []) + value
        else:
            choice[key] = value


def _add_calls(calls: list[dict[str, Any]], parts: list[dict[str, Any]]) -> None:
    for part in parts:
        at = part.get("index", len(calls))
        while len(calls) <= at:
            calls.append({"type": "function", "function": {"name": "", "arguments": ""}})
        calls[at] |= {key: value for key, value in part.items() if key not in {"function", "index"} and value is not None}
        for key, value in (part.get("function") or {}).items():
            calls[at]["function"][key] = calls[at]["function"].get(key, "") + (value or "")


def _sees(caller: Caller, exchange: Exchange) -> bool:
    return not caller.projects if exchange.project is None else caller.sees(caller.account, exchange.project)


def _folder(caller: Caller, trajectory: str) -> str:
    # Accounts and trajectories are anybody's text: a digest can't leave its folder.
    return f"exchanges/{sha256(f'{caller.account}/{trajectory}'.encode()).hexdigest()}"


def _read(store: ObjectStore, folder: str) -> list[Exchange]:
    keys = sorted(info.key for info in store.list(f"{folder}/"))
    return [Exchange.model_validate(orjson.loads(unpack_zstd(store.get_bytes(key), _MOST_BYTES))) for key in keys]
