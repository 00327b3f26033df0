"""Where in the log to look: the offsets that times stand for.

Times are those of `trajectory-groups`, which the broker stamps (LogAppendTime): they grow with the offsets, and no producer's clock counts.
Guarantees: a span without records is empty, never an error.
"""

from datetime import datetime

from aiokafka import AIOKafkaConsumer, TopicPartition


async def span_of(
    consumer: AIOKafkaConsumer, where: TopicPartition, end: int, since: datetime | None, until: datetime | None
) -> tuple[int, int]:
    """Offsets `[first, stop)` of the records that came between two times.

    Args:
        consumer: Any, of this cluster.
        where: The partition.
        end: Offset after the last record that is asked for.
        since: Included; None: from the beginning.
        until: Excluded; None: to the end.
    """
    first = (await consumer.beginning_offsets([where]))[where]
    if since is not None:
        first = max(first, await _offset_at(consumer, where, since, end))
    stop = end if until is None else min(end, await _offset_at(consumer, where, until, end))
    return first, max(first, stop)


async def _offset_at(consumer: AIOKafkaConsumer, where: TopicPartition, time: datetime, end: int) -> int:
    """Offset of the first record at or after a time; the end where there is none."""
    milliseconds = max(0, int(time.timestamp() * 1000))
    found = (await consumer.offsets_for_times({where: milliseconds}))[where]
    return end if found is None else int(found.offset)
