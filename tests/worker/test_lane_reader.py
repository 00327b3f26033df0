"""A lane's reader next to a record that aiokafka can't hand over."""

from aiokafka import AIOKafkaProducer
from tests.unreadable import send_unreadable

from headrace.consumers.worker.reader import LaneReader
from headrace.core.kafka import client_options
from headrace.core.lanes import lane_of
from headrace.core.models import create_model
from headrace.core.polling import UnreadableRecord
from headrace.core.settings import KafkaSettings, Settings, TopicSettings
from headrace.core.topic_admin import apply
from headrace.schemas.training import ModelSettings


async def test_no_command_is_lost_that_came_with_a_record_which_can_not_be_read(kafka: str, topic_prefix: str) -> None:
    settings = Settings(
        kafka=KafkaSettings(bootstrap_servers=kafka),
        topics=TopicSettings(prefix=topic_prefix, partitions=1),
        base_models={"tiny": {"path": "/nowhere"}},  # type: ignore[arg-type]
    )
    await apply(settings)
    options = client_options(settings.kafka, "test")
    for i in range(3):
        model = await create_model(settings, project="p", name=f"m{i}", model=ModelSettings(base_model="tiny"))
    lane = lane_of(model.model_id, 1)
    async with AIOKafkaProducer(**options) as producer:
        offset = await send_unreadable(producer, settings.topic_names.trajectory_groups, lane, model.model_id.encode())
    reader = LaneReader(options, settings.topic_names, lane)
    assert await reader.start(0, 0) == 0
    try:
        commands, groups = [], []
        while len(groups) < 1 or len(commands) < 3:
            more = await reader.read()
            commands += more[0]
            groups += more[1]
    finally:
        await reader.stop()
    assert [record.offset for record in commands] == [0, 1, 2]
    assert [(type(record), record.offset) for record in groups] == [(UnreadableRecord, offset)]
