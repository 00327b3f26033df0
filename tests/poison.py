"""What somebody may have written into any topic of ours: of each kind of record that has broken a reader of Kafka, or could."""

from collections.abc import Iterable

from aiokafka import AIOKafkaProducer, ConsumerRecord
from aiokafka.errors import KafkaError
from pydantic import BaseModel
from tests.unreadable import UNREADABLE, Headers, send_batch, send_torn, send_unreadable

from headrace.core.errors import HeadraceError
from headrace.core.kafka import ClientOptions, client_options
from headrace.core.kept import open_kept
from headrace.core.reading import read_to_end
from headrace.core.settings import Settings
from headrace.core.topic_admin import partition_count
from headrace.schemas import topics
from headrace.schemas.carried import CARRIED, topic_of
from headrace.schemas.envelope import seal, type_of
from headrace.schemas.topics import key_of

BODIES: dict[str, bytes | None] = {
    "tombstone": None,
    "empty": b"",
    "no JSON": b"{not json",
    "no text": b"\xff\xfe\x00",
    "list": b"[]",
    "text": b'"x"',
    "null": b"null",
    "no fields": b"{}",
    "NaN": b'{"step": NaN, "model_id": "m"}',
    "infinity": b'{"step": 1e999}',
    "huge": b'{"step": ' + b"9" * 5000 + b"}",
    "deep": b"[" * 5000 + b"]" * 5000,
    "surrogate": b'{"model_id": "\\ud800", "job_id": "\\ud800"}',
    "control": b'{"model_id": "\x1b[2J\x00"}',
    "escaped control": b'{"model_id": "\\u001b[2J\\u0000", "job_id": "\\u0000"}',
    "times": b'{"model_id": "m", "created_at": "0001-01-01T00:00:00+23:59", "committed_at": "9999-12-31T23:59:59-23:59", "lane": -1}',
    "large": b'{"model_id": "' + b"a" * 800_000 + b'"}',
}
OTHER_HEADERS: dict[str, Headers] = {
    "none": [],
    "no text": [("ce_type", b"\xff\xfe")],
    "null": [("ce_type", None), ("content-type", None)],
    "foreign": [("ce_type", b"com.example.other.v1"), ("", b""), ("x", b"\x00"), ("x", None)],
    "bare": [("ce_type", b"headrace."), ("ce_time", b"yesterday"), ("traceparent", b"\xff")],
}
TIMES = (0, -1, -(10**17))
"""Of records, in milliseconds; -1: none. A broker refuses those of the future."""
FOREIGN_KEYS = (None, b"", b"\xff\xfe", b"foreign", b"lane:", b"a/b/c")
KEYED = (topics.MODELS, topics.COMMANDS, topics.STEPS, topics.JOBS, topics.WEIGHTS, topics.WEIGHT_ACKS, topics.GATEWAY)
"""Topics in which a record stands for its key."""


async def send_record(settings: Settings, record: BaseModel, **changes: object) -> int:
    """Write a record of ours, or a changed one (`key`, `partition`, `value`, `headers`, `topic`); its offset."""
    value, headers = seal(record, source="test")
    key = key_of(record)
    sent = {"topic": settings.topic_names.full(topic_of(type(record))), "value": value, "headers": headers}
    async with AIOKafkaProducer(**client_options(settings.kafka, "test")) as producer:
        return int((await producer.send_and_wait(**sent | {"key": None if key is None else key.encode()} | changes)).offset)


async def write_poison(settings: Settings, keys: Iterable[str] = (), *, claimed: bool = True, but: Iterable[str] = ()) -> int:
    """Write all of it to each partition of each topic, and copies of what stands there under other keys; the number of records.

    Args:
        settings: Of the topics.
        keys: Also under these, without tombstones.
        claimed: Also with a type that the topic carries.
        but: Not to these topics (without prefix).
    """
    options = client_options(settings.kafka, "test")
    count, named = 0, [key.encode() for key in keys]
    async with AIOKafkaProducer(**options, max_request_size=8 * 1024 * 1024, linger_ms=5) as producer:
        for name in CARRIED.keys() - set(but):
            topic = settings.topic_names.full(name)
            genuine = [record for record in await read_to_end(options, topic) if _is_ours(record, name)]
            partitions = await partition_count(options, topic)
            for partition in range(partitions):
                for key in (*FOREIGN_KEYS, *named):
                    kinds = CARRIED[name] if claimed else ()
                    count += await _all_kinds(producer, topic, partition, key, kinds, tombstone=key not in named)
                count += await _copies(producer, topic, partition, genuine, name)
            await _aborted(options, settings, topic)
    return count


async def _all_kinds(
    producer: AIOKafkaProducer, topic: str, partition: int, key: bytes | None, kinds: tuple[type[BaseModel], ...], *, tombstone: bool
) -> int:
    types = [type_of(kind).encode() for kind in kinds[:2]]
    named = [*types, *(each.removesuffix(b"1") + b"9" for each in types)]
    headers: list[Headers] = [*OTHER_HEADERS.values()]
    headers += [[("ce_type", each)] for each in named]
    bodies = {kind: body for kind, body in BODIES.items() if body is not None or tombstone}
    records: list[tuple[bytes | None, bytes | None, Headers]] = []
    for number, body in enumerate(bodies.values()):
        # Each body under all headers where it matters most, and under some of them elsewhere.
        few = [headers[number % len(headers)], headers[-1 - number % len(headers)]]
        under = headers[-1:] if len(body or b"") > 100_000 else few if tombstone else headers
        records += [(key, body, each) for each in under]
    count = 0
    for start in range(0, len(records), 40):
        try:
            await send_batch(producer, topic, partition, records[start : start + 40])
            count += len(records[start : start + 40])
        except KafkaError:  # a compacted topic takes no record without a key
            assert key is None
            return 0
    await send_unreadable(producer, topic, partition, key)
    await send_torn(producer, topic, partition, key, count=2)
    await send_batch(producer, topic, partition, [(key, b"{}", headers[-1]), (key, b"{}", UNREADABLE), (key, b"7", [])], compression=4)
    for time in TIMES:
        await producer.send_and_wait(topic, b"{}", key=key, partition=partition, timestamp_ms=time, headers=headers[0])
    return count + 6 + len(TIMES)


def _is_ours(record: ConsumerRecord, name: str) -> bool:
    try:
        open_kept(record, CARRIED[name])
    except HeadraceError:
        return False
    return record.key is not None


async def _copies(producer: AIOKafkaProducer, topic: str, partition: int, genuine: list[ConsumerRecord], name: str) -> int:
    """Records of ours under another key, and of lanes in another partition."""
    count = 0
    for record in genuine if name in KEYED else []:
        keys = {b"foreign", *(other.key for other in genuine)} - {record.key}
        for key in keys:
            await producer.send_and_wait(topic, record.value, key=key, partition=partition, headers=list(record.headers))
        if name in {topics.MODELS, topics.STEPS} and record.partition != partition:
            await producer.send_and_wait(topic, record.value, key=record.key, partition=partition, headers=list(record.headers))
        count += len(keys)
    return count


async def _aborted(options: ClientOptions, settings: Settings, topic: str) -> None:
    """A transaction that came to nothing at the end of each partition, and one without records of which only the marker is left."""
    async with AIOKafkaProducer(**options, transactional_id=f"{topic}-poison") as producer:
        for partition in range(await partition_count(options, topic)):
            await producer.begin_transaction()
            await producer.send_and_wait(topic, b"{}", key=b"aborted", partition=partition)
            await producer.abort_transaction()
