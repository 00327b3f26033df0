"""Rule 18: a shadow trains on another worker group's records with settings of its own, and that group does not notice.

The tests with workers share one of each kind; those without are about what is refused, and where commands go.
"""

import asyncio
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import pytest
from aiokafka import AIOKafkaProducer, ConsumerRecord, TopicPartition
from pydantic import ValidationError
from tests.worker.conftest import WorkerProcess, environment_of, following, learner
from tests.worker.groups import group
from tests.worker.test_selection import members, sequence
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.consumers.subscribers.weight_feed import WeightFeed
from headrace.consumers.worker.claim import GroupsTopicChangedError, read_states
from headrace.consumers.worker.commands import CommandHandler
from headrace.consumers.worker.lane_models import LaneModels
from headrace.consumers.worker.selection import judge
from headrace.core.errors import HeadraceError
from headrace.core.jobs import ask
from headrace.core.kafka import client_options
from headrace.core.lanes import lane_of
from headrace.core.model_views import open_state
from headrace.core.models import ModelRefusedError, create_model, delete_model, get_model, model_id_of, wait_for_model
from headrace.core.reading import end_offsets, latest_by_key, read_to_end
from headrace.core.settings import BaseModelEntry, KafkaSettings, Settings, TopicSettings, WorkerSettings
from headrace.core.topic_admin import TopicsDifferError, apply, lane_count, open_admin
from headrace.producers import TrajectoryProducer
from headrace.schemas.commands import Command, CreateModel, DeleteModel, ResumeModel
from headrace.schemas.envelope import header_text, seal
from headrace.schemas.events import GroupRejected, StepCompleted
from headrace.schemas.jobs import JobDocument, JobState
from headrace.schemas.state import LaneState, ModelState, StepRecord
from headrace.schemas.topics import TOPICS, TRAJECTORY_GROUPS, lane_key
from headrace.schemas.training import ModelSettings
from headrace.schemas.weights import WeightsPublished
from headrace.trainer.groups import TokenizedGroup

LANES = 2
TINY = ModelSettings(base_model="tiny")


def shadow_settings(first: Settings, prefix: str, folder: Path) -> Settings:
    """Settings of a group that shadows another one."""
    topics = first.topics.model_copy(update={"prefix": prefix})
    worker = first.worker.model_copy(
        update={"group": "trial", "shadow_prefix": first.topics.prefix, "work_dir": folder / "shadow", "settle_seconds": 600.0}
    )
    return first.model_copy(update={"topics": topics, "worker": worker})


def name_off_lane(source: str, stem: str) -> str:
    """A name whose own id hashes to another lane than the model that it is to shadow."""
    home = lane_of(source, LANES)
    return next(name for i in range(1000) if lane_of(model_id_of("default", "tests", name := f"{stem}-{i}"), LANES) != home)


# Without a worker.


def test_a_shadow_prefix_that_is_the_own_one_is_refused() -> None:
    for own, shadowed in (("a.", "a."), ("a.", "a-"), ("headrace.", "")):
        with pytest.raises(ValidationError, match=r"worker.shadow_prefix=.* and topics.prefix=.* are the same"):
            Settings(topics=TopicSettings(prefix=own), worker=WorkerSettings(shadow_prefix=shadowed))
    fine = Settings(topics=TopicSettings(prefix="a.b."), worker=WorkerSettings(shadow_prefix="a."))
    assert (fine.groups_topic, fine.topic_names.steps, fine.worker_group_id) == ("a.trajectory-groups", "a.b.steps", "a.b-default")


def test_versions_of_the_other_model_are_not_judged_and_give_no_lag() -> None:
    settings = TINY.model_copy(update={"max_policy_lag": 1})
    versions = np.array([-1, 5, 5, 9], np.int32)
    told = members("g", 9, 0, 2)
    first = replace(told.trajectories[0], sequences=(replace(sequence(), policy_versions=versions),))
    told = TokenizedGroup(group_id="g", trajectories=(first, *told.trajectories[1:]))
    assert [each.index for each in judge(settings, 2, told).lost] == [0, 1]
    verdict = judge(settings, 2, told, shadow=True)
    assert (verdict.lost, verdict.refusal, len(verdict.group.trajectories)) == ((), None, 3)
    assert {(t.initial_policy_version, t.final_policy_version) for t in verdict.group.trajectories} == {(None, None)}
    assert all(s.policy_versions is None for t in verdict.group.trajectories for s in t.sequences)


def test_a_producer_with_a_shadows_settings_is_refused() -> None:
    settings = Settings(topics=TopicSettings(prefix="trial."), worker=WorkerSettings(shadow_prefix="headrace."))
    with pytest.raises(HeadraceError, match=r"no one reads trial.trajectory-groups.*topics.prefix 'headrace.'"):
        TrajectoryProducer(settings)


class Commands:
    """One lane's commands, as they come to its owner."""

    def __init__(self, settings: Settings, lane: int) -> None:
        self.book = LaneModels(state=LaneState(lane=lane, partitions=LANES), position=7)
        self._handler = CommandHandler(settings, self.book)

    def apply(self, command: Command) -> None:
        """The next one."""
        value, headers = seal(command, source="test")
        record = ConsumerRecord(
            "commands", self.book.state.lane, self.book.state.commands_through, 0, 0, command.model_id.encode(), value, None, 0, 0, headers
        )
        self._handler.apply([record])

    def status(self, model_id: str) -> tuple[str, str]:
        """And its reason."""
        run = self.book.models[model_id]
        return run.status, run.draft.status_detail or ""


def creation(model_id: str, group: str, shadow_of: str | None) -> CreateModel:
    return CreateModel(model_id=model_id, account="a", project="p", name=model_id, settings=TINY, worker_group=group, shadow_of=shadow_of)


@pytest.fixture
def plain(tiny_model: Path) -> Settings:
    return Settings(base_models={"tiny": BaseModelEntry(path=str(tiny_model))})


def test_a_model_that_does_not_fit_its_group_is_stopped_with_what_to_do(plain: Settings, tmp_path: Path) -> None:
    shadowing = shadow_settings(plain, "trial.", tmp_path)
    ordinary = Commands(plain, lane_of("source", LANES))
    ordinary.apply(creation("s", "default", "source"))
    status, why = ordinary.status("s")
    assert (status, "create it with the settings of a worker group that has worker.shadow_prefix" in why) == ("stopped", True)
    shadows = Commands(shadowing, lane_of("m", LANES))
    shadows.apply(creation("m", "trial", None))
    status, why = shadows.status("m")
    assert (status, "create it with --shadow-of" in why) == ("stopped", True)
    shadows.apply(ResumeModel(model_id="m"))
    assert shadows.status("m")[0] == "stopped"
    assert not ordinary.book.dead_letters + shadows.book.dead_letters


def test_a_second_shadow_of_one_model_in_a_group_waits_until_the_first_is_gone(plain: Settings, tmp_path: Path) -> None:
    lane = Commands(shadow_settings(plain, "trial.", tmp_path), lane_of("source", LANES))
    away = next(name for i in range(100) if lane_of(name := f"s{i}", LANES) != lane_of("source", LANES))
    lane.apply(creation(away, "trial", "source"))
    lane.apply(creation("second", "trial", "source"))
    assert lane.status(away)[0] == "active"
    status, why = lane.status("second")
    assert (status, f"{away} ({away}) shadows source in this worker group already" in why) == ("stopped", True)
    lane.apply(ResumeModel(model_id="second"))
    assert lane.status("second")[0] == "stopped"
    lane.apply(DeleteModel(model_id=away))
    lane.apply(ResumeModel(model_id="second"))
    assert (lane.status(away)[0], lane.status("second")[0]) == ("deleted", "active")
    assert not lane.book.dead_letters, "a shadow's commands are on the lane of the model that it shadows"
    assert lane.book.models["second"].state.scanned == 7


@pytest.fixture
def two(kafka: str, topic_prefix: str, tmp_path: Path) -> tuple[Settings, Settings]:
    """A group and one that shadows it, with topics and without workers."""
    first = Settings(
        kafka=KafkaSettings(bootstrap_servers=kafka),
        topics=TopicSettings(prefix=topic_prefix, partitions=LANES),
        base_models={"tiny": BaseModelEntry(path="/m/tiny")},
    )
    shadow = shadow_settings(first, f"trial-{topic_prefix}", tmp_path)
    for settings in (first, shadow):
        asyncio.run(apply(settings))
    return first, shadow


async def test_commands_for_a_shadow_go_to_the_lane_of_the_model_that_it_shadows(two: tuple[Settings, Settings]) -> None:
    first, shadow = two
    source = await create_model(first, project="tests", name="source", model=TINY)
    name = name_off_lane(source.model_id, "shadow")
    made = await create_model(shadow, project="tests", name=name, model=TINY, shadow_of=source.model_id)
    assert (made.shadow_of, made.status) == (source.model_id, "creating")
    assert await get_model(shadow, made.model_id) == made
    assert await create_model(shadow, project="tests", name=name, model=TINY, shadow_of=source.model_id) == made
    assert (await ask(shadow, "cancel", "j", model_id=made.model_id)).shadow_of == source.model_id
    assert (await delete_model(shadow, made.model_id)).status == "deleting"
    options = client_options(shadow.kafka, "test")
    home = lane_of(source.model_id, LANES)
    sent = await read_to_end(options, shadow.topic_names.commands)
    assert [(record.partition, record.key) for record in sent] == [(home, made.model_id.encode())] * 3
    # An id stays on one lane, also after a deletion.
    other = await create_model(first, project="tests", name=name_off_lane(made.model_id, "other"), model=TINY)
    with pytest.raises(ModelRefusedError, match=f"is a shadow of {source.model_id}: take another name"):
        await create_model(shadow, project="tests", name=name, model=TINY, shadow_of=other.model_id)
    feed = WeightFeed(options, shadow.topic_names, model_id=made.model_id, deployment=None, shadows=True)
    assert home in await feed.partitions()


async def test_what_can_not_be_shadowed_is_refused_at_the_door(two: tuple[Settings, Settings]) -> None:
    first, shadow = two
    source = await create_model(first, project="tests", name="source", model=TINY)
    await create_model(first, project="tests", name="taken", model=TINY)
    gone = await create_model(first, project="tests", name="gone", model=TINY)
    await delete_model(first, gone.model_id)
    cases: list[tuple[Settings, str, str | None, str]] = [
        (first, "s", source.model_id, "this configuration shadows no worker group: set worker.shadow_prefix"),
        (shadow, "s", None, "say which with --shadow-of"),
        (shadow, "s", gone.model_id, "or it was deleted; there are: tests/source, tests/taken"),
        (shadow, "source", source.model_id, "give the shadow a name of its own"),
        (shadow, "taken", source.model_id, "give the shadow a name of its own"),
    ]
    for settings, name, shadow_of, message in cases:
        with pytest.raises(ModelRefusedError, match=message):
            await create_model(settings, project="tests", name=name, model=TINY, shadow_of=shadow_of)
    assert await read_to_end(client_options(shadow.kafka, "test"), shadow.topic_names.commands) == []


async def test_other_lanes_than_those_of_the_group_that_is_shadowed_are_refused(two: tuple[Settings, Settings]) -> None:
    first, shadow = two
    options = client_options(first.kafka, "test")
    assert await lane_count(options, shadow.topic_names, shadow.groups_topic) == LANES
    other = first.model_copy(update={"topics": TopicSettings(prefix=f"other-{first.topics.prefix}", partitions=LANES + 1)})
    await apply(other)
    with pytest.raises(TopicsDifferError, match=f"{other.topic_names.trajectory_groups}: {LANES + 1}"):
        await lane_count(options, shadow.topic_names, other.topic_names.trajectory_groups)
    with pytest.raises(TopicsDifferError, match=r"lacks the topics nowhere.*worker.shadow_prefix"):
        await lane_count(options, shadow.topic_names, "nowhere.trajectory-groups")


async def test_a_lane_whose_offsets_are_of_another_topic_is_not_claimed(two: tuple[Settings, Settings]) -> None:
    _, shadow = two
    options, topics = client_options(shadow.kafka, "test"), shadow.topic_names
    assert (await read_states(options, topics, 0, shadow.groups_topic)).lane.groups_topic == shadow.groups_topic
    value, headers = seal(LaneState(lane=0, partitions=LANES, scanned=9, groups_topic=shadow.groups_topic), source="test")
    producer = AIOKafkaProducer(**options)
    await producer.start()
    await producer.send_and_wait(topics.models, value, key=lane_key(0).encode(), partition=0, headers=headers)
    await producer.stop()
    assert (await read_states(options, topics, 0, shadow.groups_topic)).lane.scanned == 9
    with pytest.raises(GroupsTopicChangedError, match=f"trained on {shadow.groups_topic}, and .* says {topics.prefix}"):
        await read_states(options, topics, 0, topics.trajectory_groups)


# With workers.


class Shadow:
    """A shadow's worker, started and killed as a test needs it."""

    def __init__(self, settings: Settings, log: Path) -> None:
        self.settings = settings
        self._log = log
        self._worker: WorkerProcess | None = None

    def run(self) -> None:
        """Have one run."""
        if self._worker is None:
            self._worker = WorkerProcess(self.settings, self._log)

    def kill(self) -> None:
        """SIGKILL."""
        if self._worker is not None:
            self._worker.kill()
            self._worker.close()
            self._worker = None

    def end(self) -> None:
        """In order."""
        if self._worker is not None:
            self._worker.close()

    def say(self) -> str:
        """Its log."""
        return self._log.read_text()[-6000:] if self._log.exists() else ""


@pytest.fixture(scope="module")
def trial(shared: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shadow]:
    folder = tmp_path_factory.mktemp("shadow")
    settings = shadow_settings(shared, f"trial{uuid.uuid4().hex[:8]}.", folder)
    asyncio.run(apply(settings))
    found = Shadow(settings, folder / "worker.log")
    yield found
    found.end()
    print(found.say())  # noqa: T201 - pytest shows it with a failure


async def written(settings: Settings) -> dict[str, dict[int, int]]:
    """The ends of a prefix's topics: what anybody wrote, transactions and their markers included.

    But for `models`, where an idle owner notes a snapshot.
    """
    options, topics = client_options(settings.kafka, "test"), settings.topic_names
    names = [topics.full(spec.name) for spec in TOPICS]
    return {name: await end_offsets(options, name) for name in names if name != topics.models}


async def marks(settings: Settings) -> dict[TopicPartition, int]:
    """What the lanes of a worker group say that they need from, by their own records."""
    states = latest_by_key(await read_to_end(client_options(settings.kafka, "test"), settings.topic_names.models))
    lanes = [found for record in states.values() if isinstance(found := open_state(record), LaneState)]
    return {TopicPartition(str(lane.groups_topic), lane.lane): lane.mark for lane in lanes}


async def committed(settings: Settings) -> dict[TopicPartition, int]:
    """What a worker group has committed as a consumer group."""
    async with open_admin(client_options(settings.kafka, "test")) as admin:
        found = await admin.list_consumer_group_offsets(settings.worker_group_id)
    return {place: meta.offset for place, meta in found.items()}


async def litter(settings: Settings, model_id: str) -> int:
    """Records that nobody can train on, for the first group's dead letters; how many."""
    topic, home = settings.topic_names.trajectory_groups, lane_of(model_id, LANES)
    body = group("litter").model_dump_json().encode()
    kind = [("ce_type", b"headrace.trajectory-group.v1")]
    sent: list[tuple[bytes | None, bytes, int, list[tuple[str, bytes]]]] = [
        (None, body, home, kind),
        (model_id.encode(), b"{", home, kind),
        (model_id.encode(), body, 1 - home, kind),
        (next(name for i in range(100) if lane_of(name := f"nobody-{i}", LANES) == home).encode(), body, home, kind),
    ]
    producer = AIOKafkaProducer(**client_options(settings.kafka, "test"))
    await producer.start()
    for key, value, lane, headers in sent:
        await producer.send_and_wait(topic, value, key=key, partition=lane, headers=headers)
    await producer.stop()
    return len(sent)


async def test_isolated_shadow_a_shadow_trains_on_the_same_groups_and_the_group_that_it_shadows_does_not_notice(
    shared: Settings, trial: Shadow
) -> None:
    source = await learner(shared, "shadowed", max_policy_lag=2)
    name = name_off_lane(source.model_id, "shadow")
    settings = source.settings.model_copy(update={"batch": source.settings.batch.model_copy(update={"groups_per_step": 4})})
    shadow = await create_model(trial.settings, project="tests", name=name, model=settings, shadow_of=source.model_id)
    async with (
        following(shared) as first,
        following(trial.settings) as seen,
        TrajectoryProducer(shared, model_id=source.model_id) as producer,
    ):
        async with following(shared, source.model_id) as own:
            places = [(await producer.send(group(f"g{i}", seed=i, version=0))).offset for i in range(2)]
            await own.until(WeightsPublished, 1)
            # Of a version that the shadow will not have when it trains on them.
            places += [(await producer.send(group(f"g{i}", seed=i, version=1))).offset for i in range(2, 4)]
            await own.until(WeightsPublished, 2)
            job_id = await producer.submit_job([group("j", seed=4, version=2)], None)
            await own.until(WeightsPublished, 3)
            await own.until_state(lambda state: state.policy_version == 3)
            letters = await litter(shared, source.model_id)
            before = len(first.dead_letters)
            await first.until_dead_letters(before + letters)
        ends = await written(shared)
        trial.run()
        steps = await seen.until(StepRecord, 2)
        # The shadow's own: topics, lane, ledger, job document, offsets.
        assert await written(shared) == ends
        assert await committed(shared) == await marks(shared)
        assert {place.topic for place in await marks(shared)} == {shared.topic_names.trajectory_groups}
        assert [(step.model_id, step.lane, step.job_id) for step in steps] == [
            (shadow.model_id, lane_of(source.model_id, LANES), None),
            (shadow.model_id, lane_of(source.model_id, LANES), job_id),
        ]
        assert [span.first + i for span in steps[0].offsets for i in range(span.last - span.first + 1)] == places
        assert await committed(trial.settings) == await marks(trial.settings)
        assert {place.topic for place in await marks(trial.settings)} == {shared.topic_names.trajectory_groups}
        document = (await seen.until(JobDocument, 3))[-1]
        assert (document.job_id, document.model_id, document.state) == (job_id, shadow.model_id, JobState.COMPLETED)
        # Versions of the other model are no lag.
        assert [event.lag_histogram for event in await seen.until(StepCompleted, 2)] == [{}, {}]
        assert not [name for step in steps for name in step.metrics if "lag_" in name and not name.endswith("unknown")]
        assert seen.dead_letters == seen.of(GroupRejected) == []

        # Killed before its first snapshot: it runs its steps again from the other group's log, and continues.
        assert seen.of(ModelState)[-1].snapshot is None
        trial.kill()
        trial.run()
        for i in range(5, 9):
            await producer.send(group(f"g{i}", seed=i, version=3))
        third = (await seen.until(StepRecord, 3))[2]
        assert (third.step, third.groups, third.policy_version_before) == (3, 4, 2)
        state = await seen.until_state(lambda state: state.policy_version == 3)
        assert (state.status, state.shadow_of) == ("active", source.model_id)
        await first.until_state(lambda state: state.model_id == source.model_id and state.policy_version == 5)
    # What producers write is left out: other tests share it, and one of them puts a record there that no client can read.
    for topic in (topic for topic in TOPICS if topic.name != TRAJECTORY_GROUPS):
        for record in await read_to_end(client_options(shared.kafka, "test"), shared.topic_names.full(topic.name)):
            assert record.key != shadow.model_id.encode()
            assert "/trial/" not in header_text(record.headers).get("ce_source", "")
    assert [s.groups for s in first.of(StepRecord) if s.model_id == source.model_id] == [2, 2, 1, 2, 2]


async def test_a_shadow_is_created_by_name_compared_and_deleted_by_command(shared: Settings, trial: Shadow) -> None:
    trial.run()
    source = await learner(shared, "original")
    name = name_off_lane(source.model_id, "variant")
    environment = environment_of(trial.settings)

    def headrace(*words: str) -> str:
        found = CliRunner().invoke(app, [*words, "--project", "tests"], env=environment)
        assert found.exit_code == 0, found.output
        return found.output

    def cli(*words: str) -> "asyncio.Task[str]":
        return asyncio.ensure_future(asyncio.to_thread(headrace, *words))

    made = await cli("models", "create", name, "--shadow-of", "original", "--learning-rate", "0.01", "--wait", "--json")
    shadow = orjson.loads(made)
    assert (shadow["status"], shadow["shadow_of"]) == ("active", source.model_id)
    wanted = source.settings.model_copy(update={"train": source.settings.train.model_copy(update={"learning_rate": 0.01})})
    assert ModelSettings.model_validate(shadow["settings"]) == wanted
    async with following(trial.settings) as seen, TrajectoryProducer(shared, model_id=source.model_id) as producer:
        for i in range(2):
            await producer.send(group(f"g{i}", seed=i))
        await seen.until_state(lambda state: state.model_id == shadow["id"] and state.policy_version == 1)
        async with following(shared, source.model_id) as other:
            await other.until(WeightsPublished, 1)
        said = orjson.loads(
            await cli("compare", "original", name, "--prefix-a", shared.topics.prefix, "--prefix-b", trial.settings.topics.prefix, "--json")
        )
        assert [(each["name"], each["a"], each["b"]) for each in said["settings"]] == [("train.learning_rate", 1e-3, 0.01)]
        assert len(said["side_by_side"]["steps"]) == 1
        assert "g0" in await cli("lineage", name, "--group", "g0")
        deleted = await wait_for_model(trial.settings, await delete_model(trial.settings, shadow["id"]), 30)
        assert deleted.status == "deleted"
        assert (await get_model(shared, source.model_id)).status == "active"
        # Its place is free; its groups are another's, and not refused.
        after = await create_model(trial.settings, project="tests", name="after", model=source.settings, shadow_of=source.model_id)
        await wait_for_model(trial.settings, after, 30)
        for i in range(2, 4):
            await producer.send(group(f"g{i}", seed=i))
        await seen.until_state(lambda state: state.model_id == after.model_id and state.policy_version == 1)
    assert [step.groups for step in seen.of(StepRecord) if step.model_id == shadow["id"]] == [2]
    assert [refusal for refusal in seen.of(GroupRejected) if refusal.model_id in {shadow["id"], after.model_id}] == []
