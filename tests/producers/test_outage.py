"""A broker that stops answering: every buffered group gets an answer of its own, nothing is doubled, and sending continues afterwards."""

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from tests.producers.conftest import MODEL, make_group, make_topic, read_topic

from headrace.core.local import LocalBroker
from headrace.core.settings import KafkaSettings, ProducerSettings, Settings, TopicSettings
from headrace.producers import DeliveryError, DeliveryReport, TrajectoryProducer
from headrace.schemas.envelope import header_text


async def started(folder: Path, timeout_ms: int) -> tuple[LocalBroker, Settings]:
    broker = await asyncio.to_thread(LocalBroker(folder).start)
    settings = Settings(
        kafka=KafkaSettings(bootstrap_servers=broker.bootstrap_servers, request_timeout_ms=timeout_ms),
        topics=TopicSettings(prefix="t."),
        producer=ProducerSettings(linger_ms=0),
    )
    await make_topic(broker.bootstrap_servers, settings.topic_names.trajectory_groups)
    return broker, settings


async def test_a_broker_that_is_gone_fails_each_group_within_the_request_timeout_and_later_ones_arrive(tmp_path: Path):
    broker, settings = await started(tmp_path, 2000)
    try:
        async with TrajectoryProducer(settings, model_id=MODEL) as producer:
            await producer.send(make_group())
            port = int(broker.bootstrap_servers.rpartition(":")[2])
            await asyncio.to_thread(broker.stop)
            lost = [make_group(group_id=f"lost{i}") for i in range(3)]
            started_at = asyncio.get_running_loop().time()
            outcomes = await asyncio.gather(*[producer.send(group) for group in lost], return_exceptions=True)
            assert asyncio.get_running_loop().time() - started_at < 10
            for group, outcome in zip(lost, outcomes, strict=True):
                assert isinstance(outcome, DeliveryError)
                assert outcome.group_id == group.group_id
                assert outcome.unknown
                assert "did not answer within 2 s" in str(outcome)
            assert producer.buffered_bytes == 0

            broker = await asyncio.to_thread(LocalBroker(tmp_path, port).start)
            again = await arrives(producer)
        records = await read_topic(broker.bootstrap_servers, settings.topic_names.trajectory_groups)
        counts = Counter(header_text(record.headers)["ce_id"] for record in records)
        assert counts[again.group_id] >= 1
        assert max(counts[str(group.group_id)] for group in lost) <= 1, "a group was sent once, so it is there once or not at all"
    finally:
        await asyncio.to_thread(broker.stop)


async def arrives(producer: TrajectoryProducer) -> DeliveryReport:
    """Send one group until it is acknowledged: how a caller rides out an outage."""
    group = make_group(group_id="after")
    for _ in range(10):
        try:
            return await producer.send(group)
        except DeliveryError:
            continue
    pytest.fail("the producer did not recover")


async def test_a_broker_that_hangs_and_goes_on_leaves_every_group_in_the_log_once(tmp_path: Path):
    broker, settings = await started(tmp_path, 20_000)
    try:
        async with TrajectoryProducer(settings, model_id=MODEL) as producer:
            await producer.send(make_group(group_id="first"))
            os.kill(broker.pid, signal.SIGSTOP)
            deliveries = [await producer.submit(make_group(group_id=f"g{i}")) for i in range(20)]
            done, _ = await asyncio.wait(deliveries, timeout=0.5)
            assert not done
            os.kill(broker.pid, signal.SIGCONT)
            reports = await asyncio.gather(*deliveries)
        assert [report.offset for report in reports] == [*range(1, 21)]
    finally:
        await asyncio.to_thread(broker.stop)
