"""A producer is told its model by id or by name, and an unknown one is refused before anything is sent."""

import pytest
from tests.producers.conftest import MODEL, ReadAll, make_group

from headrace.core.models import ModelView, UnknownModelError, create_model
from headrace.core.settings import BaseModelEntry, KafkaSettings, Settings, TopicSettings
from headrace.core.topic_admin import apply
from headrace.producers import SyncTrajectoryProducer, TrajectoryProducer
from headrace.schemas.training import ModelSettings


@pytest.fixture
async def site(kafka: str, topic_prefix: str) -> Settings:
    """All topics."""
    settings = Settings(
        kafka=KafkaSettings(bootstrap_servers=kafka),
        topics=TopicSettings(prefix=topic_prefix, partitions=4),
        base_models={"tiny": BaseModelEntry(path="/none")},
    )
    await apply(settings)
    return settings


async def made(site: Settings, name: str = "my-agent") -> ModelView:
    return await create_model(site, project="p", name=name, model=ModelSettings(base_model="tiny"))


async def test_groups_for_a_name_go_to_the_model_that_was_created_a_moment_ago(site: Settings, read_all: ReadAll) -> None:
    model, other = await made(site), await made(site, "other")
    async with TrajectoryProducer(site, model_id="my-agent") as producer:
        await producer.send(make_group())
        await producer.send(make_group(), "p/other")
        await producer.try_send(make_group(), "default/p/other")
        await producer.submit_job([make_group()], model_id="other")
    keys = [record.key.decode() for record in await read_all() if record.key is not None]
    assert sorted(keys) == sorted([model.model_id] + [other.model_id] * 4)


async def test_an_unknown_model_is_refused_at_the_start_or_the_first_send_and_nothing_is_sent(site: Settings, read_all: ReadAll) -> None:
    await made(site)
    for unknown in ("my-agnet", MODEL):
        with pytest.raises(UnknownModelError, match=f"there is no model '{unknown}'.*p/my-agent"):
            await TrajectoryProducer(site, model_id=unknown).start()
        async with TrajectoryProducer(site) as producer:
            with pytest.raises(UnknownModelError):
                await producer.send(make_group(), unknown)
            with pytest.raises(UnknownModelError):
                await producer.try_send(make_group(), unknown)
            with pytest.raises(UnknownModelError):
                await producer.submit_job([make_group()], model_id=unknown)
            assert producer.buffered_bytes == 0
    assert await read_all() == []


async def test_the_blocking_producer_refuses_an_unknown_model_at_its_start(site: Settings) -> None:
    with pytest.raises(UnknownModelError, match="there is no model 'nobody'"):
        SyncTrajectoryProducer(site, model_id="nobody").start()


async def test_a_producer_that_sees_no_models_sends_by_id_and_says_that_it_needs_one(producer_settings: Settings) -> None:
    async with TrajectoryProducer(producer_settings, model_id=MODEL) as producer:
        await producer.send(make_group())
    with pytest.raises(UnknownModelError, match="model 'my-agent' can't be looked up by its name: give its id"):
        await TrajectoryProducer(producer_settings, model_id="my-agent").start()
