"""Models by command: visible at once, folded over the owner's states, refused with reasons."""

import asyncio
import uuid
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import RecordsToDelete
from pydantic import BaseModel

from headrace.core.kafka import ClientOptions
from headrace.core.lanes import lane_of
from headrace.core.model_views import fold, latest_states
from headrace.core.models import (
    ModelNotReadyError,
    ModelRefusedError,
    UnknownModelError,
    create_model,
    delete_model,
    get_model,
    list_models,
    model_id_of,
    resume_model,
    wait_for_model,
)
from headrace.core.reading import read_to_end
from headrace.core.settings import BaseModelEntry, KafkaSettings, Settings, TopicSettings
from headrace.core.topic_admin import TopicsDifferError, apply, open_admin
from headrace.schemas.envelope import header_text, seal
from headrace.schemas.state import LaneState, ModelState
from headrace.schemas.topics import lane_key
from headrace.schemas.training import ModelSettings

LANES = 2
TINY = ModelSettings(base_model="tiny")


@pytest.fixture
async def settings(kafka: str, topic_prefix: str) -> Settings:
    made = Settings(
        kafka=KafkaSettings(bootstrap_servers=kafka),
        topics=TopicSettings(prefix=topic_prefix, partitions=LANES),
        base_models={"tiny": BaseModelEntry(path="/m/tiny"), "big": BaseModelEntry(path="/m/big", trainable=("lora",))},
    )
    await apply(made)
    return made


async def as_owner(settings: Settings, options: ClientOptions, model_id: str, through: int, **changed: Any) -> None:
    """What a lane's owner writes in one transaction once it has read the commands below `through`."""
    lane = lane_of(model_id, LANES)
    view = await get_model(settings, model_id)
    state = ModelState(
        model_id=model_id,
        incarnation=str(uuid.uuid4()),
        account=view.account,
        project=view.project,
        name=view.name,
        worker_group=view.worker_group,
        settings=view.settings,
        scanned=0,
    ).model_copy(update=changed)
    producer = AIOKafkaProducer(**options, transactional_id=settings.topics.prefix + f"lane-{lane}")
    await producer.start()
    async with producer.transaction():
        records: list[tuple[str, BaseModel]] = [
            (model_id, state),
            (lane_key(lane), LaneState(lane=lane, commands_through=through, partitions=LANES)),
        ]
        for key, record in records:
            value, headers = seal(record, source="test")
            await producer.send_and_wait(settings.topic_names.models, value, key=key.encode(), partition=lane, headers=headers)
    await producer.stop()


def test_ids_depend_on_account_project_and_name_only() -> None:
    known = model_id_of("acme", "maze", "solver")
    assert known == model_id_of("acme", "maze", "solver")
    assert uuid.UUID(known).version == 5
    others = {model_id_of("acme", "maze", "solver2"), model_id_of("acme", "mazesolver", ""), model_id_of("a", "cmemaze", "solver")}
    assert known not in others
    assert len(others) == 3
    # On the wire and in object names: must never change.
    assert known == "6d9b929b-a358-5faa-8b0c-c17f33378eb9"


async def test_a_created_model_shows_at_once_and_its_command_is_in_its_lane(settings: Settings, options: ClientOptions) -> None:
    view = await create_model(settings, project="maze", name="solver", model=TINY)
    assert view.model_id == model_id_of("default", "maze", "solver")
    assert (view.status, view.state, view.worker_group) == ("creating", None, "default")
    assert await get_model(settings, view.model_id) == view
    assert await list_models(settings) == [view]
    (record,) = await read_to_end(options, settings.topic_names.commands)
    assert (record.partition, record.key) == (lane_of(view.model_id, LANES), view.model_id.encode())
    assert view.command == (record.partition, record.offset)
    assert header_text(record.headers)["ce_type"] == "headrace.create-model.v1"


async def test_creating_again_sends_nothing_and_other_settings_are_refused(settings: Settings, options: ClientOptions) -> None:
    first = await create_model(settings, project="maze", name="solver", model=TINY)
    assert await create_model(settings, project="maze", name="solver", model=TINY) == first
    assert len(await read_to_end(options, settings.topic_names.commands)) == 1
    with pytest.raises(ModelRefusedError, match=r"exists with other settings \(seed\)"):
        await create_model(settings, project="maze", name="solver", model=TINY.model_copy(update={"seed": 7}))


async def test_the_owners_state_replaces_the_command(settings: Settings, options: ClientOptions) -> None:
    view = await create_model(settings, project="maze", name="solver", model=TINY)
    assert view.command is not None
    await as_owner(settings, options, view.model_id, view.command[1] + 1, policy_version=4)
    now = await get_model(settings, view.model_id)
    assert (now.status, now.command) == ("active", None)
    assert now.state is not None
    assert now.state.policy_version == 4


async def test_a_command_that_its_owner_has_read_is_not_folded_again(settings: Settings, options: ClientOptions) -> None:
    view = await create_model(settings, project="maze", name="solver", model=TINY)
    deletion = await delete_model(settings, view.model_id)
    assert deletion.command is not None
    await as_owner(settings, options, view.model_id, deletion.command[1] + 1)  # the owner refused it, say
    states, commands = [await read_to_end(options, topic) for topic in (settings.topic_names.models, settings.topic_names.commands)]
    assert len(commands) == 2
    assert fold(latest_states(states), commands)[view.model_id].status == "active"


async def test_commands_that_retention_took_do_not_stop_the_reading(settings: Settings, options: ClientOptions) -> None:
    view = await create_model(settings, project="maze", name="solver", model=TINY)
    assert view.command is not None
    await as_owner(settings, options, view.model_id, view.command[1])  # stands before the command, which is deleted now
    async with open_admin(options) as admin:
        where = TopicPartition(settings.topic_names.commands, view.command[0])
        await admin.delete_records({where: RecordsToDelete(before_offset=view.command[1] + 1)})
    assert (await get_model(settings, view.model_id)).status == "active"


async def test_a_deletion_shows_before_and_after_the_owner_has_read_it(settings: Settings, options: ClientOptions) -> None:
    created = await create_model(settings, project="maze", name="solver", model=TINY)
    assert created.command is not None
    await as_owner(settings, options, created.model_id, created.command[1] + 1)
    deleting = await delete_model(settings, created.model_id)
    assert deleting.status == "deleting"
    assert (await get_model(settings, created.model_id)).status == "deleting"
    assert await delete_model(settings, created.model_id) == await get_model(settings, created.model_id)
    assert deleting.command is not None
    await as_owner(settings, options, created.model_id, deleting.command[1] + 1, status="deleted")
    assert (await get_model(settings, created.model_id)).status == "deleted"
    assert await list_models(settings) == []
    assert [view.status for view in await list_models(settings, deleted=True)] == ["deleted"]
    # Rule 12: creating it again is a new command, not the old model.
    again = await create_model(settings, project="maze", name="solver", model=TINY.model_copy(update={"seed": 7}))
    assert (again.status, again.settings.seed) == ("creating", 7)
    assert again.command is not None
    assert again.command[1] > deleting.command[1]


@pytest.mark.parametrize("status", ["stopped", "diverged"])
async def test_a_model_that_can_not_go_on_is_resumed_by_command_and_only_then(
    settings: Settings, options: ClientOptions, status: str
) -> None:
    created = await create_model(settings, project="maze", name="solver", model=TINY)
    assert created.command is not None
    with pytest.raises(ModelRefusedError, match="is creating: only one that is stopped or diverged can be resumed"):
        await resume_model(settings, created.model_id)
    await as_owner(settings, options, created.model_id, created.command[1] + 1, status="diverged", status_detail="step 3 differs")
    resuming = await resume_model(settings, created.model_id)
    assert resuming.status == (await get_model(settings, created.model_id)).status == "resuming"
    assert (await resume_model(settings, created.model_id)).command == resuming.command, "a command that nobody has read is not repeated"
    assert resuming.command is not None
    waiting = asyncio.create_task(wait_for_model(settings, resuming, 30))
    await as_owner(settings, options, created.model_id, resuming.command[1], status="diverged")  # has not read it yet
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(waiting), 0.5)
    # It has taken the command up, and runs what it can of the steps again.
    await as_owner(settings, options, created.model_id, resuming.command[1] + 1, status="active", rebasing="step 3 differs")
    with pytest.raises(ModelNotReadyError, match=r"a worker has taken up solver .* and is not done within 0.5 s"):
        await wait_for_model(settings, resuming, 0.5)
    assert not waiting.done()
    await as_owner(settings, options, created.model_id, resuming.command[1] + 1, status="active")
    assert (await asyncio.wait_for(waiting, 10)).status == "active"
    with pytest.raises(ModelRefusedError, match="is active"):
        await resume_model(settings, created.model_id)


async def test_models_are_listed_by_project_and_account(settings: Settings) -> None:
    for account, project, name in [("b", "p", "n"), ("a", "q", "n"), ("a", "p", "z"), ("a", "p", "m")]:
        await create_model(settings, account=account, project=project, name=name, model=TINY)
    assert [(v.account, v.project, v.name) for v in await list_models(settings)] == [
        ("a", "p", "m"),
        ("a", "p", "z"),
        ("a", "q", "n"),
        ("b", "p", "n"),
    ]
    assert [v.name for v in await list_models(settings, account="a", project="p")] == ["m", "z"]


async def test_waiting_ends_with_the_owners_state_and_not_before(settings: Settings, options: ClientOptions) -> None:
    view = await create_model(settings, project="maze", name="solver", model=TINY)
    assert view.command is not None
    waiting = asyncio.create_task(wait_for_model(settings, view, 30))
    await as_owner(settings, options, view.model_id, view.command[1])  # has not read that command yet
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(waiting), 0.7)
    await as_owner(settings, options, view.model_id, view.command[1] + 1, status="stopped", status_detail="no such folder")
    done = await asyncio.wait_for(waiting, 10)
    assert (done.status, done.status_detail) == ("stopped", "no such folder")


async def test_waiting_without_a_worker_says_what_is_missing(settings: Settings) -> None:
    view = await create_model(settings, project="maze", name="solver", model=TINY)
    with pytest.raises(ModelNotReadyError, match=r"no worker has taken up solver .*group 'default' running \(`headrace worker`\)"):
        await wait_for_model(settings, view, 0.5)


async def test_an_unknown_base_model_is_refused_with_the_names_there_are(settings: Settings, options: ClientOptions) -> None:
    with pytest.raises(ModelRefusedError, match=r"base_model: 'huge' is not in the catalogue; there are big, tiny"):
        await create_model(settings, project="p", name="n", model=ModelSettings(base_model="huge"))
    with pytest.raises(ModelRefusedError, match=r"adaptation: 'big' can be trained as lora, not full"):
        await create_model(settings, project="p", name="n", model=ModelSettings(base_model="big", adaptation="full"))
    with pytest.raises(ModelRefusedError, match="there are none: name some under base_models"):
        await create_model(settings.model_copy(update={"base_models": {}}), project="p", name="n", model=TINY)
    assert await read_to_end(options, settings.topic_names.commands) == []


@pytest.mark.parametrize("name", ["", " x", "x" * 129, "a\nb"])
async def test_names_that_no_one_could_type_are_refused(settings: Settings, name: str) -> None:
    with pytest.raises(ModelRefusedError, match=r"name: .*1 to 128 printable"):
        await create_model(settings, project="p", name=name, model=TINY)


async def test_an_unknown_model_and_missing_topics_are_said(settings: Settings) -> None:
    with pytest.raises(UnknownModelError, match="no model nobody"):
        await get_model(settings, "nobody")
    with pytest.raises(UnknownModelError):
        await delete_model(settings, "nobody")
    elsewhere = settings.model_copy(update={"topics": TopicSettings(prefix=settings.topics.prefix + "x.")})
    with pytest.raises(TopicsDifferError, match="headrace topics apply"):
        await list_models(elsewhere)


async def test_a_command_that_cannot_be_read_hides_no_other(settings: Settings, options: ClientOptions) -> None:
    producer = AIOKafkaProducer(**options)
    await producer.start()
    for lane in range(LANES):
        await producer.send_and_wait(settings.topic_names.commands, b"not json", key=b"x", partition=lane)
        await producer.send_and_wait(settings.topic_names.commands, None, key=b"x", partition=lane)
    await producer.stop()
    view = await create_model(settings, project="p", name="n", model=TINY)
    assert await list_models(settings) == [view]
