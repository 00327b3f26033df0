"""Dead letters: the original record with its bytes untouched, and headers that say why it could not be read.

Guarantees: key, value and headers are the original's; ours are added behind them under `headrace-error-*`, all UTF-8. A letter always fits
into the topic: of an original above `WHOLE_BYTES` it has the beginnings, the sizes and the digest.
"""

from aiokafka import ConsumerRecord

from headrace.consumers.memory.outgoing import Outgoing
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
from headrace.schemas.errors import CodecError
from headrace.schemas.topics import Topics

# A detail quotes the producer's data; a record must stay writable whatever was in it.
DETAIL_LIMIT = 1000


def dead_letter(topics: Topics, record: ConsumerRecord, error: CodecError, partition: int) -> Outgoing:
    """The dead letter of a record.

    Args:
        topics: Topic names.
        record: What could not be read.
        error: Why.
        partition: Partition of `dead-letters` to write to.
    """
    notes = {
        ERROR_REASON: error.reason.value,  # the first of ours: what stands before it is the original's
        "headrace-error-path": error.path[:DETAIL_LIMIT],
        "headrace-error-detail": error.detail[:DETAIL_LIMIT],
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
    return Outgoing(
        topic=topics.dead_letters,
        key=key,
        # aiokafka sends no record that has neither; `headrace-error-value: null` tells it from an empty one.
        value=b"" if key is None and value is None else value,
        headers=(*headers, *((name, text.encode(errors="replace")) for name, text in notes.items())),
        partition=partition,
    )
