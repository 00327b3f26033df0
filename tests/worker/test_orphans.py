"""What attempts left that were never committed: judged by states and a real ledger, in files and on a real S3 server."""

import asyncio
import gc
import uuid
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.core.ledgers import record, write
from tests.worker.stored_steps import folders, put_folder, state_of

from headrace.consumers.worker.attempts import Attempts
from headrace.consumers.worker.commits import FencedError, LaneWriter
from headrace.consumers.worker.outgoing import sealed_record
from headrace.consumers.worker.storage.orphans import OrphanCollector, Owned
from headrace.core.kafka import client_options
from headrace.core.lanes import lane_of
from headrace.core.settings import KafkaSettings, Settings, TopicSettings, WorkerSettings
from headrace.core.store import ObjectStore
from headrace.core.store.files import FileStore
from headrace.core.store.keys import TEMPORARY_PREFIX
from headrace.core.topic_admin import apply
from headrace.schemas.state import LaneState, ModelState
from headrace.schemas.topics import lane_key

LANES = 2


@pytest.fixture(scope="module")
def settings(kafka: str) -> Settings:
    """Topics that the tests share, each with a model of its own. No grace: all is old enough, unless a test says otherwise."""
    found = Settings(
        kafka=KafkaSettings(bootstrap_servers=kafka),
        topics=TopicSettings(prefix=f"orphans{uuid.uuid4().hex[:8]}.", partitions=LANES),
        worker=WorkerSettings(orphan_grace_seconds=0),
    )
    asyncio.run(apply(found))
    return found


@pytest.fixture
def m() -> str:
    """A model id."""
    return str(uuid.uuid4())


@pytest.fixture
def files(tmp_path: Path) -> FileStore:
    """A store in a folder, for what does not depend on the kind of store."""
    return FileStore(tmp_path / "store")


class Owner:
    """A lane's owner: `states` is what it has committed."""

    def __init__(self, *states: ModelState, running: frozenset[str] = frozenset()) -> None:
        self.states = {state.model_id: state for state in states}
        self.running = running
        self.asked = 0

    async def owned(self) -> Owned:
        self.asked += 1
        return Owned(states=self.states, running=self.running)


async def collect(settings: Settings, store: ObjectStore, owner: Owner, states: Mapping[str, ModelState] | None = None) -> set[str]:
    """Keys of what went; all models of an owner are on one lane."""
    lane = lane_of(next(iter(owner.states)), LANES)
    found = await OrphanCollector(settings, store, lane).collect(owner.states if states is None else states, owner.owned)
    return set(found.folders)


async def attempts(settings: Settings, count: int) -> list[str]:
    made = Attempts(settings)
    return [await made.new("m") for _ in range(count)]


async def test_attempt_names_what_no_step_committed_goes_and_what_one_did_stays(settings: Settings, store: ObjectStore, m: str) -> None:
    lost, first, second, third, beyond = await attempts(settings, 5)
    ledger = [record(step, attempt=attempt, model_id=m) for step, attempt in enumerate((first, second, third), 1)]
    await write(settings, ledger, key=m)
    kept = {
        put_folder(store, "weights", 1, first, model_id=m),
        put_folder(store, "report", 1, first, model_id=m),
        put_folder(store, "weights", 2, second, model_id=m),
        put_folder(store, "weights", 3, third, model_id=m),
        put_folder(store, "snapshot", 3, third, model_id=m),
    }
    gone = {
        put_folder(store, "weights", 1, lost, model_id=m),  # a crash between store and commit
        put_folder(store, "plots", 1, lost, whole=False, model_id=m),
        put_folder(store, "snapshot", 3, lost, model_id=m),
        put_folder(store, "weights", 4, beyond, whole=False, model_id=m),  # a crash within the store
        put_folder(store, "report", 4, beyond, model_id=m),
    }
    owner = Owner(state_of(m, version=3, last_attempt=third))
    sizes = {found.key: found.size for found in store.list()}
    found = await OrphanCollector(settings, store, lane_of(m, LANES)).collect(owner.states, owner.owned)
    assert set(found.folders) == gone
    assert found.bytes == sum(size for key, size in sizes.items() if key.rpartition("/")[0].removesuffix("/b") in gone)
    assert set(folders(store)) == kept
    assert await collect(settings, store, owner) == set()
    assert owner.asked == 1, "without a suspect nobody is asked, and the ledger is not read"


async def test_what_is_young_runs_or_is_named_by_the_state_stays(settings: Settings, files: FileStore, m: str) -> None:
    running, named, committed = await attempts(settings, 3)
    young = settings.model_copy(update={"worker": WorkerSettings(orphan_grace_seconds=3600)})
    put_folder(files, "weights", 2, running, model_id=m)
    snapshot = put_folder(files, "snapshot", 1, named, model_id=m)
    put_folder(files, "weights", 1, committed, model_id=m)
    everything = set(folders(files))
    state = state_of(m, version=1, last_attempt=committed, snapshot=snapshot, store=files)
    assert await collect(young, files, Owner(state_of(m))) == set()
    assert await collect(settings, files, Owner(state, running=frozenset({running}))) == set()
    assert set(folders(files)) == everything


async def test_what_another_cluster_group_or_prefix_wrote_for_a_model_of_the_same_id_is_not_judged(
    settings: Settings, files: FileStore, m: str
) -> None:
    """They may share a store, and ids of models and incarnations follow from names and offsets."""
    shadow = settings.model_copy(update={"topics": TopicSettings(prefix=f"{settings.topics.prefix}shadow.", partitions=LANES)})
    group = settings.model_copy(update={"worker": WorkerSettings(group="other")})
    assert len({await Attempts(each).origin() for each in (settings, shadow, group)}) == 3
    (own,) = await attempts(settings, 1)
    await write(settings, [record(1, attempt=own, model_id=m)], key=m)
    foreign = [str(uuid.uuid4()), *(await attempts(shadow, 1)), *(await attempts(group, 1))]
    everything = {put_folder(files, "weights", step, attempt, model_id=m) for step in (1, 2) for attempt in (own, *foreign)}
    gone = await collect(settings, files, Owner(state_of(m, version=1, last_attempt=own)))
    assert {key.rpartition("/")[2] for key in gone} == {f"00000002-{own}"}
    assert set(folders(files)) == everything - gone


async def test_of_an_earlier_incarnation_only_what_the_ledger_contradicts_goes(settings: Settings, files: FileStore, m: str) -> None:
    committed, lost, lone, unknown = await attempts(settings, 4)
    await write(settings, [record(1, incarnation="before", attempt=committed, model_id=m)], key=m)
    orphan = put_folder(files, "weights", 1, lost, incarnation="before", model_id=m)
    for step, attempt in ((1, committed), (2, lone), (3, lone), (3, unknown)):
        put_folder(files, "weights", step, attempt, incarnation="before", model_id=m)
    everything = set(folders(files))
    collector, owner = OrphanCollector(settings, files, lane_of(m, LANES)), Owner(state_of(m, incarnation="now"))
    assert (await collector.collect(owner.states, owner.owned)).folders == (orphan,)
    assert set(folders(files)) == everything - {orphan}
    assert (await collector.collect(owner.states, owner.owned)).folders == ()
    assert owner.asked == 1, "what the ledger did not know is not asked again"


async def test_states_as_they_are_after_the_listing_count(settings: Settings, files: FileStore, m: str) -> None:
    """The step was committed while the collector looked."""
    first, just_now = await attempts(settings, 2)
    put_folder(files, "weights", 1, first, model_id=m)
    put_folder(files, "weights", 2, just_now, model_id=m)
    seen = {m: state_of(m, version=1, last_attempt=first)}
    assert await collect(settings, files, Owner(state_of(m, version=2, last_attempt=just_now)), seen) == set()


async def test_attempt_names_a_frozen_owner_that_wakes_deletes_nothing_of_the_next_one(
    settings: Settings, files: FileStore, m: str
) -> None:
    """It lists what its successor stored and finds it beyond its own version; the proof of its ownership fails."""
    (of_the_next,) = await attempts(settings, 1)
    kept = put_folder(files, "weights", 1, of_the_next, model_id=m)
    await collect_as_a_fenced_owner(settings, files, m)
    assert list(folders(files)) == [kept]
    gc.collect()  # aiokafka leaves the error of a fenced producer unread: asyncio says so here, and not in the middle of another test


async def collect_as_a_fenced_owner(settings: Settings, files: FileStore, m: str) -> None:
    options = client_options(settings.kafka, "test")
    lane = lane_of(m, LANES)
    old, new = LaneWriter(settings, lane, options), LaneWriter(settings, lane, options)
    state = LaneState(lane=lane, partitions=LANES)
    said = sealed_record(state, topic=settings.topic_names.models, key=lane_key(lane), source="test", partition=lane)

    class Frozen(Owner):
        async def owned(self) -> Owned:
            await old.commit([said], 0)
            return await super().owned()

    try:
        await old.start()
        await new.start()
        await new.commit([said], 0)
        with pytest.raises(FencedError):
            await collect(settings, files, Frozen(state_of(m)))
    finally:
        await old.stop()
        await new.stop()


async def test_unfinished_files_of_killed_writers_go_once_they_are_old(
    settings: Settings, files: FileStore, m: str, tmp_path: Path
) -> None:
    partial = tmp_path / "store" / "models" / m / "i" / "weights" / "00000001-a" / f"{TEMPORARY_PREFIX}x"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"half")
    owner = Owner(state_of(m))
    young = settings.model_copy(update={"worker": WorkerSettings(orphan_grace_seconds=3600)})
    assert (await OrphanCollector(young, files, lane_of(m, LANES)).collect(owner.states, owner.owned)).unfinished == 0
    assert (await OrphanCollector(settings, files, lane_of(m, LANES)).collect(owner.states, owner.owned)).unfinished == 1
    assert not partial.exists()
