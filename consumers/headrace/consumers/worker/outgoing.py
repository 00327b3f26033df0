"""Records that a lane writes in its transactions, and the dead letters among them.

A dead letter has the original's key, value and headers, and headers of its own behind them under `headrace-error-*`, all UTF-8.
Guarantees: a dead letter always fits into its topic. Of an original above `WHOLE_BYTES` it has the first bytes, the sizes and the digest.
"""

import uuid
from dataclasses import dataclass

from aiokafka import ConsumerRecord
from pydantic import BaseModel

from headrace.schemas.dead_letters import (
    CUT_KEY_BYTES,
    CUT_VALUE_BYTES,
    ERROR_HEADERS,
    ERROR_KEY_BYTES,
    ERROR_REASON,
    ERROR_SHA256,
    ERROR_VALUE,
    ERROR_VALUE_BYTES,
    WHOLE_BYTES,
    first_headers,
    record_bytes,
    record_digest,
)
from headrace.schemas.envelope import seal
from headrace.schemas.reasons import CodecError
from headrace.schemas.topics import Topics

_NAMESPACE = uuid.UUID("6f3f0c1e-8d0b-5a52-9a5e-6d1a0f0b7c11")
# A detail quotes the producer's data. The letter must stay writable with any data.
_DETAIL_LIMIT = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingRecord:
    """Bytes for a topic. `partition` None: by the key's murmur2."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]
    partition: int | None = None


def sealed_record(
    record: BaseModel, *, topic: str, key: str, source: str, partition: int | None = None, event_id: str | None = None
) -> OutgoingRecord:
    """A record model, sealed with its CloudEvents headers."""
    value, headers = seal(record, source=source, event_id=event_id)
    return OutgoingRecord(topic=topic, key=key.encode(), value=value, headers=tuple(headers), partition=partition)


def event_id(incarnation: str, what: str, kind: str) -> str:
    """The id of an event, from its incarnation, its step or offset, and its kind: a repeat of the event has the same id."""
    return str(uuid.uuid5(_NAMESPACE, f"{incarnation}/{what}/{kind}"))


def dead_letter(topics: Topics, record: ConsumerRecord, error: CodecError, partition: int) -> OutgoingRecord:
    """The dead letter of a record."""
    notes = {
        ERROR_REASON: error.reason.value,  # the first of our headers: all headers before it are the original's
        "headrace-error-path": error.path[:_DETAIL_LIMIT],
        "headrace-error-detail": error.detail[:_DETAIL_LIMIT],
        "headrace-error-type": type(error).__name__,
        "headrace-error-topic": record.topic,
        "headrace-error-partition": str(record.partition),
        "headrace-error-offset": str(record.offset),
        "headrace-error-time": str(record.timestamp),
    }
    key, value, headers = record.key, record.value, record.headers
    if value is None:
        notes[ERROR_VALUE] = "null"
    if record_bytes(key, value, headers) > WHOLE_BYTES:
        notes[ERROR_SHA256] = record_digest(key, value, headers)
        notes[ERROR_KEY_BYTES], notes[ERROR_VALUE_BYTES], notes[ERROR_HEADERS] = (str(len(part or b"")) for part in (key, value, headers))
        key, value, headers = key and key[:CUT_KEY_BYTES], value and value[:CUT_VALUE_BYTES], first_headers(headers)
    return OutgoingRecord(
        topic=topics.dead_letters,
        key=key,
        # aiokafka sends no record that has neither; `headrace-error-value: null` distinguishes it from an empty one.
        value=b"" if key is None and value is None else value,
        headers=(*headers, *((name, text.encode(errors="replace")) for name, text in notes.items())),
        partition=partition,
    )
