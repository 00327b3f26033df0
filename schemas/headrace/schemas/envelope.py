"""CloudEvents headers (Kafka binding, binary mode) around every record, and the record types by `ce_type`.

Guarantees: header values are UTF-8; an unknown type or major version is refused with a reason, never guessed at. A record without
`ce_type` is read as the topic's default type, so that `kcat` can write a group as plain JSON.

JSON Schemas of the records, for readers and writers in other languages: one document a record, named like its `ce_type`.

Guarantees: the same models give the same bytes. Says what may be written (fields with defaults are not required). Limitations: rules that
span fields (lengths that must agree); those the codec checks.
"""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import orjson
from pydantic import BaseModel

from headrace.schemas.base import utc_now
from headrace.schemas.claim import GroupClaim
from headrace.schemas.commands import CancelJob, CreateModel, DeleteCheckpoints, DeleteModel, PauseJob, ResumeJob, ResumeModel
from headrace.schemas.dead_letters import DeadLetterResolved
from headrace.schemas.deployments import DeployedModel, DeploymentFact, HotLoad
from headrace.schemas.events import GroupRejected, JobStateChanged, ModelStatusChanged, Starved, StepCompleted, TrajectoryRejected
from headrace.schemas.gateway import DeletedCheckpoint, GatewayJob, LoggedGroups
from headrace.schemas.jobs import JobDocument, TrainingJob
from headrace.schemas.parsing import check_finite, load_json, validate, write_json
from headrace.schemas.reasons import CodecError
from headrace.schemas.reasons import DeadLetterReason as Reason
from headrace.schemas.rlor import DatasetFact, DatasetFile, ModelAlias, RlorJob, RlorRun
from headrace.schemas.state import LaneState, ModelState, StepRecord
from headrace.schemas.trajectory import TrajectoryGroup
from headrace.schemas.weights import EngineAlive, WeightsApplied, WeightsFailed, WeightsPublished

JSON_TYPE = "application/json"
KafkaHeaders = Sequence[tuple[str, bytes]]

# Names on the wire: `headrace.<name>.v1`. Never renamed; a break makes a v2 next to it.
_NAMES: dict[type[BaseModel], str] = {
    TrajectoryGroup: "trajectory-group",
    GroupClaim: "group-claim",
    TrainingJob: "training-job",
    CreateModel: "create-model",
    DeleteModel: "delete-model",
    CancelJob: "cancel-job",
    PauseJob: "pause-job",
    ResumeJob: "resume-job",
    ResumeModel: "resume-model",
    DeleteCheckpoints: "delete-checkpoints",
    StepRecord: "step-record",
    ModelState: "model-state",
    LaneState: "lane-state",
    StepCompleted: "step-completed",
    GroupRejected: "group-rejected",
    TrajectoryRejected: "trajectory-rejected",
    JobStateChanged: "job-state-changed",
    ModelStatusChanged: "model-status-changed",
    Starved: "starved",
    WeightsPublished: "weights-published",
    WeightsApplied: "weights-applied",
    WeightsFailed: "weights-failed",
    EngineAlive: "engine-alive",
    JobDocument: "job-document",
    DeadLetterResolved: "dead-letter-resolved",
    GatewayJob: "gateway-job",
    DeletedCheckpoint: "deleted-checkpoint",
    LoggedGroups: "logged-groups",
    DatasetFact: "dataset",
    DatasetFile: "dataset-file",
    ModelAlias: "model-alias",
    DeploymentFact: "deployment",
    DeployedModel: "deployed-model",
    HotLoad: "hot-load",
    RlorJob: "rlor-job",
    RlorRun: "rlor-run",
}
_MODELS = {name: model for model, name in _NAMES.items()}


def type_of(model: type[BaseModel]) -> str:
    """The `ce_type` of a record model."""
    return f"headrace.{_NAMES[model]}.v1"


def record_models() -> tuple[type[BaseModel], ...]:
    """Every model that can be a record."""
    return tuple(_NAMES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """The headers of one record."""

    type: str
    source: str
    id: str
    time: datetime
    content_type: str = JSON_TYPE
    traceparent: str | None = None

    def headers(self) -> list[tuple[str, bytes]]:
        """As Kafka headers."""
        values = {
            "ce_specversion": "1.0",
            "ce_id": self.id,
            "ce_type": self.type,
            "ce_source": self.source,
            "ce_time": self.time.isoformat(),
            "content-type": self.content_type,
        }
        if self.traceparent is not None:
            values["traceparent"] = self.traceparent
        return [(name, value.encode()) for name, value in values.items()]


def seal(
    record: BaseModel, *, source: str, event_id: str | None = None, traceparent: str | None = None
) -> tuple[bytes, list[tuple[str, bytes]]]:
    """A record as (value, headers), JSON. `event_id` is random unless given; events that may repeat derive theirs.

    Raises:
        CodecError: an unknown field holds something that JSON can't.
    """
    envelope = Envelope(
        type=type_of(type(record)),
        source=source,
        id=event_id or str(uuid.uuid4()),
        time=utc_now(),
        traceparent=traceparent,
    )
    check_finite(record)  # before the dump, which turns NaN into None
    return write_json(record.model_dump(mode="json")), envelope.headers()


def header_text(headers: Iterable[tuple[str, bytes | None]]) -> Mapping[str, str]:
    """Headers as text; bytes that are not UTF-8 are replaced, so that a foreign header can't break a reader. The last one wins."""
    return {name: (value or b"").decode(errors="replace") for name, value in headers}


def open_record(body: bytes | memoryview | None, headers: Mapping[str, str], allowed: Sequence[type[BaseModel]]) -> BaseModel:
    """Read a JSON record of one of the allowed types; without `ce_type` it is read as the first of them.

    Raises:
        CodecError: unknown type or version, not JSON, or a field that does not fit.
    """
    model = model_of(headers, allowed)
    if body is None:
        raise CodecError(Reason.NOT_JSON, "", "the record has no value")
    return validate(model, load_json(body))


def model_of(headers: Mapping[str, str], allowed: Sequence[type[BaseModel]]) -> type[BaseModel]:
    """The model that a record's `ce_type` names, if the topic carries it.

    Raises:
        CodecError: `unknown_type` or `unsupported_version`.
    """
    ce_type = headers.get("ce_type")
    if ce_type is None:
        return allowed[0]
    name, _, version = ce_type.removeprefix("headrace.").rpartition(".")
    model = _MODELS.get(name) if ce_type.startswith("headrace.") else None
    expected = ", ".join(type_of(m) for m in allowed)
    if model is None or model not in allowed:
        raise CodecError(Reason.UNKNOWN_TYPE, "ce_type", f"{ce_type!r}: this topic carries {expected}")
    if version != "v1":
        raise CodecError(Reason.UNSUPPORTED_VERSION, "ce_type", f"{ce_type!r}: this release reads {type_of(model)}")
    return model


DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The schema of one record, with everything it refers to in `$defs`."""
    name = type_of(model)
    return {"$schema": DIALECT, "$id": f"urn:{name.replace('.', ':')}", **model.model_json_schema()}


def json_schema_files() -> dict[str, str]:
    """Every record's schema as file content by file name: `step-completed.v1.json`."""
    return {
        f"{type_of(model).removeprefix('headrace.')}.json": orjson.dumps(json_schema(model), option=orjson.OPT_INDENT_2).decode() + "\n"
        for model in record_models()
    }
