"""`POST /v1/preview/models/{id}/log`: trajectories that are kept and not trained on, as those of an evaluation.

Guarantees: what is answered with 200 lies in the object store, as it was sent, one group a line, and is a fact that every gateway knows;
what is no group is refused, with all faults. Limitations: judging versions and tokens: nothing is trained on it.
"""

import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path

import cramjam
from fastapi import APIRouter, Request
from pydantic import BaseModel

from headrace.core.payloads import ZSTD_LEVEL
from headrace.core.settings import S3Settings
from headrace.gateway.access import Caller, KnownCaller
from headrace.gateway.body_limit import Body, takes
from headrace.gateway.gate import Gate, OpenGate
from headrace.gateway.log_writer import sealed
from headrace.gateway.problems import FaultError, UnprocessableError
from headrace.gateway.readers import ReceivedBody, received, store_at
from headrace.gateway.training_jobs.body import head_of, split
from headrace.gateway.training_jobs.config import Faults
from headrace.gateway.training_jobs.events import incarnation, model_of, version_of
from headrace.gateway.training_jobs.groups import read_group
from headrace.gateway.training_jobs.pages import LogRequest, request_body
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
@takes(Body.GROUPS)
async def log(model_id: str, request: Request, caller: KnownCaller, gate: OpenGate) -> Logged:
    """Keep groups of trajectories with a model."""
    async with received(request) as body:
        return await _logged(gate, caller, model_id, body)


async def _logged(gate: Gate, caller: Caller, model_id: str, body: ReceivedBody) -> Logged:
    tables = await gate.view.fresh()
    model = model_of(tables, caller, model_id)
    most = gate.settings.gateway.max_groups
    head = await gate.readers.run(body.size, head_of, body, most, model_id=model_id)
    if not head.split or len(head.split) > _LONGEST_SPLIT:
        raise UnprocessableError(
            [FaultError(["body", "split"], f"a name of 1 to {_LONGEST_SPLIT} characters is needed, as 'val'", "missing")]
        )
    log_id = str(uuid.uuid4())
    settings, key = gate.settings, f"logged/{model_id}/{log_id}.jsonl.zst"
    kept = await gate.readers.run(body.size, _keep, settings.store.url, settings.s3, key, body, most, model_id=model_id)
    fact = LoggedGroups(
        id=log_id,
        model_id=model_id,
        incarnation=incarnation(model),
        step=version_of(model),
        split=head.split,
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


def _keep(url: str, s3: S3Settings, key: str, body: ReceivedBody, most: int, *, model_id: str) -> _Kept:
    """Check group by group, then store. Blocks and computes."""
    store, faults = store_at(url, s3), Faults()
    groups = split(body.buffer(), most, model_id="").groups
    trajectories = exceptions = 0
    rewards = 0.0
    packer = cramjam.zstd.Compressor(level=ZSTD_LEVEL)
    with tempfile.TemporaryDirectory(prefix="headrace-logged-") as folder:
        path = Path(folder, "groups")
        with path.open("wb") as file:
            for i, text in enumerate(groups):
                if (read := read_group(text, ["body", "trajectory_groups", i], faults, model_id=model_id, version=None)) is not None:
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
        groups=len(groups),
        trajectories=trajectories,
        exceptions=exceptions,
        rewards=rewards,
        uri=store.uri(key),
        size=stored.size,
    )
