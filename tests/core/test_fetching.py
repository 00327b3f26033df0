"""Single records by offset, from a real log with what a log has between records."""

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic, RecordsToDelete
from aiokafka.structs import TopicPartition
from tests.unreadable import send_unreadable

from headrace.core.fetching import fetch_offsets
from headrace.core.kafka import client_options
from headrace.core.reading import OffsetLostError
from headrace.core.settings import KafkaSettings


async def topic_with(kafka: str, topic: str, count: int) -> list[int]:
    """Offsets of `count` committed records, one transaction each, with aborted ones between."""
    options = client_options(KafkaSettings(bootstrap_servers=kafka), "test")
    admin = AIOKafkaAdminClient(**options)
    await admin.start()
    await admin.create_topics([NewTopic(topic, 1, 1)])
    await admin.close()
    producer = AIOKafkaProducer(**options, transactional_id=topic)
    await producer.start()
    offsets = []
    for number in range(count):
        async with producer.transaction():
            offsets.append((await producer.send_and_wait(topic, str(number).encode(), partition=0)).offset)
        await producer.begin_transaction()
        await producer.send_and_wait(topic, b"aborted", partition=0)
        await producer.abort_transaction()
    await producer.stop()
    return offsets


async def test_just_the_records_that_were_asked_for_are_read_whatever_stands_between(kafka: str, topic_prefix: str) -> None:
    topic = f"{topic_prefix}log"
    offsets = await topic_with(kafka, topic, 60)  # three or four offsets each: markers and aborted records between
    options = client_options(KafkaSettings(bootstrap_servers=kafka), "test")
    found = await fetch_offsets(options, topic, 0, [offsets[59], offsets[3], offsets[4], offsets[4]])
    assert {offset: record.value for offset, record in found.items()} == {offsets[3]: b"3", offsets[4]: b"4", offsets[59]: b"59"}
    assert await fetch_offsets(options, topic, 0, []) == {}


async def test_offsets_that_are_gone_or_were_never_committed_are_named(kafka: str, topic_prefix: str) -> None:
    topic = f"{topic_prefix}log"
    offsets = await topic_with(kafka, topic, 5)
    options = client_options(KafkaSettings(bootstrap_servers=kafka), "test")
    admin = AIOKafkaAdminClient(**options)
    await admin.start()
    await admin.delete_records({TopicPartition(topic, 0): RecordsToDelete(offsets[2])})
    await admin.close()
    aborted = offsets[3] + 2  # after the commit marker
    with pytest.raises(OffsetLostError, match=f"offsets {offsets[0]}, {offsets[1]}, {aborted}, 99999 are needed.*begins at {offsets[2]}"):
        await fetch_offsets(options, topic, 0, [offsets[0], offsets[1], offsets[2], aborted, 99999])


async def test_a_record_that_the_client_can_not_hand_over_does_not_hide_its_neighbours(kafka: str, topic_prefix: str) -> None:
    topic = f"{topic_prefix}log"
    await topic_with(kafka, topic, 1)
    options = client_options(KafkaSettings(bootstrap_servers=kafka), "test")
    producer = AIOKafkaProducer(**options)
    await producer.start()
    before = (await producer.send_and_wait(topic, b"before", partition=0)).offset
    await send_unreadable(producer, topic, 0, b"m")
    after = (await producer.send_and_wait(topic, b"after", partition=0)).offset
    await producer.stop()
    found = await fetch_offsets(options, topic, 0, [before, after])
    assert [record.value for record in found.values()] == [b"before", b"after"]
