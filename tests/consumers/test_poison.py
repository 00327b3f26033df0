"""Who follows the topics, and who claims a lane, where somebody has written anything at all."""

import asyncio
from contextlib import suppress

import pytest
from tests.core.ledgers import record
from tests.poison import send_record, write_poison

from headrace.consumers.subscribers.events import Events
from headrace.consumers.worker.claim import UnreadableStateError, read_states
from headrace.core.kafka import client_options
from headrace.core.lanes import lane_of
from headrace.core.models import create_model
from headrace.core.settings import BaseModelEntry, Settings
from headrace.engine.serving.model_watch import ModelWatch
from headrace.schemas import topics
from headrace.schemas.carried import CARRIED
from headrace.schemas.envelope import type_of
from headrace.schemas.state import LaneState, ModelState, StepRecord
from headrace.schemas.topics import lane_key
from headrace.schemas.training import ModelSettings
from headrace.schemas.weights import WeightsPublished

SOON = 30.0
LANES = 3
READ_BY_ENGINES = {topics.MODELS, topics.COMMANDS, topics.WEIGHTS, topics.GATEWAY}


def all_but(*names: str) -> set[str]:
    return CARRIED.keys() - set(names)


@pytest.fixture
def with_base(settings: Settings) -> Settings:
    return settings.model_copy(update={"base_models": {"tiny": BaseModelEntry(path="/nowhere")}})


async def taken_up(settings: Settings) -> ModelState:
    """A model, as its owner has written it."""
    view = await create_model(settings, project="p", name="n", model=ModelSettings(base_model="tiny"))
    lane = lane_of(view.model_id, LANES)
    assert view.command is not None
    state = ModelState(
        model_id=view.model_id,
        incarnation="i",
        account=view.account,
        project=view.project,
        name=view.name,
        worker_group="default",
        settings=view.settings,
        scanned=7,
    )
    await send_record(settings, state, partition=lane)
    await send_record(settings, LaneState(lane=lane, partitions=LANES, commands_through=view.command[1] + 1, scanned=9), partition=lane)
    return state


def version(model_id: str, number: int) -> WeightsPublished:
    return WeightsPublished(
        model_id=model_id,
        incarnation="i",
        policy_version=number,
        base_model="tiny",
        format="full",
        uri=f"file:///nowhere/{number}",
        digest="0" * 64,
        files=(),
    )


async def test_an_engine_follows_its_models_whatever_stands_between(with_base: Settings) -> None:
    model = await taken_up(with_base)
    lane = lane_of(model.model_id, LANES)
    await send_record(with_base, version(model.model_id, 1), partition=lane)
    watch = ModelWatch(with_base, "tiny", client_id="test")
    following = asyncio.create_task(watch.run())
    try:
        await write_poison(with_base, [model.model_id, lane_key(lane)], but=all_but(*READ_BY_ENGINES))
        for number in (2, 3):  # once while it follows, and once from the beginning
            await send_record(with_base, version(model.model_id, number), partition=lane)
            async with asyncio.timeout(SOON):
                while True:
                    await watch.changed.wait()
                    watch.changed.clear()
                    found = watch.followed().get(model.model_id)
                    if found is not None and found.published is not None and found.published.policy_version == number:
                        break
            assert watch.followed().keys() == {model.model_id}
            assert found.incarnation == "i"
            following.cancel()
            watch = ModelWatch(with_base, "tiny", client_id="test")
            following = asyncio.create_task(watch.run())
    finally:
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following


@pytest.mark.parametrize("group_id", [None, "g"])
async def test_subscribers_hear_what_is_ours_whatever_stands_between(settings: Settings, topic_prefix: str, group_id: str | None) -> None:
    await write_poison(settings, ["m"], but=all_but(topics.WEIGHTS, topics.STEPS))
    await send_record(settings, version("m", 1), partition=0)
    await send_record(settings, record(1, model_id="m"), partition=0)
    events = Events(settings)
    heard: asyncio.Queue[object] = asyncio.Queue()
    for kind in (WeightsPublished, StepRecord):
        events.subscriber(kind, group_id=group_id and topic_prefix + group_id, from_beginning=True)(heard.put)
    async with events, asyncio.timeout(SOON):
        assert {type(await heard.get()) for _ in range(2)} == {WeightsPublished, StepRecord}


async def test_a_lane_is_claimed_with_what_its_owner_wrote(with_base: Settings) -> None:
    model = await taken_up(with_base)
    lane = lane_of(model.model_id, LANES)
    options, names = client_options(with_base.kafka, "test"), with_base.topic_names
    before = await read_states(options, names, lane, names.trajectory_groups)
    assert before.models == {model.model_id: model}
    await write_poison(with_base, [model.model_id, lane_key(lane)], claimed=False, but=all_but(topics.MODELS))
    after = await read_states(options, names, lane, names.trajectory_groups)
    assert (after.lane, after.models) == (before.lane, before.models)


async def test_a_state_that_a_newer_release_may_have_written_refuses_the_lane(with_base: Settings) -> None:
    model = await taken_up(with_base)
    lane = lane_of(model.model_id, LANES)
    newer = type_of(ModelState).removesuffix("1").encode() + b"2"
    offset = await send_record(with_base, model, partition=lane, headers=[("ce_type", newer)])
    options, names = client_options(with_base.kafka, "test"), with_base.topic_names
    with pytest.raises(UnreadableStateError, match=f"{names.models} partition {lane} offset {offset} can't be read.*run the release that"):
        await read_states(options, names, lane, names.trajectory_groups)
