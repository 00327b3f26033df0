"""One run of the stream: topics under a prefix, a store folder, and the writer of the stream.

Guarantees: the records of each partition stand in the stream's order, each once, whatever happens to the broker meanwhile: the producer
is idempotent, and one record is acknowledged before the next of its partition is sent.
"""

import asyncio
from collections.abc import Iterable
from pathlib import Path

from aiokafka import AIOKafkaProducer
from tests.chaos.stream import ACCOUNT, LANES, PROJECT, WINDOW, Entry, Stream

from headrace.core.kafka import client_options
from headrace.core.models import create_model
from headrace.core.payloads import claim
from headrace.core.settings import BaseModelEntry, KafkaSettings, S3Settings, Settings, StoreSettings, TopicSettings, WorkerSettings
from headrace.core.store import open_store
from headrace.core.topic_admin import apply
from headrace.schemas.claim import GroupClaim
from headrace.schemas.envelope import type_of

SESSION_MS = 4000


def settings_of(
    bootstrap_servers: str, name: str, folder: Path, base: Path, *, snapshot_every: int, s3: tuple[str, S3Settings] | None = None
) -> Settings:
    """Settings of a run: the product's own but for those that docs/exactly-once.md lists, with the reason.

    Args:
        bootstrap_servers: Of the run's broker.
        name: Of the run.
        folder: For all that it writes.
        base: The base model.
        snapshot_every: As `worker.snapshot_every`.
        s3: Bucket and settings of an S3 store; None: a file store.
    """
    return Settings(
        kafka=KafkaSettings(bootstrap_servers=bootstrap_servers),
        topics=TopicSettings(prefix=f"{name}.", partitions=LANES),
        store=StoreSettings(url=f"file://{folder}/{name}/store" if s3 is None else f"s3://{s3[0]}/{name}"),
        s3=S3Settings() if s3 is None else s3[1],
        account=ACCOUNT,
        worker=WorkerSettings(
            work_dir=folder / name / "work",
            threads=1,
            session_timeout_ms=SESSION_MS,
            heartbeat_interval_ms=400,
            transaction_timeout_ms=10_000,
            duplicate_window=WINDOW,
            snapshot_every=snapshot_every,
            orphan_grace_seconds=0,
        ),
        base_models={"tiny": BaseModelEntry(path=str(base))},
    )


async def prepare(settings: Settings, stream: Stream) -> None:
    """Make the topics and ask for the models, in an order that gives the same offsets and so the same incarnations in every run."""
    await apply(settings)
    for learner in stream.learners:
        await create_model(settings, project=PROJECT, name=learner.name, model=learner.settings)


class StreamWriter:
    """Writes entries and notes where they stand.

    Args:
        settings: Of the run.
    """

    def __init__(self, settings: Settings) -> None:
        self._topic = settings.topic_names.trajectory_groups
        self._store = open_store(settings.store.url, settings.s3)
        options = client_options(settings.kafka, "chaos-writer") | {"request_timeout_ms": 120_000}
        # One for the whole run: it sends again by itself while the broker is away.
        self._producer = AIOKafkaProducer(**options, enable_idempotence=True, acks="all", linger_ms=0)
        self.places: dict[tuple[int, int], Entry] = {}
        """By (partition, offset)."""

    async def __aenter__(self) -> "StreamWriter":
        await self._producer.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._producer.stop()

    async def write(self, entries: Iterable[Entry]) -> None:
        """Send the entries in order."""
        for entry in entries:
            await self._send(entry)

    async def _send(self, entry: Entry) -> None:
        value, headers = entry.value, entry.headers
        if entry.claimed is not None and value is not None:
            content_type = dict(headers)["content-type"].decode()
            check = await asyncio.to_thread(claim, self._store, value, content_type, entry.claimed.group_id, entry.claimed.job_id)
            value, headers = check.model_dump_json().encode(), (("ce_type", type_of(GroupClaim).encode()),)
        sent = await self._producer.send_and_wait(self._topic, value, key=entry.key, partition=entry.partition, headers=list(headers))
        self.places[(sent.partition, sent.offset)] = entry
