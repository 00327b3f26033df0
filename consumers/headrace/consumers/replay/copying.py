"""Copies groups out of the log: the work behind `headrace replay groups`.

Guarantees: a file appears whole, and never over another. A topic gets the original bytes, key and headers, at the partition that the key
has there, each acknowledged by all in-sync replicas. Topics that Headrace itself uses in this cluster are rejected: a copy there would
train again or break what Headrace found. What cannot be read is reported at once and counted; the rest is copied.
Limitations: in a topic, a copied claim names this cluster's object store. An interrupted copy does not continue where it stopped.
"""

import asyncio
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from aiokafka import AIOKafkaProducer

from headrace.consumers.replay.groups import GroupReader, RawGroup, Selection, Unusable
from headrace.consumers.worker.rerun import offsets_of
from headrace.core.errors import HeadraceError
from headrace.core.kafka import ClientOptions, client_options, plain_errors
from headrace.core.lanes import lane_of
from headrace.core.ledger import StepRange, read_ledger
from headrace.core.settings import Settings
from headrace.core.store.keys import TEMPORARY_PREFIX
from headrace.core.topic_admin import counts_of, open_admin
from headrace.schemas.codec import SampledGroup, encode_json
from headrace.schemas.topics import TOPICS

TOPIC_PREFIX = "topic:"
_MAX_REQUEST_BYTES = 16 * 1024 * 1024
_UNACKNOWLEDGED = 500

Put = Callable[[RawGroup], Awaitable[None]]
"""Copies one group; all of them are there when the target is closed without an error."""


class TargetError(HeadraceError):
    """Groups can't be copied there; says why and where they can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """The counts of a copy."""

    groups: int
    """Copied."""
    of: int
    """Groups of the model in the span."""
    claims: int
    """Copied records whose payload stays in the object store; 0 where groups are written out."""
    unusable: int


async def copy_groups(
    settings: Settings, model_id: str, selection: Selection, to: str, *, bootstrap: str | None, report: Callable[[Unusable], None]
) -> Copied:
    """Copy groups.

    Args:
        settings: Of this process.
        model_id: Whose groups.
        selection: Which.
        to: `-`, `topic:NAME`, or the path of a new file.
        bootstrap: Brokers of the topic's cluster; None: those of the settings.
        report: Called with what can't be copied.

    Raises:
        HeadraceError: the target can't be used, or Kafka or the store can't be reached.
    """
    groups = claims = unusable = 0
    to_topic = to.startswith(TOPIC_PREFIX)
    async with AsyncExitStack() as stack:
        if to_topic:
            put = await stack.enter_async_context(_topic(settings, to.removeprefix(TOPIC_PREFIX), bootstrap))
        else:
            stream = sys.stdout.buffer if to == "-" else stack.enter_context(_new_file(Path(to)))
            put = _json_lines(stream)
            stack.callback(stream.flush)
        reader = GroupReader(settings, model_id, selection, decode=not to_topic)
        async for found in await stack.enter_async_context(aclosing(reader.read())):
            if isinstance(found, Unusable):
                unusable += 1
                report(found)
            else:
                await put(found)
                groups += 1
                claims += found.claimed and to_topic
    return Copied(groups=groups, of=reader.groups, claims=claims, unusable=unusable)


async def trained_offsets(settings: Settings, model_id: str, steps: StepRange, shadow_of: str | None) -> frozenset[int]:
    """Offsets of the groups that steps trained on, of the latest incarnation.

    Raises:
        HeadraceError: the ledger has none of these steps.
    """
    records = await read_ledger(settings, model_id, steps=steps, shadow_of=shadow_of)
    if not records:
        raise HeadraceError(f"the ledger has no step {steps} of model {model_id}: `headrace steps` lists those there are")
    return frozenset(offset for record in records for offset in offsets_of(record.offsets))


def _json_lines(stream: BinaryIO) -> Put:
    """One JSON group a line, payloads of claims included: what `headrace produce` reads."""

    def write(sampled: SampledGroup) -> None:
        stream.write(encode_json(sampled) + b"\n")

    async def put(group: RawGroup) -> None:
        assert group.sampled is not None  # noqa: S101 - narrows the type: the reader decodes
        await asyncio.to_thread(write, group.sampled)

    return put


@contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """A file that is there when the block ends without an error.

    Raises:
        TargetError: something is there already, or it can't be written.
    """
    partial = path.with_name(f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}")
    try:
        if path.exists():
            raise TargetError(f"{path} exists: remove it, or name another file")
        with partial.open("wb") as stream:
            yield stream
        partial.rename(path)
    except OSError as error:
        raise TargetError(f"{path} can't be written: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)


@asynccontextmanager
async def _topic(settings: Settings, topic: str, bootstrap_servers: str | None) -> AsyncIterator[Put]:
    """A topic, of another cluster where `bootstrap_servers` are given (reached with the same security settings)."""
    kafka = settings.kafka
    if bootstrap_servers is not None:
        kafka = kafka.model_copy(update={"bootstrap_servers": bootstrap_servers})
    options = client_options(kafka, "headrace-replay")
    partitions = await _partitions(settings, options, topic)
    compression = None if settings.producer.compression == "none" else settings.producer.compression
    producer = AIOKafkaProducer(
        **options, enable_idempotence=True, acks="all", compression_type=compression, max_request_size=_MAX_REQUEST_BYTES
    )
    waiting: list[asyncio.Future[object]] = []

    async def acknowledged() -> None:
        await asyncio.gather(*waiting)
        waiting.clear()

    async def put(group: RawGroup) -> None:
        record = group.record
        partition = lane_of(record.key.decode(), partitions)
        waiting.append(await producer.send(topic, record.value, key=record.key, partition=partition, headers=list(record.headers)))
        if len(waiting) >= _UNACKNOWLEDGED:
            await acknowledged()

    with plain_errors(options):
        try:
            await producer.start()
            yield put
            await acknowledged()
        finally:
            await producer.stop()


async def _partitions(settings: Settings, options: ClientOptions, topic: str) -> int:
    """Partitions of the topic.

    Raises:
        TargetError: it is a topic that Headrace uses in this cluster, or there is none of that name.
    """
    async with open_admin(options) as admin:
        cluster = (await admin.describe_cluster()).get("cluster_id")
        count = (await counts_of(admin)).get(topic)
    if topic in {settings.topic_names.full(spec.name) for spec in TOPICS}:
        async with open_admin(client_options(settings.kafka, "headrace-replay")) as admin:
            # By id: one cluster has many addresses.
            if cluster == (await admin.describe_cluster()).get("cluster_id"):
                raise TargetError(
                    f"{topic} is a topic that Headrace works on in this cluster: a copy there would be trained on, or break what it found. "
                    "Name a topic of your own, or another cluster by --to-bootstrap"
                )
    if count is None:
        raise TargetError(f"Kafka at {options['bootstrap_servers']} has no topic {topic}: create it first")
    return count
