"""`headrace produce`: good lines are sent, bad lines are named, a job is all or nothing."""

import asyncio
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiokafka import AIOKafkaProducer
from tests.producers.conftest import make_group, read_topic

from headrace.schemas.base import utc_now
from headrace.schemas.codec import SAFETENSORS_TYPE, decode_group
from headrace.schemas.envelope import header_text, seal
from headrace.schemas.jobs import JobDocument, JobRejection, JobRejections, JobState
from headrace.schemas.reasons import RejectionReason

Headrace = Callable[..., Any]
BAD_LINES = {
    2: b"{",
    4: b'{"trajectories": [{"reward": NaN}]}',
    6: b'{"trajectories": [{"reward": "high"}]}',
    8: b'{"trajectories": []}',
}


@pytest.fixture
def environment(kafka: str, topic_prefix: str, headrace: Headrace) -> dict[str, str]:
    """Settings of a cluster with topics and a model `agent`."""
    settings = {
        "HEADRACE_KAFKA__BOOTSTRAP_SERVERS": kafka,
        "HEADRACE_TOPICS__PREFIX": topic_prefix,
        "HEADRACE_TOPICS__PARTITIONS": "4",
        "HEADRACE_BASE_MODELS": '{"tiny": {"path": "/m"}}',
    }
    assert headrace("topics", "apply", **settings).code == 0
    assert headrace("models", "create", "agent", "--base-model", "tiny").code == 0
    return settings


def lines(bad: dict[int, bytes] | None = None) -> bytes:
    bad = bad or {}
    good = make_group().model_dump_json().encode()
    return b"\n".join([*(bad.get(number, good) for number in range(1, 10)), b"", b"   "])


def records(environment: dict[str, str]) -> list[Any]:
    topic = f"{environment['HEADRACE_TOPICS__PREFIX']}trajectory-groups"
    return asyncio.run(read_topic(environment["HEADRACE_KAFKA__BOOTSTRAP_SERVERS"], topic))


def test_bad_lines_are_named_with_field_and_reason_and_the_others_are_sent(headrace: Headrace, environment: dict[str, str], tmp_path: Path):
    (tmp_path / "groups.jsonl").write_bytes(lines(BAD_LINES))
    ran = headrace("produce", "groups.jsonl", "--model", "agent")
    assert ran.code == 1
    assert ran.out.splitlines() == ["sent 5, bad 4, failed 0"]
    said = [line for line in ran.err.splitlines() if line.startswith("line ")]
    assert [line.partition(":")[0] for line in said] == ["line 2", "line 4", "line 6", "line 8"]
    for line, expected in zip(said, ["not JSON", "trajectories[0].reward: NaN", "trajectories[0].reward: ", "trajectories: "], strict=True):
        assert expected in line
    assert len(records(environment)) == 5


def test_a_file_without_bad_lines_ends_with_success(headrace: Headrace, environment: dict[str, str], tmp_path: Path):
    group = make_group(group_id="mine")
    (tmp_path / "groups.jsonl").write_bytes(group.model_dump_json().encode())
    ran = headrace("produce", "groups.jsonl", "--model", "agent")
    assert (ran.code, ran.out.strip()) == (0, "sent 1, bad 0, failed 0")
    (record,) = records(environment)
    assert decode_group(record.value, SAFETENSORS_TYPE).group.group_id == "mine"


def test_standard_input_is_a_file_too(headrace: Headrace, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines())))
    assert headrace("produce", "-", "--model", "agent").out.strip() == "sent 9, bad 0, failed 0"
    assert len(records(environment)) == 9


def test_a_job_is_sent_as_a_whole(headrace: Headrace, environment: dict[str, str], tmp_path: Path):
    (tmp_path / "groups.jsonl").write_bytes(lines())
    ran = headrace("produce", "groups.jsonl", "--model", "agent", "--job", "--job-id", "j", "--wait", "0")
    assert ran.code == 0
    assert ran.out.splitlines() == ["job j", "sent 9, bad 0, failed 0"]
    *_groups, job = records(environment)
    assert header_text(job.headers)["ce_type"] == "headrace.training-job.v1"
    assert len(orjson.loads(job.value)["group_ids"]) == 9


def written(environment: dict[str, str], document: JobDocument) -> None:
    """A job's document, as the owner of its lane writes it."""

    async def write() -> None:
        value, headers = seal(document, source="test")
        async with AIOKafkaProducer(bootstrap_servers=environment["HEADRACE_KAFKA__BOOTSTRAP_SERVERS"]) as producer:
            topic = f"{environment['HEADRACE_TOPICS__PREFIX']}jobs"
            await producer.send_and_wait(topic, value, key=document.job_id.encode(), headers=headers)

    asyncio.run(write())


def test_a_job_that_trained_nothing_ends_with_1_and_the_counts_by_reason(headrace: Headrace, environment: dict[str, str], tmp_path: Path):
    (tmp_path / "groups.jsonl").write_bytes(lines())
    rejection = JobRejection(group_id="g0", group=0, trajectory=1, reason=RejectionReason.TOO_LONG, detail="trajectories[1]: 9 tokens")
    document = JobDocument(
        job_id="j",
        model_id="m",
        state=JobState.COMPLETED,
        created_at=utc_now(),
        num_groups=9,
        num_sequences=0,
        step=1,
        rejections=JobRejections(groups={RejectionReason.TOO_LONG: 7, RejectionReason.STALE: 2}).plus(rejection),
    )
    written(environment, document)
    ran = headrace("produce", "groups.jsonl", "--model", "agent", "--job", "--job-id", "j")
    assert ran.code == 1
    assert "10 of 9 groups were rejected: too_long 8, stale 2" in ran.err
    assert "group 0, trajectory 1: too_long: trajectories[1]: 9 tokens" in ran.err
    assert "the job trained nothing: no group was left" in ran.err
    listed = headrace("jobs", "list")
    assert "too_long 8, stale 2" in listed.out


@pytest.mark.parametrize(
    ("state", "code", "told"),
    [(JobState.COMPLETED, 0, "step 1: loss 0.5"), (JobState.FAILED, 1, "ranks are gone"), (JobState.RUNNING, 0, "JOB_STATE_RUNNING after")],
)
def test_the_end_of_a_job_is_waited_for_and_decides_the_exit_code(
    headrace: Headrace, environment: dict[str, str], tmp_path: Path, *, state: JobState, code: int, told: str
):
    (tmp_path / "groups.jsonl").write_bytes(lines())
    message = "ranks are gone" if state is JobState.FAILED else None
    document = JobDocument(job_id="j", model_id="m", state=state, created_at=utc_now(), num_groups=9, num_sequences=3, step=1)
    written(environment, document.model_copy(update={"error_message": message, "metrics": {"loss": 0.5}}))
    ran = headrace("produce", "groups.jsonl", "--model", "agent", "--job", "--job-id", "j", "--wait", "1")
    assert (ran.code, told in ran.out + ran.err) == (code, True), (ran.out, ran.err)


def test_a_job_with_a_bad_line_sends_nothing(headrace: Headrace, environment: dict[str, str], tmp_path: Path):
    (tmp_path / "groups.jsonl").write_bytes(lines({3: b"{"}))
    ran = headrace("produce", "groups.jsonl", "--model", "agent", "--job")
    assert ran.code == 1
    assert "the job was not submitted" in ran.err
    assert records(environment) == []


def example(*, tools: list[Any] | None = None, **answer: Any) -> bytes:
    said = {"role": "assistant", "content": "a", **answer}
    return orjson.dumps({"messages": [{"role": "user", "content": "q"}, said], **({} if tools is None else {"tools": tools})})


def test_examples_are_sent_as_one_job_in_few_groups(headrace: Headrace, environment: dict[str, str], tmp_path: Path):
    tool = {"type": "function", "function": {"name": "f"}}
    whole = make_group(group_id="whole").model_dump_json().encode()
    lines = [example(), b"", example(tools=[tool]), whole, *[example()] * 40, example(weight=0)]
    (tmp_path / "examples.jsonl").write_bytes(b"\n".join(lines))
    options = ("--epochs", "3", "--batch-size", "8", "--learning-rate", "1e-4")
    ran = headrace("produce", "examples.jsonl", "--model", "agent", "--sft", "--job-id", "j", "--wait", "0", *options)
    assert (ran.code, ran.out.splitlines()) == (0, ["job j", "sent 44, bad 0, failed 0"])
    *sent, job = records(environment)
    groups = [decode_group(record.value, header_text(record.headers)["content-type"]).group for record in sent]
    assert [(g.group_id, g.purpose, len(g.trajectories)) for g in groups] == [("whole", "sft", 2), ("j-0", "sft", 32), ("j-1", "sft", 11)]
    first = groups[1].trajectories
    assert [t.metadata["line"] for t in first[:4]] == [1, 3, 5, 6]
    assert first[1].tools is not None
    assert groups[2].trajectories[-1].messages_and_choices[1].model_dump(exclude_none=True)["weight"] == 0
    asked = orjson.loads(job.value)
    assert (asked["kind"], asked["sft"]["epochs"], asked["sft"]["batch_size"], asked["sft"]["learning_rate"]) == ("sft", 3, 8, 1e-4)


def test_bad_examples_are_named_and_nothing_is_sent(headrace: Headrace, environment: dict[str, str], tmp_path: Path):
    bad = [b"[]", b'{"messages": [{"role": "user", "content": "q"}]}', b'{"prompt": "q"}', b'{"messages": [{"role": "teapot"}]}']
    (tmp_path / "examples.jsonl").write_bytes(b"\n".join([example(), *bad]))
    ran = headrace("produce", "examples.jsonl", "--model", "agent", "--sft")
    assert ran.code == 1
    said = [line for line in ran.err.splitlines() if line.startswith("line ")]
    expected = ["an object with `messages`", "messages: no message is the assistant's", "messages: ", "messages[0].role: "]
    for number, (line, part) in enumerate(zip(said, expected, strict=True), 2):
        assert line.startswith(f"line {number}: ")
        assert part in line
    assert records(environment) == []


@pytest.mark.parametrize("options", [("--epochs", "2"), ("--sft", "--epochs", "0"), ("--sft", "--learning-rate", "-1")])
def test_options_of_examples_need_examples_and_sense(headrace: Headrace, tmp_path: Path, options: tuple[str, ...]):
    (tmp_path / "examples.jsonl").write_bytes(example())
    assert headrace("produce", "examples.jsonl", "--model", "m", *options).code == 2


def test_a_model_that_nobody_knows_is_refused_before_anything_is_sent(headrace: Headrace, environment: dict[str, str], tmp_path: Path):
    (tmp_path / "groups.jsonl").write_bytes(lines())
    ran = headrace("produce", "groups.jsonl", "--model", "nobody")
    assert ran.code == 1
    assert "model" in ran.err
    assert records(environment) == []


def test_a_file_that_is_not_there_is_wrong_usage(headrace: Headrace):
    assert headrace("produce", "nothing.jsonl", "--model", "m").code == 2
