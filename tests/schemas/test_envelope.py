"""CloudEvents headers: every record type survives, and what this release does not know is refused with a reason."""

import math
from datetime import UTC, datetime

import pytest
from pydantic import BaseModel

from headrace.schemas.commands import CancelJob, CreateModel, DeleteModel
from headrace.schemas.envelope import Envelope, header_text, model_of, open_record, record_models, seal, type_of
from headrace.schemas.events import GroupRejected, TrajectoryRejected
from headrace.schemas.jobs import TrainingJob
from headrace.schemas.reasons import CodecError, RejectionReason
from headrace.schemas.reasons import DeadLetterReason as Reason
from headrace.schemas.training import ModelSettings, TrainConfig
from headrace.schemas.trajectory import TrajectoryGroup
from headrace.schemas.weights import StoredFile, WeightsPublished

RECORDS: list[BaseModel] = [
    TrainingJob(job_id="j", group_ids=("a", "b"), config=TrainConfig(learning_rate=1e-4, kimi_k2_tau=None)),
    CreateModel(
        model_id="m", account="a", project="p", name="n", settings=ModelSettings(base_model="tiny", max_policy_lag=3), worker_group="w"
    ),
    DeleteModel(model_id="m"),
    CancelJob(model_id="m", job_id="j"),
    TrajectoryRejected(model_id="m", group_id="g", reason=RejectionReason.STALE, detail="é", trajectory=3, partition=1, offset=2),
    GroupRejected(model_id="m", group_id="g", reason=RejectionReason.STALE, detail="é", partition=1, offset=2),
    WeightsPublished(
        model_id="m",
        incarnation="i",
        policy_version=1,
        base_model="tiny",
        format="lora",
        uri="file:///w",
        digest="0" * 64,
        files=(StoredFile(path="a", size=1, sha256="f" * 64),),
    ),
]


def refused(headers: dict[str, str], *allowed: type[BaseModel], body: bytes | None = b"{}") -> tuple[Reason, str]:
    with pytest.raises(CodecError) as caught:
        open_record(body, headers, allowed)
    return caught.value.reason, caught.value.path


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_comes_back_equal(record: BaseModel):
    value, headers = seal(record, source="test")
    assert open_record(value, header_text(headers), record_models()) == record


def test_headers_follow_the_binary_mode_of_cloudevents():
    time = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    envelope = Envelope(type=type_of(TrainingJob), source="agent-é", id="1", time=time, traceparent="00-x")
    assert dict(envelope.headers()) == {
        "ce_specversion": b"1.0",
        "ce_id": b"1",
        "ce_type": b"headrace.training-job.v1",
        "ce_source": "agent-é".encode(),
        "ce_time": b"2026-01-02T03:04:05+00:00",
        "content-type": b"application/json",
        "traceparent": b"00-x",
    }


def test_every_record_type_has_a_name_of_its_own():
    names = [type_of(model) for model in record_models()]
    assert len({*names}) == len(names)
    for model, name in zip(record_models(), names, strict=True):
        assert model_of({"ce_type": name}, record_models()) is model


def test_an_unknown_type_or_version_is_refused_not_guessed():
    allowed = (TrajectoryGroup, TrainingJob)
    assert refused({"ce_type": "headrace.training-job.v2"}, *allowed) == (Reason.UNSUPPORTED_VERSION, "ce_type")
    assert refused({"ce_type": "headrace.training-job.v"}, *allowed) == (Reason.UNSUPPORTED_VERSION, "ce_type")
    for unknown in ("headrace.delete-model.v1", "headrace.nothing.v1", "other.training-job.v1", "training-job.v1", "headrace", "", "v1"):
        assert refused({"ce_type": unknown}, *allowed) == (Reason.UNKNOWN_TYPE, "ce_type")


def test_a_record_without_a_type_is_the_topics_default():
    assert isinstance(open_record(b'{"model_id": "m"}', {}, [DeleteModel, CancelJob]), DeleteModel)


def test_a_tombstone_or_a_bad_body_has_a_reason():
    assert refused({}, DeleteModel, body=None) == (Reason.NOT_JSON, "")
    assert refused({}, DeleteModel, body=b"{") == (Reason.NOT_JSON, "")
    assert refused({}, DeleteModel, body=b'{"model_id": 5}') == (Reason.INVALID_SCHEMA, "model_id")
    assert refused({}, DeleteModel, body=b'{"model_id": "m", "x": NaN}') == (Reason.NOT_FINITE, "x")


def test_foreign_headers_can_not_break_a_reader():
    assert header_text([("a", b"\xff"), ("b", None), ("c", b"1"), ("c", b"2")]) == {"a": "\ufffd", "b": "", "c": "2"}


def test_nan_in_an_unknown_field_is_refused_when_a_record_is_written():
    config = TrainConfig.model_validate({"learning_rate": 1.0, "experimental_knob": [math.nan]})
    with pytest.raises(CodecError) as caught:
        seal(TrainingJob(job_id="j", group_ids=(), config=config), source="test")
    assert (caught.value.reason, caught.value.path) == (Reason.NOT_FINITE, "config.experimental_knob[0]")


def test_unknown_fields_of_a_record_are_passed_on():
    job = open_record(b'{"job_id": "j", "group_ids": [], "config": {"new": 1}, "later": {"a": [null]}}', {}, [TrainingJob])
    value, headers = seal(job, source="test")
    again = open_record(value, header_text(headers), [TrainingJob])
    assert again == job
    assert again.model_extra == {"later": {"a": [None]}}
