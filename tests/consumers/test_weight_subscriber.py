import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from safetensors.torch import load_file, save_file
from tests.poison import write_poison

from headrace.consumers.subscribers.weight_applier import CallableAdapter, LocalEngineAdapter
from headrace.consumers.subscribers.weight_subscriber import ModelDeletedError, WeightSubscriber
from headrace.core.kafka import KafkaUnavailableError
from headrace.core.lanes import lane_of
from headrace.core.models import UnknownModelError, create_model, model_id_of
from headrace.core.settings import BaseModelEntry, KafkaSettings, S3Settings, Settings, StoreSettings, TopicSettings
from headrace.core.store import open_store, store_folder
from headrace.schemas import topics
from headrace.schemas.carried import CARRIED
from headrace.schemas.deployments import DeploymentFact, deployment_key
from headrace.schemas.envelope import header_text, open_record, seal
from headrace.schemas.training import ModelSettings
from headrace.schemas.weights import WeightsApplied, WeightsFailed, WeightsPublished, alive_key

SOON = 30.0
MODEL = model_id_of("default", "p", "model-1")


class Trainer:
    """Stands in for a trainer: stores weights and publishes them, by the same store and topic."""

    def __init__(self, settings: Settings, producer: AIOKafkaProducer, work: Path) -> None:
        self.settings, self.producer, self.work = settings, producer, work
        self.store = open_store(settings.store.url, settings.s3)

    def stored(self, version: int, folder: Path | None = None, *, incarnation: str = "i1", **changes) -> WeightsPublished:
        if folder is None:
            folder = self.work / f"{incarnation}-{version}"
            folder.mkdir(parents=True)
            (folder / "weights.bin").write_bytes(f"{incarnation} {version} ".encode() * 1000)
            (folder / "config.json").write_bytes(b"{}")
        prefix = f"{self.settings.topics.prefix}/{incarnation}/{version}"
        manifest, ref = store_folder(
            self.store, prefix, folder, kind="weights", model_id=MODEL, incarnation=incarnation, step=version, attempt="a"
        )
        fields = {
            "model_id": MODEL,
            "incarnation": incarnation,
            "policy_version": version,
            "base_model": "base",
            "format": "full",
            "uri": ref.uri,
            "digest": ref.digest,
            "files": manifest.files,
        }
        return WeightsPublished(**(fields | changes))

    async def send(self, published: WeightsPublished, value: bytes | None = b"") -> None:
        """Publish; `value` other than empty replaces the record's bytes."""
        body, headers = seal(published, source="test")
        lane = lane_of(published.model_id, self.settings.topics.partitions)
        topic = self.settings.topic_names.weights
        key = published.model_id.encode()
        await self.producer.send_and_wait(topic, body if value == b"" else value, key=key, headers=headers, partition=lane)

    async def fact(self, fact: DeploymentFact, value: bytes | None = b"") -> None:
        body, headers = seal(fact, source="test")
        topic, key = self.settings.topic_names.gateway, deployment_key(fact.account, fact.id).encode()
        await self.producer.send_and_wait(topic, body if value == b"" else value, key=key, headers=headers)

    async def publish(self, version: int, folder: Path | None = None, **changes) -> WeightsPublished:
        published = await asyncio.to_thread(lambda: self.stored(version, folder, **changes))
        await self.send(published)
        return published


class Engine:
    """Remembers what it was given; `before` runs first, in the thread of the apply."""

    def __init__(self, before: Callable[[WeightsPublished], None] = lambda _: None) -> None:
        self.before = before
        self.served: list[WeightsPublished] = []
        self.contents: list[bytes] = []

    def __call__(self, folder: Path, published: WeightsPublished) -> str:
        self.before(published)
        self.contents.append((folder / "weights.bin").read_bytes())
        self.served.append(published)
        return f"engine says {published.policy_version}"

    @property
    def versions(self) -> list[int]:
        return [p.policy_version for p in self.served]


@pytest.fixture
async def stored_settings(settings, tmp_path) -> Settings:
    base = {"tiny": BaseModelEntry(path="/none")}
    stored = settings.model_copy(update={"store": StoreSettings(url=f"file://{tmp_path / 'store'}"), "base_models": base})
    await create_model(stored, project="p", name="model-1", model=ModelSettings(base_model="tiny"))
    return stored


@pytest.fixture
def trainer(stored_settings, producer, tmp_path) -> Trainer:
    return Trainer(stored_settings, producer, tmp_path / "trainer")


@pytest.fixture
def subscribe(stored_settings, tmp_path) -> Callable[..., WeightSubscriber]:
    def make(engine, **options) -> WeightSubscriber:
        adapter = engine if hasattr(engine, "apply") else CallableAdapter(engine)
        options = {"model_id": MODEL, "engine_id": "engine-1", "cache_dir": tmp_path / "cache"} | options
        return WeightSubscriber(stored_settings, adapter, **options)

    return make


@pytest.fixture
async def acks(stored_settings, kafka) -> AsyncIterator[Callable]:
    topic = stored_settings.topic_names.weight_acks
    async with AIOKafkaConsumer(topic, bootstrap_servers=kafka, auto_offset_reset="earliest", enable_auto_commit=False) as consumer:

        async def following() -> tuple[bytes, WeightsApplied | WeightsFailed]:
            async with asyncio.timeout(SOON):
                while (record := await consumer.getone()).key.startswith(alive_key("").encode()):
                    pass  # it lives, which says nothing of a version
            return record.key, open_record(record.value, header_text(record.headers), (WeightsApplied, WeightsFailed))

        yield following


async def reach(subscriber: WeightSubscriber, version: int) -> None:
    async with asyncio.timeout(SOON):
        await subscriber.wait_for(version)


async def until(subscriber: WeightSubscriber, happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON), subscriber._moved:
        await subscriber._moved.wait_for(happened)


async def test_a_version_is_downloaded_verified_applied_and_acknowledged(trainer, subscribe, acks):
    engine = Engine()
    async with subscribe(engine, base_url="http://engine:8000") as subscriber:
        assert subscriber.version == 0
        published = await trainer.publish(1)
        await reach(subscriber, 1)
        assert subscriber.published == published
        key, ack = await acks()
    assert engine.contents == [b"i1 1 " * 1000]
    assert key == b"engine-1"
    assert isinstance(ack, WeightsApplied)
    assert (ack.engine_id, ack.policy_version, ack.digest, ack.base_url) == ("engine-1", 1, published.digest, "http://engine:8000")
    assert ack.reported == "engine says 1"
    assert 0 < ack.seconds < SOON


async def test_a_late_engine_takes_the_latest_version_only(trainer, subscribe):
    engine = Engine()
    for version in range(1, 6):
        await trainer.publish(version)
    async with subscribe(engine) as subscriber:
        await reach(subscriber, 5)
        await trainer.publish(6)
        await reach(subscriber, 6)
    assert engine.versions == [5, 6]


async def test_the_version_never_goes_back_and_a_repeat_is_not_applied_again(trainer, subscribe):
    engine = Engine()
    async with subscribe(engine) as subscriber:
        first, second = await trainer.publish(1), await trainer.publish(2)
        await reach(subscriber, 2)
        await trainer.send(first)
        await trainer.send(second)
        await trainer.publish(3)
        await reach(subscriber, 3)
    assert engine.versions in ([1, 2, 3], [2, 3])


async def test_versions_come_whatever_stands_between_them(trainer, subscribe, stored_settings):
    engine = Engine()
    others = CARRIED.keys() - {topics.WEIGHTS, topics.WEIGHT_ACKS}
    await write_poison(stored_settings, [MODEL], but=others)
    async with subscribe(engine) as subscriber:
        await trainer.publish(1)
        await reach(subscriber, 1)
        await write_poison(stored_settings, [MODEL], but=others)
        await trainer.publish(2)
        await reach(subscriber, 2)
    assert engine.versions == [1, 2]


async def test_a_new_incarnation_starts_anew(trainer, subscribe):
    engine = Engine()
    async with subscribe(engine) as subscriber:
        await trainer.publish(7)
        await reach(subscriber, 7)
        await trainer.publish(1, incarnation="i2")
        await trainer.publish(2, incarnation="i2")
        await until(subscriber, lambda: subscriber.published.incarnation == "i2" and subscriber.version == 2)
    assert engine.contents[-1] == b"i2 2 " * 1000


async def test_a_version_that_is_overtaken_while_it_is_downloaded_is_not_applied(trainer, subscribe, monkeypatch):
    engine = Engine()
    started, go_on = threading.Event(), threading.Event()
    async with subscribe(engine) as subscriber:
        fetch = subscriber._cache.fetch

        def held(published):
            started.set()
            assert go_on.wait(SOON)
            return fetch(published)

        monkeypatch.setattr(subscriber._cache, "fetch", held)
        await trainer.publish(1)
        assert await asyncio.to_thread(started.wait, SOON)
        newer = await trainer.publish(2)
        await asyncio.wait_for(subscriber._feed.changed.wait(), SOON)
        assert subscriber._feed.target == newer
        assert subscriber.version == 0  # the engine serves what it has, and the loop is free
        go_on.set()
        await reach(subscriber, 2)
    assert engine.versions == [2]


@pytest.mark.parametrize("fault", ["changed", "truncated", "missing", "manifest"])
async def test_wrong_content_never_reaches_the_engine_and_the_next_version_does(trainer, subscribe, acks, tmp_path, fault):
    engine = Engine()
    async with subscribe(engine) as subscriber:
        await trainer.publish(1)
        await reach(subscriber, 1)
        await acks()
        published = trainer.stored(2)
        folder = tmp_path / "store" / trainer.settings.topics.prefix / "i1" / "2"
        file = folder / ("manifest.json" if fault == "manifest" else "weights.bin")
        content = file.read_bytes()
        file.chmod(0o644)
        match fault:
            case "changed":
                file.write_bytes(content[:-1] + b"x")
            case "truncated":
                file.write_bytes(content[:-5])
            case "manifest":
                file.write_bytes(content.replace(b"config.json", b"konfig.json"))
            case "missing":
                file.unlink()
        await trainer.send(published)
        _, ack = await acks()
        assert isinstance(ack, WeightsFailed)
        assert ack.policy_version == 2
        assert ack.serving == 1
        assert file.name in ack.error
        assert subscriber.version == 1
        await trainer.publish(3)
        await reach(subscriber, 3)
    assert engine.versions == [1, 3]


async def test_a_download_that_was_broken_once_is_tried_again(trainer, subscribe, acks, tmp_path):
    engine = Engine()
    published = trainer.stored(1)
    file = tmp_path / "store" / trainer.settings.topics.prefix / "i1" / "1" / "weights.bin"
    file.rename(file.with_suffix(".away"))
    async with subscribe(engine) as subscriber:
        fetch, attempts = subscriber._cache.fetch, []

        def healed_at_the_second_attempt(published):
            attempts.append(published)
            if len(attempts) == 2:
                file.with_suffix(".away").rename(file)
            return fetch(published)

        subscriber._cache.fetch = healed_at_the_second_attempt
        await trainer.send(published)
        await reach(subscriber, 1)
        _, ack = await acks()
    assert isinstance(ack, WeightsApplied)
    assert len(attempts) == 2


async def test_an_engine_that_refuses_goes_on_with_what_it_has(trainer, subscribe, acks):
    def refuse_two(published):
        if published.policy_version == 2:
            raise RuntimeError("no room on the device")

    engine = Engine(refuse_two)
    async with subscribe(engine) as subscriber:
        for version in (1, 2):
            await trainer.publish(version)
            _, ack = await acks()
        assert isinstance(ack, WeightsFailed)
        assert ack.error == "RuntimeError: no room on the device"
        assert subscriber.version == 1
        await trainer.publish(3)
        await reach(subscriber, 3)
    assert engine.versions == [1, 3]


async def test_a_deployment_takes_what_names_it_whatever_the_model(trainer, subscribe):
    engine = Engine()
    async with subscribe(engine, model_id=None, deployment="blue") as subscriber:
        await trainer.publish(1, rollout_deployments=("green",))
        await trainer.publish(2, rollout_deployments=("green", "blue"))
        await reach(subscriber, 2)
        await trainer.publish(3, model_id="model-2", rollout_deployments=("blue",))
        await reach(subscriber, 3)
    assert engine.versions == [2, 3]


def deployment_of(account: str, name: str = "blue") -> DeploymentFact:
    return DeploymentFact(account=account, id=name, owner="somebody", base_model="base", request={})


async def test_a_deployment_takes_the_versions_of_its_own_account_only(trainer, subscribe):
    await trainer.publish(7, account="umbrella", rollout_deployments=("blue",))  # before anybody had the deployment
    await trainer.fact(deployment_of("umbrella", "green"))
    await trainer.fact(deployment_of("acme"))
    engine = Engine()
    async with subscribe(engine, model_id=None, deployment="blue") as subscriber:
        await trainer.publish(8, account="umbrella", rollout_deployments=("blue",))
        await trainer.publish(1, model_id="model-2", account="acme", rollout_deployments=("blue",))
        await reach(subscriber, 1)
        # The id changes hands.
        await trainer.fact(deployment_of("acme"), value=None)
        await trainer.fact(deployment_of("umbrella"))
        await reach(subscriber, 8)
    assert engine.versions == [1, 8]


async def test_another_model_in_the_same_lane_is_left_alone(trainer, subscribe):
    engine = Engine()
    lanes = trainer.settings.topics.partitions
    neighbour = next(f"other-{i}" for i in range(100) if lane_of(f"other-{i}", lanes) == lane_of(MODEL, lanes))
    async with subscribe(engine) as subscriber:
        await trainer.publish(9, model_id=neighbour)
        await trainer.publish(1)
        await reach(subscriber, 1)
    assert engine.versions == [1]


async def test_a_deleted_model_leaves_the_engine_serving_and_ends_the_waiting(trainer, subscribe):
    engine = Engine()
    async with subscribe(engine) as subscriber:
        published = await trainer.publish(1)
        await reach(subscriber, 1)
        waiting = asyncio.create_task(reach(subscriber, 2))
        await trainer.send(published, value=None)
        with pytest.raises(ModelDeletedError, match="version 2 will not come"):
            await waiting
        assert subscriber.version == 1
        await trainer.publish(1, incarnation="i2")
        await trainer.publish(2, incarnation="i2")
        await until(subscriber, lambda: subscriber.version == 2)


async def test_a_record_that_cannot_be_read_is_skipped(trainer, subscribe):
    engine = Engine()
    async with subscribe(engine) as subscriber:
        await trainer.send(trainer.stored(1), value=b"{broken")
        await trainer.publish(2)
        await reach(subscriber, 2)
    assert engine.versions == [2]


async def test_the_cache_keeps_the_last_versions_and_is_used_again(trainer, subscribe, tmp_path):
    engine = Engine()
    async with subscribe(engine, keep_versions=2) as subscriber:
        for version in range(1, 5):
            await trainer.publish(version)
            await reach(subscriber, version)
    kept = sorted(path.name.split("-")[2] for path in (tmp_path / "cache").iterdir())
    assert kept in (["v3", "v4"], ["v2", "v3", "v4"])  # the last pruning may be cut off by the stop
    (tmp_path / "store" / trainer.settings.topics.prefix / "i1" / "4" / "weights.bin").unlink()  # what is here need not be fetched
    again = Engine()
    async with subscribe(again) as subscriber:
        await reach(subscriber, 4)
    assert again.contents == [b"i1 4 " * 1000]


async def test_on_applied_is_told_after_the_ack_and_may_fail(trainer, subscribe, acks):
    told = asyncio.Queue()

    async def on_applied(published: WeightsPublished) -> None:
        await told.put(published.policy_version)
        raise RuntimeError("mine")

    async with subscribe(Engine(), on_applied=on_applied) as subscriber:
        for version in (1, 2):
            await trainer.publish(version)
            await reach(subscriber, version)
            await acks()
            assert await asyncio.wait_for(told.get(), SOON) == version


async def test_a_failure_of_its_own_is_raised_to_whoever_waits_and_stops(trainer, subscribe, monkeypatch):
    subscriber = subscribe(Engine())
    monkeypatch.setattr(subscriber._feed, "observe", lambda _: 1 / 0)
    await subscriber.start()
    await trainer.publish(1)
    with pytest.raises(ZeroDivisionError):
        await reach(subscriber, 1)
    with pytest.raises(ZeroDivisionError):
        await subscriber.stop()


async def test_a_model_is_followed_by_its_name_and_an_unknown_one_is_refused_at_the_start(trainer, subscribe):
    async with subscribe(Engine(), model_id="p/model-1") as subscriber:
        await trainer.publish(1)
        await reach(subscriber, 1)
    for unknown in ("model-2", model_id_of("default", "p", "model-2")):
        with pytest.raises(UnknownModelError, match="p/model-1"):
            await subscribe(Engine(), model_id=unknown).start()


async def test_without_a_broker_start_says_so(tmp_path):
    settings = Settings(kafka=KafkaSettings(bootstrap_servers="127.0.0.1:1"), topics=TopicSettings(prefix="t."))
    subscriber = WeightSubscriber(settings, CallableAdapter(Engine()), engine_id="e", model_id=MODEL, cache_dir=tmp_path)
    with pytest.raises(KafkaUnavailableError, match=r"127\.0\.0\.1:1"):
        await subscriber.start()


async def test_it_follows_a_model_or_a_deployment_not_both(subscribe):
    for wrong in ({"deployment": "d"}, {"model_id": None}):
        with pytest.raises(ValueError, match="either model_id or deployment"):
            subscribe(Engine(), **wrong)


async def test_a_local_engine_serves_what_was_published_to_s3(stored_settings, producer, s3, tiny_model, tmp_path):
    from headrace.engine.sampling.local_engine import LocalEngine  # noqa: PLC0415 - only this test needs torch

    stored = stored_settings.model_copy(
        update={
            "store": StoreSettings(url=f"s3://{s3.bucket}/{stored_settings.topics.prefix}"),
            "s3": S3Settings(
                endpoint_url=s3.endpoint_url, region="us-east-1", access_key_id=s3.access_key, secret_access_key=s3.secret_key
            ),
        }
    )
    trainer = Trainer(stored, producer, tmp_path)
    weights = tmp_path / "full"
    weights.mkdir()
    tensors = {name: tensor * 1.5 for name, tensor in load_file(tiny_model / "model.safetensors").items()}
    save_file(tensors, weights / "model.safetensors")
    engine, expected = LocalEngine(tiny_model, seed=1), LocalEngine(tiny_model, seed=1)
    expected.load(weights, 1)
    async with WeightSubscriber(stored, LocalEngineAdapter(engine), engine_id="e", model_id=MODEL, cache_dir=tmp_path / "c") as subscriber:
        await trainer.publish(1, weights)
        await reach(subscriber, 1)
    assert engine.policy_version == 1
    assert engine.generate([[7, 8]], max_tokens=8) == expected.generate([[7, 8]], max_tokens=8)
