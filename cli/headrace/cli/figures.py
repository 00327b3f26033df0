"""Numbers, times and counts as the tables show them; `-` where there is none."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from headrace.schemas.reasons import RejectionReason

_LISTED = 8


def number(value: float | None, *, sign: bool = False) -> str:
    """Five significant digits; whole numbers below a million as they are."""
    if value is None:
        return "-"
    whole = value == int(value) and abs(value) < 1e6
    return f"{value:{'+' if sign else ''}{'.0f' if whole else '.5g'}}"


def moment(value: datetime) -> str:
    """UTC, to the second."""
    return f"{value.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def counts(values: Mapping[RejectionReason, int]) -> str:
    """`stale 2, duplicate 1`."""
    return ", ".join(f"{name} {count}" for name, count in values.items() if count)


def numbers(values: Sequence[float | None]) -> str:
    """The first few of a list, and how many more there are."""
    more = f" … {len(values) - _LISTED} more" if len(values) > _LISTED else ""
    return " ".join(number(value) for value in values[:_LISTED]) + more
