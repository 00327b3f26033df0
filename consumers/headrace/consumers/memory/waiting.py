"""A group that was admitted and waits in its bucket for a step. A type only: the lane's memory, the cut and the report share it."""

import time
from dataclasses import dataclass, field

from headrace.trainer.groups import TokenizedGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """An admitted group in its bucket."""

    offset: int
    group: TokenizedGroup
    job_id: str | None
    producer: str | None = None
    """`ce_source` of its record."""
    timestamp_ms: int = -1
    """When the log took it; -1: not known."""
    admitted_at: float = field(default_factory=time.monotonic, compare=False)
    """Seconds by this process's clock: a linger counts from here."""
