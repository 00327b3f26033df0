"""`POST /v1/preview/sft-training-jobs`: supervised fine-tuning on conversations that lie in the object store.

Guarantees: as of a training job: a 200 is given when groups, job, document and the gateway's note are committed; the groups are in the
store before. All faults of the config, or else all lines that are no example, are reported at once. Limitations: more than one line of the
data in memory; data that changes while it is read.
"""

import asyncio
from contextlib import closing
from typing import Any, cast

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, ValidationError

from headrace.gateway.access import KnownCaller
from headrace.gateway.gate import Gate, OpenGate
from headrace.gateway.reach import Reach
from headrace.gateway.readers import ReceivedBody
from headrace.gateway.training_jobs.config import Faults, JobConfig, parts_of, read_config
from headrace.gateway.training_jobs.events import model_of
from headrace.gateway.training_jobs.staging import Placed, Staged, stage
from headrace.gateway.training_jobs.submit import CreatedJob, Submission, identity_of, place, trainable, write
from headrace.gateway.training_jobs.training_data import DataObject, grouped, objects_of, read_lines
from headrace.schemas.jobs import TrainingJob
from headrace.schemas.parsing import path_of, shown, write_json
from headrace.schemas.training import SftConfig

router = APIRouter(prefix="/v1/preview/sft-training-jobs", tags=["training-jobs"])

_LOC = ["body", "config"]


class SftRequest(BaseModel):
    """What is to be imitated, and how."""

    model_id: str
    training_data_url: str = Field(min_length=1, max_length=2000)
    """URI in the object store, id of a dataset, or a `wandb-artifact://` that the gateway's settings map. JSONL, on each line an object
    with `messages` and, perhaps, `tools`."""
    config: dict[str, Any] | None = Field(default=None, description="Fields of `SftConfig`: `batch_size`, `learning_rate`, `epochs`, …")
    experimental_config: dict[str, Any] | None = Field(default=None, description="Fields of `TrainConfig`.")


@router.post("")
async def create_sft_job(body: SftRequest, request: Request, caller: KnownCaller, gate: OpenGate) -> CreatedJob:
    """Train a model one step on examples."""
    content = await request.body()
    identity = await identity_of(request, caller, "training-jobs", ReceivedBody(size=len(content), content=content))
    async with identity.lock(gate):
        tables = await gate.view.fresh()
        if (known := identity.known(tables, caller.account)) is not None:
            return CreatedJob(id=known)
        model = trainable(model_of(tables, caller, body.model_id, ("body", "model_id")))
        faults = Faults()
        text = b"" if body.experimental_config is None else write_json(body.experimental_config)
        reach = Reach.of(gate, tables, caller)
        config = read_config(text, reach, model, faults)
        sft, warnings = _sft_config(body.config or {}, faults)
        faults.check()
        objects = objects_of(body.training_data_url, gate.settings.gateway, reach)
        placed = place(gate, model, identity, config, is_sft=True)
        staged = await asyncio.to_thread(_staged, gate, objects, placed, sft)
        job = TrainingJob(job_id=identity.job_id, group_ids=staged.group_ids, kind="sft", config=config.config, sft=sft)
        told = (*config.warnings, *warnings, *_without_effect(config))
        await write(gate, Submission(identity=identity, caller=caller, placed=placed, staged=staged, job=job, warnings=told))
    return CreatedJob(id=identity.job_id)


def _staged(gate: Gate, objects: list[DataObject], placed: Placed, sft: SftConfig) -> Staged:
    faults = Faults()
    with closing(cast("Any", read_lines(gate.store, objects))) as lines:
        staged = stage(gate.store, grouped(lines, faults, gate.settings.gateway.max_groups, sft.assistant_turns), placed, faults)
    faults.check()
    return staged


class _MetricLogging(BaseModel):
    """Where the hosted service logs a job's metrics. Here they are in the job's events and in the ledger, whatever this says."""

    enabled: bool = False
    target_training_step: int | None = Field(default=None, ge=0)


def _sft_config(given: dict[str, Any], faults: Faults) -> tuple[SftConfig, list[str]]:
    raw = {name: value for name, value in given.items() if name != "metric_logging"}
    if isinstance(logging := given.get("metric_logging"), dict):
        try:
            _MetricLogging.model_validate(logging)
        except ValidationError as error:
            for fault in error.errors(include_url=False, include_input=False, include_context=False):
                faults.add([*_LOC, "metric_logging", *fault["loc"]], fault["msg"], fault["type"])
    known = {name: value for name, value in raw.items() if name in SftConfig.model_fields and value is not None}
    warnings = [
        f"config.{shown(name)} is no option of this release: it has no effect" for name in sorted(raw.keys() - SftConfig.model_fields)
    ]
    try:
        return SftConfig.model_validate(known), warnings[:50]
    except ValidationError as error:
        for fault in error.errors(include_url=False, include_input=False, include_context=False):
            faults.add([*_LOC, *parts_of(path_of(fault["loc"], known))], fault["msg"], fault["type"])
    return SftConfig(), warnings


def _without_effect(config: JobConfig) -> list[str]:
    if config.config is None or config.config.learning_rate is None:
        return []
    return ["experimental_config.learning_rate has no effect on a supervised job: config.learning_rate counts"]
