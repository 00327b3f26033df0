"""Dead letters: the original record with its bytes untouched, and headers that say why it could not be read.

Guarantees: key, value and headers are the original's; ours are added behind them under `headrace-error-*`, all UTF-8.
"""

from aiokafka import ConsumerRecord

from headrace.consumers.memory.outgoing import Outgoing
from headrace.schemas.dead_letters import ERROR_REASON, ERROR_VALUE
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
    if record.value is None:
        notes[ERROR_VALUE] = "null"
    return Outgoing(
        topic=topics.dead_letters,
        key=record.key,
        # aiokafka sends no record that has neither; `headrace-error-value: null` tells it from an empty one.
        value=b"" if record.key is None and record.value is None else record.value,
        headers=(*record.headers, *((name, text.encode(errors="replace")) for name, text in notes.items())),
        partition=partition,
    )
