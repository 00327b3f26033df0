"""The synchronous twin: the same behaviour without asyncio."""

import threading
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.producers.conftest import MODEL, ReadAll, make_group
from tests.producers.test_producer import with_producer

from headrace.core.kafka import KafkaUnavailableError
from headrace.core.settings import Settings
from headrace.producers import BufferFullError, InvalidGroupError, ProducerClosedError, SyncTrajectoryProducer
from headrace.schemas.envelope import header_text


async def test_it_sends_submits_and_flushes_and_leaves_no_thread(producer_settings: Settings, read_all: ReadAll):
    with SyncTrajectoryProducer(producer_settings, model_id=MODEL) as producer:
        assert producer.send(make_group()).offset == 0
        later = producer.submit(make_group())
        tried = producer.try_send(make_group())
        producer.flush()
        assert (later.result(0).offset, tried.result(0).offset) == (1, 2)
        producer.submit_job([make_group()], job_id="j", kind="sft")
    assert "headrace-producer" not in [thread.name for thread in threading.enumerate()]
    records = await read_all()
    assert [header_text(record.headers)["ce_type"] for record in records][-1] == "headrace.training-job.v1"
    assert len(records) == 5


async def test_many_threads_share_it(producer_settings: Settings, read_all: ReadAll):
    with SyncTrajectoryProducer(producer_settings, model_id=MODEL) as producer, ThreadPoolExecutor(8) as threads:
        reports = list(threads.map(lambda _: producer.send(make_group()), range(40)))
    assert sorted(report.offset for report in reports) == [*range(40)]
    assert len(await read_all()) == 40


def test_errors_are_the_same(producer_settings: Awaitable[Settings]):
    settings = with_producer(producer_settings, buffer_bytes=1024, linger_ms=300)  # type: ignore[arg-type]  # pytest awaits the fixture
    with SyncTrajectoryProducer(settings, model_id=MODEL) as producer:
        with pytest.raises(InvalidGroupError, match="trajectories"):
            producer.send(make_group().model_copy(update={"trajectories": []}))
        producer.try_send(make_group(tokens=100))
        with pytest.raises(BufferFullError):
            producer.try_send(make_group(tokens=100))
    with pytest.raises(ProducerClosedError):
        producer.send(make_group())


def test_a_start_that_fails_leaves_no_thread():
    with pytest.raises(KafkaUnavailableError):
        SyncTrajectoryProducer(bootstrap_servers="127.0.0.1:1").start()
    assert "headrace-producer" not in [thread.name for thread in threading.enumerate()]
