"""Jobs: commands folded over documents, and what is refused at the door. The worker's side is in tests/worker/test_jobs.py."""

import asyncio
import uuid
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from pydantic import BaseModel

from headrace.core.job_views import JobView, fold_jobs
from headrace.core.jobs import JobNotTakenUpError, JobRefusedError, UnknownJobError, ask, get_job, list_jobs, wait_for_job
from headrace.core.kafka import ClientOptions
from headrace.core.lanes import lane_of
from headrace.core.models import UnknownModelError
from headrace.core.reading import read_to_end
from headrace.core.settings import KafkaSettings, Settings, TopicSettings
from headrace.core.topic_admin import apply
from headrace.schemas.base import utc_now
from headrace.schemas.commands import CancelJob, PauseJob, ResumeJob
from headrace.schemas.envelope import seal
from headrace.schemas.jobs import JobDocument, JobState
from headrace.schemas.state import LaneState, ModelState
from headrace.schemas.topics import lane_key
from headrace.schemas.training import ModelSettings

LANES = 2
COMMANDS = {"cancel": CancelJob, "pause": PauseJob, "resume": ResumeJob}


def model_state(model_id: str = "m", **changed: Any) -> ModelState:
    return ModelState(
        model_id=model_id,
        incarnation=str(uuid.uuid4()),
        account="a",
        project="p",
        name="n",
        worker_group="default",
        settings=ModelSettings(base_model="tiny"),
        scanned=0,
        **changed,
    )


def document(state: str, job_id: str = "j", model_id: str = "m", **changed: Any) -> JobDocument:
    return JobDocument(job_id=job_id, model_id=model_id, state=JobState(f"JOB_STATE_{state}"), created_at=utc_now(), **changed)


def record(key: str, model: BaseModel, offset: int = 0, partition: int = 0) -> Any:
    value, headers = seal(model, source="test")
    return SimpleNamespace(topic="t", key=key.encode(), value=value, headers=headers, offset=offset, partition=partition)


def shown(state: str | None, commands: Sequence[str], *, through: int = 0, document_through: int = 0, early: tuple[str, ...] = ()) -> Any:
    """The view of job `j`, whose commands stand at offsets 10, 11, …"""
    states = [
        record("m", model_state(cancelled_early=early)),
        record("lane:0", LaneState(lane=0, commands_through=through, partitions=1), offset=1),
    ]
    asked = [record("m", COMMANDS[what](model_id="m", job_id="j"), offset=10 + i) for i, what in enumerate(commands)]
    documents = [] if state is None else [record("j", document(state, commands_through=document_through))]
    found = fold_jobs(states, asked, documents).get("j")
    return None if found is None else (found.state.removeprefix("JOB_STATE_"), found.requested, found.command and found.command[1])


@pytest.mark.parametrize(
    ("state", "commands", "expected"),
    [
        ("PENDING", [], ("PENDING", None, None)),
        ("PENDING", ["cancel"], ("CANCELLING", "cancel", 10)),
        ("RUNNING", ["cancel"], ("CANCELLING", "cancel", 10)),
        ("PAUSED", ["cancel"], ("CANCELLING", "cancel", 10)),
        ("RUNNING", ["pause"], ("RUNNING", "pause", 10)),
        ("PENDING", ["pause"], ("PENDING", "pause", 10)),
        ("PAUSED", ["pause"], ("PAUSED", None, None)),
        ("PAUSED", ["resume"], ("PENDING", "resume", 10)),
        ("PENDING", ["resume"], ("PENDING", None, None)),
        # The last one counts, and a cancel is final.
        ("RUNNING", ["pause", "resume"], ("RUNNING", "resume", 11)),
        ("PAUSED", ["resume", "pause"], ("PENDING", "pause", 11)),
        ("RUNNING", ["pause", "cancel", "resume"], ("CANCELLING", "cancel", 11)),
        # What has ended stays.
        ("COMPLETED", ["cancel", "pause"], ("COMPLETED", None, None)),
        ("CANCELLED", ["resume"], ("CANCELLED", None, None)),
        # Not read by any owner: only a cancel shows.
        (None, ["cancel"], ("CANCELLING", "cancel", 10)),
        (None, ["pause"], None),
    ],
)
def test_lane_owns_documents_commands_that_no_owner_has_read_show(state: str | None, commands: list[str], expected: Any) -> None:
    assert shown(state, commands) == expected


def test_lane_owns_documents_commands_that_are_folded_in_are_not_folded_again() -> None:
    assert shown("PENDING", ["pause", "resume"], through=12) == ("PENDING", None, None)
    assert shown("PENDING", ["pause", "resume"], document_through=12) == ("PENDING", None, None)
    assert shown("PENDING", ["pause"], through=10) == ("PENDING", "pause", 10)
    # Its owner has read the cancel, and not the job.
    assert shown(None, ["cancel"], through=11, early=("j",)) == ("CANCELLING", None, None)


def test_lane_owns_documents_a_cancel_shows_though_no_owner_has_ever_read_the_lane() -> None:
    found = fold_jobs([], [record("m", CancelJob(model_id="m", job_id="j"))], [])["j"]
    assert (found.state, found.requested, found.worker_group) == ("JOB_STATE_CANCELLING", "cancel", None)


def test_a_command_for_another_models_job_is_not_its() -> None:
    """A job id is whatever its sender made of it; the lane looks for it among the jobs of the command's model."""
    states = [record("m", model_state()), record("x", model_state("x"))]
    found = fold_jobs(states, [record("x", CancelJob(model_id="x", job_id="j"))], [record("j", document("RUNNING"))])
    assert (found["j"].model_id, found["j"].state) == ("m", JobState.RUNNING)


@pytest.fixture
async def settings(kafka: str, topic_prefix: str) -> Settings:
    made = Settings(kafka=KafkaSettings(bootstrap_servers=kafka), topics=TopicSettings(prefix=topic_prefix, partitions=LANES))
    await apply(made)
    return made


async def as_owner(
    settings: Settings, options: ClientOptions, *documents: JobDocument, through: int = 0, early: tuple[str, ...] = ()
) -> None:
    """What the owner of model `m`'s lane writes once it has read the commands below `through`."""
    topics, lane = settings.topic_names, lane_of("m", LANES)
    producer = AIOKafkaProducer(**options, transactional_id=settings.topics.prefix + "lane")
    await producer.start()
    async with producer.transaction():
        records: list[tuple[str, str, BaseModel, int | None]] = [
            (topics.models, "m", model_state(cancelled_early=early), lane),
            (topics.models, lane_key(lane), LaneState(lane=lane, commands_through=through, partitions=LANES), lane),
            *((topics.jobs, found.job_id, found, None) for found in documents),
        ]
        for topic, key, model, partition in records:
            value, headers = seal(model, source="test")
            await producer.send_and_wait(topic, value, key=key.encode(), partition=partition, headers=headers)
    await producer.stop()


async def test_jobs_are_listed_by_age_model_and_state(settings: Settings, options: ClientOptions) -> None:
    old, new, other = document("PENDING"), document("RUNNING", "k"), document("FAILED", "l", "x")
    await as_owner(settings, options, new, other, old)
    assert [view.job_id for view in await list_jobs(settings)] == ["j", "k", "l"]
    assert [view.job_id for view in await list_jobs(settings, model_id="m")] == ["j", "k"]
    assert [view.job_id for view in await list_jobs(settings, state=JobState.FAILED)] == ["l"]
    await ask(settings, "cancel", "k")
    assert [view.job_id for view in await list_jobs(settings, state="JOB_STATE_CANCELLING")] == ["k"]
    assert (await get_job(settings, "j")).document == old


async def test_what_is_asked_shows_at_once_and_is_not_asked_twice(settings: Settings, options: ClientOptions) -> None:
    await as_owner(settings, options, document("RUNNING"))
    paused = await ask(settings, "pause", "j")
    assert (paused.state, paused.requested) == (JobState.RUNNING, "pause")
    assert await ask(settings, "pause", "j") == paused
    cancelled = await ask(settings, "cancel", "j")
    assert await ask(settings, "cancel", "j") == cancelled == await get_job(settings, "j")
    assert (cancelled.state, cancelled.worker_group) == ("JOB_STATE_CANCELLING", "default")
    sent = await read_to_end(options, settings.topic_names.commands)
    assert [(record.key, record.partition) for record in sent] == [(b"m", lane_of("m", LANES))] * 2


async def test_what_can_not_be_is_refused_and_no_command_is_written(settings: Settings, options: ClientOptions) -> None:
    states = ["PENDING", "RUNNING", "PAUSED", "COMPLETED", "FAILED", "CANCELLED"]
    await as_owner(settings, options, *(document(state, state) for state in states))
    with pytest.raises(UnknownJobError, match=r"there is no job nothing: .* naming its model"):
        await ask(settings, "cancel", "nothing")
    with pytest.raises(UnknownJobError):
        await ask(settings, "pause", "nothing", model_id="m")
    with pytest.raises(UnknownModelError):
        await ask(settings, "cancel", "nothing", model_id="nobody")
    with pytest.raises(JobRefusedError, match="job PENDING is of model m, not of x"):
        await ask(settings, "cancel", "PENDING", model_id="x")
    for state in ["COMPLETED", "FAILED", "CANCELLED"]:
        for request, done in [("cancel", "cancelled"), ("pause", "paused"), ("resume", "resumed")]:
            with pytest.raises(JobRefusedError, match=f"job {state} can't be {done}: it is JOB_STATE_{state}, which is final"):
                await ask(settings, request, state)  # type: ignore[arg-type]  # the three there are
    for state in ["PENDING", "RUNNING"]:
        with pytest.raises(JobRefusedError, match=f"it is JOB_STATE_{state}, and only a paused job can be"):
            await ask(settings, "resume", state)
    assert (await ask(settings, "pause", "PAUSED")).command is None, "it is paused already"
    assert await read_to_end(options, settings.topic_names.commands) == []


async def test_a_job_that_no_owner_has_read_is_cancelled_by_its_model(settings: Settings, options: ClientOptions) -> None:
    await as_owner(settings, options)
    asked = await ask(settings, "cancel", "early", model_id="m")
    assert asked.command is not None
    assert await get_job(settings, "early") == asked
    await as_owner(settings, options, through=asked.command[1] + 1, early=("early",))
    assert (await wait_for_job(settings, asked, 10)).state == "JOB_STATE_CANCELLING"


async def test_waiting_ends_when_the_owner_has_read_the_command_and_not_before(settings: Settings, options: ClientOptions) -> None:
    await as_owner(settings, options, document("RUNNING"))
    asked = await ask(settings, "pause", "j")
    assert asked.command is not None
    with pytest.raises(JobNotTakenUpError, match=r"read the command to pause job j within 0.5 s: is one of group 'default' running"):
        await wait_for_job(settings, asked, 0.5)
    waiting = asyncio.create_task(wait_for_job(settings, asked, 30))
    await as_owner(settings, options, through=asked.command[1])
    await as_owner(settings, options, document("PAUSED"), through=asked.command[1] + 1)
    done: JobView = await waiting
    assert (done.state, done.requested) == (JobState.PAUSED, None)
