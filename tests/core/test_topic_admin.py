"""Topics are created as specified, reconciled, and never given another partition count."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.admin.new_partitions import NewPartitions
from tests.core.conftest import MakeTopic

from headrace.core.kafka import ClientOptions
from headrace.core.settings import KafkaSettings, Settings, TopicSettings
from headrace.core.topic_admin import (
    ConfigDifference,
    TopicsDifferError,
    apply,
    lane_count,
    open_admin,
    partition_counts,
    retention_ms,
    show,
)
from headrace.schemas.topics import TOPICS


@pytest.fixture
def settings(kafka: str, topic_prefix: str) -> Settings:
    return Settings(kafka=KafkaSettings(bootstrap_servers=kafka), topics=TopicSettings(prefix=topic_prefix, partitions=3))


async def set_config(admin: AIOKafkaAdminClient, topic: str, values: dict[str, str]) -> None:
    await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, values)])


async def config_of(admin: AIOKafkaAdminClient, topic: str) -> dict[str, str]:
    (answer,) = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)])
    return {entry[0]: entry[1] for entry in answer.resources[0][4]}


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Brokers hear of what the controller did a little later."""
    async with asyncio.timeout(10):
        while not await condition():  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.02)


async def test_creates_every_topic_with_its_partitions_and_settings(settings: Settings, options: ClientOptions) -> None:
    assert {report.state for report in await show(settings)} == {"missing"}
    assert {report.state for report in await apply(settings)} == {"missing"}
    counts = await partition_counts(options)
    async with open_admin(options) as admin:
        for spec in TOPICS:
            topic = settings.topic_names.full(spec.name)
            assert counts[topic] == 3
            config = await config_of(admin, topic)
            assert {key: config[key] for key in spec.config} == dict(spec.config)
    assert {report.state for report in await show(settings)} == {"equal"}
    assert await lane_count(options, settings.topic_names) == 3


async def test_a_second_apply_changes_nothing(settings: Settings) -> None:
    await apply(settings)
    assert [(report.state, report.differences) for report in await apply(settings)] == [("equal", ())] * len(TOPICS)


async def test_a_changed_setting_is_reported_and_put_right_and_foreign_settings_stay(settings: Settings, options: ClientOptions) -> None:
    await apply(settings)
    async with open_admin(options) as admin:
        await set_config(admin, settings.topic_names.models, {"cleanup.policy": "delete", "max.message.bytes": "2000000"})

        async def changed() -> bool:
            return (await config_of(admin, settings.topic_names.models))["cleanup.policy"] == "delete"

        await until(changed)
        (report,) = [report for report in await apply(settings) if report.state == "differs"]
        assert report.topic == settings.topic_names.models
        assert ConfigDifference(name="cleanup.policy", found="delete", wanted="compact") in report.differences
        config = await config_of(admin, settings.topic_names.models)
    assert config["cleanup.policy"] == "compact"
    assert config["segment.bytes"] == str(16 * 1024 * 1024)
    assert config["max.message.bytes"] == "2000000"
    assert {report.state for report in await show(settings)} == {"equal"}


async def test_another_partition_count_is_an_error_and_nothing_is_changed(settings: Settings, options: ClientOptions) -> None:
    async with open_admin(options) as admin:
        await admin.create_topics([NewTopic(settings.topic_names.steps, 5, 1)])

    async def there() -> bool:
        return settings.topic_names.steps in await partition_counts(options)

    await until(there)
    with pytest.raises(TopicsDifferError, match=rf"topics\.partitions is 3, but {settings.topic_names.steps} has 5"):
        await apply(settings)
    ours = {name for name in await partition_counts(options) if name.startswith(settings.topics.prefix)}
    assert ours == {settings.topic_names.steps}
    assert (await partition_counts(options))[settings.topic_names.steps] == 5


async def test_lanes_of_different_counts_and_missing_ones_are_named(settings: Settings, options: ClientOptions) -> None:
    with pytest.raises(TopicsDifferError, match=rf"lacks the topics .*{settings.topic_names.steps}.*headrace topics apply"):
        await lane_count(options, settings.topic_names)
    await apply(settings)
    async with open_admin(options) as admin:
        await admin.create_partitions({settings.topic_names.weights: NewPartitions(4)})

    async def grown() -> bool:
        return (await partition_counts(options))[settings.topic_names.weights] == 4

    await until(grown)
    with pytest.raises(TopicsDifferError, match=rf"one partition count, found .*{settings.topic_names.weights}: 4"):
        await lane_count(options, settings.topic_names)


async def test_two_at_once_end_with_the_same_topics(settings: Settings) -> None:
    await asyncio.gather(apply(settings), apply(settings))
    assert {report.state for report in await show(settings)} == {"equal"}


async def test_a_replication_that_the_cluster_cannot_give_is_said(settings: Settings) -> None:
    topics = settings.topics.model_copy(update={"replication_factor": 3})
    with pytest.raises(TopicsDifferError, match=r"(?i)creating .*replication"):
        await apply(settings.model_copy(update={"topics": topics}))


async def test_retention_is_read_from_the_broker_and_none_means_for_ever(options: ClientOptions, make_topic: MakeTopic) -> None:
    assert await retention_ms(options, await make_topic("short", config={"retention.ms": "120000"})) == 120_000
    assert await retention_ms(options, await make_topic("kept", config={"retention.ms": "-1"})) is None
    assert await retention_ms(options, await make_topic("default")) == 7 * 24 * 3600 * 1000, "the broker's default"
    with pytest.raises(TopicsDifferError, match="reading the settings of"):
        await retention_ms(options, "no-such-topic")
