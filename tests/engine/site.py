"""What stands around an engine in a test: the topics, a store, models that are created and trained by hand, and the acks."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from pydantic import BaseModel

from headrace.core.lanes import lane_of
from headrace.core.models import create_model, delete_model
from headrace.core.settings import BaseModelEntry, KafkaSettings, Settings, StoreSettings, TopicSettings
from headrace.core.store import open_store, store_folder
from headrace.core.topic_admin import apply
from headrace.engine.http.options import EngineOptions, listen
from headrace.engine.http.serve import EngineProcess
from headrace.schemas.envelope import header_text, open_record, seal
from headrace.schemas.state import ModelState
from headrace.schemas.training import ModelSettings
from headrace.schemas.weights import EngineAlive, WeightsApplied, WeightsFailed, WeightsPublished, WeightsRef

SOON = 60.0
BASE = "tiny"


class Site:
    """Topics of its own, with what an owner of lanes writes."""

    def __init__(self, settings: Settings, producer: AIOKafkaProducer, work: Path) -> None:
        self.settings, self.producer, self.work = settings, producer, work
        self.store = open_store(settings.store.url, settings.s3)
        self.incarnations: dict[str, str] = {}

    @property
    def base(self) -> Path:
        return Path(self.settings.base_models[BASE].path)

    def new_folder(self) -> Path:
        folder = self.work / uuid.uuid4().hex
        folder.mkdir()
        return folder

    async def create(self, name: str, **settings: Any) -> str:
        """Ask for a model, as the command line does; returns its id. No worker takes it up."""
        wanted = ModelSettings.model_validate({"base_model": BASE, "adaptation": "full"} | settings)
        return (await create_model(self.settings, project="p", name=name, model=wanted)).model_id

    async def take_up(self, model_id: str, **settings: Any) -> str:
        """Write the model's state, as its owner does once it has read the command; returns the incarnation."""
        incarnation = uuid.uuid4().hex
        self.incarnations[model_id] = incarnation
        wanted = ModelSettings.model_validate({"base_model": BASE, "adaptation": "full"} | settings)
        state = ModelState(
            model_id=model_id,
            incarnation=incarnation,
            account="default",
            project="p",
            name=f"m-{model_id}",
            worker_group="default",
            settings=wanted,
            scanned=0,
        )
        await self.send(self.settings.topic_names.models, model_id, state)
        return incarnation

    async def delete(self, model_id: str) -> None:
        await delete_model(self.settings, model_id)

    def stored(self, model_id: str, version: int, folder: Path) -> WeightsRef:
        incarnation = self.incarnations[model_id]
        prefix = f"models/{model_id}/{incarnation}/weights/{version:08d}-a"
        return store_folder(
            self.store, prefix, folder, kind="weights", model_id=model_id, incarnation=incarnation, step=version, attempt="a"
        )[1]

    async def publish(self, model_id: str, version: int, folder: Path, **changes: Any) -> WeightsPublished:
        ref = await asyncio.to_thread(self.stored, model_id, version, folder)
        fields = {
            "model_id": model_id,
            "incarnation": self.incarnations[model_id],
            "policy_version": version,
            "base_model": BASE,
            "format": "full",
            "uri": ref.uri,
            "digest": ref.digest,
            "files": (),
        }
        published = WeightsPublished.model_validate(fields | changes)
        await self.send(self.settings.topic_names.weights, model_id, published)
        return published

    async def fact(self, key: str, record: BaseModel) -> None:
        """Write what only gateways know."""
        value, headers = seal(record, source="test")
        await self.producer.send_and_wait(self.settings.topic_names.gateway, value, key=key.encode(), headers=headers)

    async def send(self, topic: str, model_id: str, record: BaseModel) -> None:
        value, headers = seal(record, source="test")
        lane = lane_of(model_id, self.settings.topics.partitions)
        await self.producer.send_and_wait(topic, value, key=model_id.encode(), headers=headers, partition=lane)


class Acks:
    """The acks of engines, by key, as they come."""

    def __init__(self, consumer: AIOKafkaConsumer) -> None:
        self._consumer = consumer
        self.latest: dict[str, WeightsApplied | WeightsFailed | None] = {}
        """None: taken back."""

    async def of(self, key: str, wanted: Callable[[Any], bool]) -> Any:
        """The ack of this key, once it is as wanted."""
        async with asyncio.timeout(SOON):
            while key not in self.latest or not wanted(self.latest[key]):
                record = await self._consumer.getone()
                value = None
                if record.value is not None:
                    value = open_record(record.value, header_text(record.headers), (WeightsApplied, WeightsFailed, EngineAlive))
                self.latest[record.key.decode()] = value  # type: ignore[assignment]  # one of both, or None
        return self.latest[key]


@asynccontextmanager
async def site_with(kafka: str, base: Path, work: Path, prefix: str) -> AsyncIterator[Site]:
    settings = Settings(
        kafka=KafkaSettings(bootstrap_servers=kafka),
        topics=TopicSettings(prefix=prefix, partitions=3),
        store=StoreSettings(url=f"file://{work / 'store'}"),
        base_models={BASE: BaseModelEntry(path=str(base)), "other": BaseModelEntry(path=str(base))},
    )
    await apply(settings)
    async with AIOKafkaProducer(bootstrap_servers=kafka) as producer:
        yield Site(settings, producer, work)


@asynccontextmanager
async def acks_of(site: Site) -> AsyncIterator[Acks]:
    topic = site.settings.topic_names.weight_acks
    kafka = str(site.settings.kafka.bootstrap_servers)
    async with AIOKafkaConsumer(topic, bootstrap_servers=kafka, auto_offset_reset="earliest", enable_auto_commit=False) as consumer:
        yield Acks(consumer)


@asynccontextmanager
async def running(site: Site, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """An engine in this process, ready; a client of its `/v1`."""
    wanted = {"base_model": BASE, "port": 0, "engine_id": "e", "threads": 1, "cache_dir": site.work / uuid.uuid4().hex} | options
    chosen = EngineOptions(**wanted)
    with listen(chosen.host, chosen.port) as listener:
        engine = EngineProcess(site.settings, chosen, listener)
        serving = asyncio.create_task(engine.run())
        async with httpx.AsyncClient(base_url=chosen.url(listener), timeout=SOON) as client:
            try:
                async with asyncio.timeout(SOON):
                    while (await client.get(f"{str(client.base_url).removesuffix('/v1/')}/health")).status_code != 200:  # noqa: ASYNC110
                        await asyncio.sleep(0.02)  # another server's state, asked for as whoever waits for an engine does
                yield client
            finally:
                engine.stop()
                await serving
