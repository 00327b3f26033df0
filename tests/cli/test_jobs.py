"""`headrace jobs` against the real broker, with the test in the place of a worker."""

import asyncio
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer

from headrace.core import jobs
from headrace.core.commands import lane_states
from headrace.core.kafka import client_options
from headrace.core.lanes import lane_of
from headrace.core.models import model_id_of
from headrace.core.settings import KafkaSettings
from headrace.schemas.envelope import seal
from headrace.schemas.jobs import JobDocument, JobState
from headrace.schemas.state import LaneState

Headrace = Callable[..., Any]
MODEL = model_id_of("default", "maze", "solver")


@pytest.fixture
def cli(headrace: Headrace, kafka: str, topic_prefix: str) -> Headrace:
    """With topics."""
    environment = {"HEADRACE_KAFKA__BOOTSTRAP_SERVERS": kafka, "HEADRACE_TOPICS__PREFIX": topic_prefix, "HEADRACE_TOPICS__PARTITIONS": "1"}
    assert headrace("topics", "apply", **environment).code == 0
    return headrace


@pytest.fixture
def own(kafka: str, topic_prefix: str) -> Callable[..., None]:
    """`own(through, job="RUNNING")`: what a lane's owner writes when it has read the commands below."""

    async def write(through: int, jobs: dict[str, str]) -> None:
        producer = AIOKafkaProducer(**client_options(KafkaSettings(bootstrap_servers=kafka), "test"))
        await producer.start()
        for job, state in jobs.items():
            found = JobDocument(
                job_id=job,
                model_id=MODEL,
                state=JobState(f"JOB_STATE_{state}"),
                created_at=datetime(2026, 1, 2, tzinfo=UTC),
                num_groups=3,
                error_message="it\x1b[2J broke" if state == "FAILED" else None,
            )
            value, headers = seal(found, source="test")
            await producer.send_and_wait(topic_prefix + "jobs", value, key=job.encode(), headers=headers)
        value, headers = seal(LaneState(lane=0, commands_through=through, partitions=1), source="test")
        await producer.send_and_wait(topic_prefix + "models", value, key=b"lane:0", partition=lane_of(MODEL, 1), headers=headers)
        await producer.stop()

    return lambda through, **jobs: asyncio.run(write(through, jobs))


def test_jobs_are_listed_shown_paused_resumed_and_cancelled(
    cli: Headrace, own: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    own(0, ran="FAILED", runs="RUNNING", waits="PENDING")
    table = cli("jobs", "list").out
    assert all(text in table for text in ("ran", MODEL, "FAILED", r"it\x1b[2J broke", "2026-01-02 00:00:00", "RUNNING", "PENDING"))
    assert [job["job_id"] for job in cli("jobs", "list", "--json", "--model", "solver", "-p", "maze").json] == ["ran", "runs", "waits"]
    unknown = cli("jobs", "list", "--json", "--model", "other")
    assert (unknown.code, "there is no model 'other'" in unknown.err) == (1, True)
    for state in ("running", "JOB_STATE_RUNNING"):
        assert [job["job_id"] for job in cli("jobs", "list", "--json", "--state", state).json] == ["runs"]

    assert cli("jobs", "pause", "runs").out == "runs RUNNING, to be paused\n"
    shown = cli("jobs", "show", "runs", "--json").json
    assert (shown["state"], shown["requested"], shown["num_groups"]) == ("JOB_STATE_RUNNING", "pause", 3)
    own(1, runs="PAUSED")
    assert "state: JOB_STATE_PAUSED\n" in cli("jobs", "show", "runs").out
    assert cli("jobs", "resume", "runs").out == "runs PENDING, to be resumed\n"
    waits = threading.Event()
    monkeypatch.setattr(jobs, "lane_states", lambda *asked: waits.set() or lane_states(*asked))
    owner = threading.Thread(target=lambda: waits.wait(30) and own(2, runs="PENDING"))
    owner.start()
    again = cli("jobs", "resume", "runs", "--wait")
    owner.join()
    assert (again.code, again.out) == (0, "runs PENDING\n"), "asking twice waits for the first"
    assert cli("jobs", "cancel", "waits", "--json").json["state"] == "JOB_STATE_CANCELLING"


def test_what_can_not_be_is_said(cli: Headrace, own: Callable[..., None]) -> None:
    own(0, ran="FAILED", runs="RUNNING")
    for arguments, code, message in [
        (("show", "nothing"), 1, "error: there is no job nothing: `headrace jobs list` shows those"),
        (("cancel", "nothing"), 1, "by naming its model"),
        (("cancel", "nothing", "--model", "nobody"), 1, "there is no model"),
        (("cancel", "ran"), 1, "error: job ran can't be cancelled: it is JOB_STATE_FAILED, which is final"),
        (("resume", "runs"), 1, "and only a paused job can be"),
        (("pause", "runs", "--wait", "--timeout", "0.2"), 1, "no worker has read the command to pause job runs within 0.2 s"),
        (("list", "--state", "busy"), 2, "'busy' is no state; there are PENDING, RUNNING, PAUSED"),
    ]:
        ran = cli("jobs", *arguments)
        assert (ran.code, ran.out) == (code, ""), arguments
        assert message in ran.err


def test_without_topics_the_error_says_what_to_do(headrace: Headrace, kafka: str) -> None:
    ran = headrace("jobs", "list", HEADRACE_KAFKA__BOOTSTRAP_SERVERS=kafka, HEADRACE_TOPICS__PREFIX="nowhere.")
    assert ran.code == 1
    assert "run `headrace topics apply`" in ran.err
