"""Times as people write them on a command line.

Guarantees: what is no time is refused with the text and what is possible.
"""

import re
from datetime import UTC, datetime, timedelta

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
