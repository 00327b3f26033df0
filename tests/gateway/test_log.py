"""What the gateway writes and what it knows: transactions that show when they return, and gateways that agree."""

from pathlib import Path

from aiokafka import AIOKafkaProducer
from tests.gateway.conftest import gateway_settings
from tests.unreadable import send_unreadable

from headrace.core.kafka import client_options
from headrace.core.models import create_model, model_id_of
from headrace.core.settings import Settings
from headrace.core.topic_admin import apply
from headrace.gateway.log_view import LogView
from headrace.gateway.log_writer import LogWriter, sealed
from headrace.schemas.base import utc_now
from headrace.schemas.gateway import GatewayJob, job_key
from headrace.schemas.jobs import JobDocument, JobState
from headrace.schemas.training import ModelSettings


def job(job_id: str) -> GatewayJob:
    return GatewayJob(job_id=job_id, model_id="m", account="acme", owner="ada", api="training-jobs", content="0" * 64)


async def write(writer: LogWriter, view: LogView, settings: Settings, job_id: str) -> None:
    record = sealed(job(job_id), topic=settings.topic_names.gateway, key=job_key(job_id))
    await writer.commit([record], is_in=lambda: job_key(job_id) in view.tables.facts)


async def test_what_is_committed_shows_at_once_here_and_in_every_other_gateway(settings: Settings) -> None:
    async with LogView(settings) as here, LogView(settings) as there, LogWriter(settings, here) as writer:
        for i in range(20):
            await write(writer, here, settings, f"job-{i}")
            assert job_key(f"job-{i}") in here.tables.facts
            assert job_key(f"job-{i}") in (await there.fresh()).facts


async def test_a_gateway_started_anew_knows_all_of_it(settings: Settings) -> None:
    async with LogView(settings) as view, LogWriter(settings, view) as writer:
        await write(writer, view, settings, "job-1")
    async with LogView(settings) as again:
        assert again.tables.facts[job_key("job-1")] == view.tables.facts[job_key("job-1")]


async def test_a_model_shows_by_its_command_before_any_worker_has_read_it(settings: Settings) -> None:
    async with LogView(settings) as view:
        await create_model(settings, project="p", name="n", model=ModelSettings(base_model="tiny"))
        model = (await view.fresh()).model(model_id_of(settings.account, "p", "n"))
        assert model is not None
        assert model.status == "creating"


async def test_two_gateways_with_one_name_fence_each_other_and_lose_nothing(kafka: str, topic_prefix: str, tmp_path: Path) -> None:
    settings = gateway_settings(kafka, topic_prefix, tmp_path, instance="same", slots=1)
    await apply(settings)
    async with LogView(settings) as view, LogWriter(settings, view) as one, LogWriter(settings, view) as two:
        for i in range(3):
            await write(one, view, settings, f"one-{i}")
            await write(two, view, settings, f"two-{i}")
        assert set((await view.fresh()).facts) == {job_key(f"{who}-{i}") for who in ("one", "two") for i in range(3)}


async def test_the_beginning_of_a_job_that_is_written_twice_covers_nothing_that_its_lane_has_said(settings: Settings) -> None:
    began = JobDocument(job_id="j", model_id="m", state=JobState.PENDING, created_at=utc_now())
    ended = began.model_copy(update={"state": JobState.COMPLETED, "moves": 2})
    async with LogView(settings) as view, LogWriter(settings, view) as writer:
        for document in (began, ended, began):
            await writer.commit([sealed(document, topic=settings.topic_names.jobs, key="j")], is_in=lambda: True)
        job = view.tables.job("j")
        assert job is not None
        assert job.state is JobState.COMPLETED


async def test_a_record_that_can_not_be_read_is_passed_by_and_nothing_around_it_is_lost(settings: Settings) -> None:
    async with LogView(settings) as view, LogWriter(settings, view) as writer:
        await write(writer, view, settings, "before")
        async with AIOKafkaProducer(**client_options(settings.kafka, "test")) as producer:
            for topic in (settings.topic_names.commands, settings.topic_names.gateway):
                await send_unreadable(producer, topic, 0, b"x")
        await write(writer, view, settings, "after")
        async with LogView(settings) as again:
            for tables in (await view.fresh(), await again.fresh()):
                assert {job_key("before"), job_key("after")} <= set(tables.facts)
                assert tables.unreadable >= 2
