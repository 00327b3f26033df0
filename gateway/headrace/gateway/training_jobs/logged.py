"""`POST /v1/preview/models/{id}/log`: trajectories that are kept and not trained on, as those of an evaluation.

Guarantees: what is answered with 200 lies in the object store, as it was sent, one group a line, and is a fact that every gateway knows;
what is no group is refused, with all faults. Gives up: judging versions and tokens: nothing is trained on it.
"""

import asyncio
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path

import cramjam
from fastapi import APIRouter, Request
from pydantic import BaseModel

from headrace.core.payloads import ZSTD_LEVEL
from headrace.core.store import ObjectStore
from headrace.gateway.access import KnownCaller
from headrace.gateway.gate import OpenGate
from headrace.gateway.log_writer import sealed
from headrace.gateway.problems import FaultError, UnprocessableError
from headrace.gateway.training_jobs.body import SplitBody, received, split
from headrace.gateway.training_jobs.described import LogRequest, request_body
from headrace.gateway.training_jobs.faults import Faults
from headrace.gateway.training_jobs.groups import read_group
from headrace.gateway.training_jobs.seen import incarnation, model_of, version_of
from headrace.schemas.gateway import LoggedGroups, log_key

router = APIRouter(prefix="/v1/preview/models/{model_id}/log", tags=["training-jobs: models"])

_LONGEST_SPLIT = 128


class Logged(BaseModel):
    """What was kept."""

    id: str
    groups: int
    trajectories: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    groups: int
    trajectories: int
    exceptions: int
    rewards: float
    uri: str
    size: int


@router.post("", openapi_extra=request_body(LogRequest, levels=1))
async def log(model_id: str, request: Request, caller: KnownCaller, gate: OpenGate) -> Logged:
    """Keep groups of trajectories with a model."""
    body = await received(request)
    tables = await gate.view.fresh()
    model = model_of(tables, caller, model_id)
    parts = await asyncio.to_thread(split, body, model_id=model_id)
    if not parts.split or len(parts.split) > _LONGEST_SPLIT:
        raise UnprocessableError(
            [FaultError(["body", "split"], f"a name of 1 to {_LONGEST_SPLIT} characters is needed, as 'val'", "missing")]
        )
    log_id = str(uuid.uuid4())
    kept = await asyncio.to_thread(_keep, gate.store, f"logged/{model_id}/{log_id}.jsonl.zst", parts)
    fact = LoggedGroups(
        id=log_id,
        model_id=model_id,
        incarnation=incarnation(model),
        step=version_of(model),
        split=parts.split,
        groups=kept.groups,
        trajectories=kept.trajectories,
        exceptions=kept.exceptions,
        reward_mean=kept.rewards / kept.trajectories if kept.trajectories else None,
        uri=kept.uri,
        size=kept.size,
        owner=caller.owner,
    )
    key = log_key(model_id, log_id)
    await gate.writer.commit([sealed(fact, topic=gate.settings.topic_names.gateway, key=key)], is_in=lambda: key in gate.view.tables.facts)
    return Logged(id=log_id, groups=kept.groups, trajectories=kept.trajectories)


def _keep(store: ObjectStore, key: str, parts: SplitBody) -> _Kept:
    """Check group by group, then store. Blocks and computes."""
    faults = Faults()
    trajectories = exceptions = 0
    rewards = 0.0
    packer = cramjam.zstd.Compressor(level=ZSTD_LEVEL)
    with tempfile.TemporaryDirectory(prefix="headrace-logged-") as folder:
        path = Path(folder, "groups")
        with path.open("wb") as file:
            for i, text in enumerate(parts.groups):
                if (read := read_group(text, ["body", "trajectory_groups", i], faults, version=None)) is not None:
                    trajectories += len(read.group.trajectories)
                    exceptions += len(read.group.exceptions)
                    rewards += sum(trajectory.reward for trajectory in read.group.trajectories)
                    # Line breaks between tokens are white space; inside of strings JSON has none.
                    packer.compress(bytes(text).replace(b"\r", b" ").replace(b"\n", b" ") + b"\n")
                    file.write(bytes(packer.flush()))
            file.write(bytes(packer.finish()))
        faults.check()
        stored = store.put_file_if_absent(key, path)
    return _Kept(
        groups=len(parts.groups),
        trajectories=trajectories,
        exceptions=exceptions,
        rewards=rewards,
        uri=store.uri(key),
        size=stored.size,
    )
