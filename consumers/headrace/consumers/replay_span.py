"""Where in the log to look: times as people write them, and the offsets that they stand for.

Times are those of `trajectory-groups`, which the broker stamps (LogAppendTime): they grow with the offsets, and no producer's clock counts.
Guarantees: what is no time is refused with the text and what is possible; a span without records is empty, never an error.
"""

import re
from datetime import UTC, datetime, timedelta

from aiokafka import AIOKafkaConsumer, TopicPartition

from headrace.core.errors import HeadraceError

_AGO = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*(s|m|h|d)", re.ASCII)
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


class TimeError(HeadraceError):
    """A text that is no time."""


def parse_time(text: str, now: datetime) -> datetime:
    """`10m` (ago; also s, h, d), or an ISO time: `2026-11-30T08:15:00Z`; without a zone it is UTC.

    Args:
        text: As it was written.
        now: What `10m` counts back from.

    Raises:
        TimeError: neither.
    """
    if match := _AGO.fullmatch(text.strip()):
        try:
            return now - timedelta(**{_UNITS[match[2]]: float(match[1])})
        except OverflowError:
            raise TimeError(f"{text!r} is before the calendar begins") from None
    try:
        found = datetime.fromisoformat(text.strip())
    except ValueError:
        raise TimeError(f"{text!r} is no time: write how long ago (90s, 10m, 2h, 1d), or a time as 2026-11-30T08:15:00Z") from None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


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
