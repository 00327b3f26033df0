"""An engine says again and again that it lives, and takes it back when it ends in order."""

from collections.abc import AsyncIterator
from pathlib import Path

from aiokafka import AIOKafkaConsumer, ConsumerRecord
from tests.gateway.conftest import gateway_settings

from headrace.consumers.subscribers.engine_acks import AckTopic
from headrace.core.kafka import client_options
from headrace.core.topic_admin import apply
from headrace.schemas.envelope import header_text, open_record
from headrace.schemas.weights import EngineAlive, alive_key


async def test_an_engine_lives_until_it_ends(kafka: str, topic_prefix: str, tmp_path: Path) -> None:
    settings = gateway_settings(kafka, topic_prefix, tmp_path)
    await apply(settings)
    options, topic = client_options(settings.kafka, "test"), settings.topic_names.weight_acks
    acks = AckTopic(options, topic, "e", every_seconds=0.01)
    await acks.start()
    async with AIOKafkaConsumer(topic, **options, auto_offset_reset="earliest") as consumer:
        records: AsyncIterator[ConsumerRecord] = aiter(consumer)
        words = [await anext(records) for _ in range(3)]
        await acks.stop()
        while (last := await anext(records)).value is not None:
            words.append(last)
    assert {record.key for record in (*words, last)} == {alive_key("e").encode()}
    said = [open_record(record.value, header_text(record.headers), (EngineAlive,)) for record in words]
    assert all(isinstance(word, EngineAlive) and (word.engine_id, word.every_seconds) == ("e", 0.01) for word in said)
