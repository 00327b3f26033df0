"""Where raw groups are copied to: a file or a stream of JSON lines, or a topic of this or another cluster.

Guarantees: a file appears whole, and never over another; a topic gets the original bytes, key and headers, at the partition that the key
has there, each acknowledged by all in-sync replicas; the topics that Headrace itself works on in this cluster are refused, since a copy
there would train again or break what it found. Limitations: payloads behind claims: the copied claim names this cluster's object store.

Copying the groups that fit to where they are wanted: the work behind `headrace replay groups`.

Guarantees: what cannot be read is reported at once and counted, the rest is copied. Limitations: continuing where an earlier copy was
interrupted.
"""

import asyncio
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from aiokafka import AIOKafkaProducer

from headrace.consumers.replay.groups import GroupReader, RawGroup, Selection, Unusable
from headrace.core.errors import HeadraceError
from headrace.core.kafka import ClientOptions, client_options, plain_errors
from headrace.core.lanes import lane_of
from headrace.core.ledger import StepRange, read_ledger
from headrace.core.settings import Settings
from headrace.core.store.keys import TEMPORARY_PREFIX
from headrace.core.topic_admin import counts_of, open_admin
from headrace.schemas.codec import encode_json
from headrace.schemas.topics import TOPICS

TOPIC_PREFIX = "topic:"
_MAX_REQUEST_BYTES = 16 * 1024 * 1024
_UNACKNOWLEDGED = 500


class TargetError(HeadraceError):
    """Groups can't be copied there; says why and where they can."""


class Target(Protocol):
    """Takes groups."""

    decodes: bool
    """Whether it needs the group itself, not only its record."""

    async def put(self, group: RawGroup) -> None:
        """Copy one group; when the target is closed without an error all of them are there."""
        ...


class JsonLines:
    """One JSON group a line, payloads of claims included: what `headrace produce` reads."""

    decodes = True

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    async def put(self, group: RawGroup) -> None:
        """Write a line."""
        await asyncio.to_thread(self._write, group)

    def _write(self, group: RawGroup) -> None:
        assert group.sampled is not None  # noqa: S101 - narrows the type: `decodes` asked for it
        self._stream.write(encode_json(group.sampled) + b"\n")


class TopicCopy:
    """Records as they are."""

    decodes = False

    def __init__(self, producer: AIOKafkaProducer, topic: str, partitions: int) -> None:
        self._producer = producer
        self._topic = topic
        self._partitions = partitions
        self._waiting: list[asyncio.Future[object]] = []

    async def put(self, group: RawGroup) -> None:
        """Hand a record over."""
        record = group.record
        self._waiting.append(
            await self._producer.send(
                self._topic,
                record.value,
                key=record.key,
                partition=lane_of(record.key.decode(), self._partitions),
                headers=list(record.headers),
            )
        )
        if len(self._waiting) >= _UNACKNOWLEDGED:
            await self.acknowledged()

    async def acknowledged(self) -> None:
        """Wait until all of them are there."""
        waiting, self._waiting = self._waiting, []
        await asyncio.gather(*waiting)


@contextmanager
def json_file(path: Path) -> Iterator[Target]:
    """A file that is there when the block ends without an error.

    Raises:
        TargetError: something is there already, or it can't be written.
    """
    partial = path.with_name(f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}")
    try:
        if path.exists():
            raise TargetError(f"{path} exists: remove it, or name another file")
        with partial.open("wb") as stream:
            yield JsonLines(stream)
        partial.rename(path)
    except OSError as error:
        raise TargetError(f"{path} can't be written: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)


@asynccontextmanager
async def topic_copy(settings: Settings, topic: str, bootstrap_servers: str | None) -> AsyncIterator[Target]:
    """A topic, of another cluster where `bootstrap_servers` are given (reached with the same security settings).

    Raises:
        TargetError: it is a topic that Headrace works on in this cluster, or there is none of that name.
        KafkaUnavailableError: a cluster can't be reached.
    """
    here = client_options(settings.kafka, "headrace-replay")
    there = here
    if bootstrap_servers is not None:
        there = client_options(settings.kafka.model_copy(update={"bootstrap_servers": bootstrap_servers}), "headrace-replay")
    partitions = await _partitions(settings, here, there, topic)
    compression = None if settings.producer.compression == "none" else settings.producer.compression
    producer = AIOKafkaProducer(
        **there, enable_idempotence=True, acks="all", compression_type=compression, max_request_size=_MAX_REQUEST_BYTES
    )
    with plain_errors(there):
        try:
            await producer.start()
            copy = TopicCopy(producer, topic, partitions)
            yield copy
            await copy.acknowledged()
        finally:
            await producer.stop()


async def _partitions(settings: Settings, here: ClientOptions, there: ClientOptions, topic: str) -> int:
    ours = {settings.topic_names.full(spec.name) for spec in TOPICS}
    async with open_admin(there) as admin:
        cluster = (await admin.describe_cluster()).get("cluster_id")
        count = (await counts_of(admin)).get(topic)
    if topic in ours:
        async with open_admin(here) as admin:
            # By id: one cluster has many addresses.
            if cluster == (await admin.describe_cluster()).get("cluster_id"):
                raise TargetError(
                    f"{topic} is a topic that Headrace works on in this cluster: a copy there would be trained on, or break what it found. "
                    "Name a topic of your own, or another cluster by --to-bootstrap"
                )
    if count is None:
        raise TargetError(f"Kafka at {there['bootstrap_servers']} has no topic {topic}: create it first")
    return count


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """What came of a copy."""

    groups: int
    """Copied."""
    of: int
    """Groups of the model in the span."""
    claims: int
    """Of the copied ones, records whose payload stays in the object store; 0 where groups are written out."""
    unusable: int


async def copy_groups(
    settings: Settings, model_id: str, selection: Selection, to: str, *, bootstrap: str | None, say: Callable[[Unusable], None]
) -> Copied:
    """Copy groups.

    Args:
        settings: Of this process.
        model_id: Whose groups.
        selection: Which.
        to: `-`, `topic:NAME`, or the path of a new file.
        bootstrap: Brokers of the topic's cluster; None: ours.
        say: Called with what can't be copied.

    Raises:
        HeadraceError: the target can't be used, or Kafka or the store can't be reached.
    """
    groups = claims = unusable = 0
    async with AsyncExitStack() as stack:
        target = await _target(stack, settings, to, bootstrap)
        reader = GroupReader(settings, model_id, selection, decode=target.decodes)
        async for found in await stack.enter_async_context(aclosing(reader.read())):
            if isinstance(found, Unusable):
                unusable += 1
                say(found)
            else:
                await target.put(found)
                groups += 1
                claims += found.claimed and not target.decodes
    return Copied(groups=groups, of=reader.groups, claims=claims, unusable=unusable)


async def trained_offsets(settings: Settings, model_id: str, steps: StepRange, shadow_of: str | None) -> frozenset[int]:
    """Offsets of the groups that steps trained on, of the latest incarnation.

    Raises:
        HeadraceError: the ledger has none of these steps.
    """
    records = await read_ledger(settings, model_id, steps=steps, shadow_of=shadow_of)
    if not records:
        raise HeadraceError(f"the ledger has no step {steps} of model {model_id}: `headrace steps` lists those there are")
    return frozenset(offset for record in records for span in record.offsets for offset in range(span.first, span.last + 1))


async def _target(stack: AsyncExitStack, settings: Settings, to: str, bootstrap: str | None) -> Target:
    if to == "-":
        stack.callback(sys.stdout.buffer.flush)
        return JsonLines(sys.stdout.buffer)
    if to.startswith(TOPIC_PREFIX):
        return await stack.enter_async_context(topic_copy(settings, to.removeprefix(TOPIC_PREFIX), bootstrap))
    return stack.enter_context(json_file(Path(to)))
