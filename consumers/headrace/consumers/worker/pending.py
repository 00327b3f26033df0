"""Groups that wait for a step, and when a model that waits for its base model tries again."""

import time
from dataclasses import dataclass, field

import orjson

from headrace.trainer.groups import TokenizedGroup

MAX_PENDING = 5_000
"""Pending groups of one model. The model's state lists them, and must fit into a record."""
FIRST_RETRY_SECONDS = 1.0
LAST_RETRY_SECONDS = 60.0
_UUID_BYTES = 38


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingGroup:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldGroup:
    """A group that came while its model did not train. It is not admitted yet."""

    job_id: str | None
    group_id: str | None = None
    """None: another owner of the lane read it."""


@dataclass(slots=True, kw_only=True)
class Retry:
    """When a model that waits for its base model tries again."""

    seconds: float = FIRST_RETRY_SECONDS
    at: float = 0.0
    """By the process's clock."""
    ranks: bool = False
    """The ranks could not load it: only the next step shows whether they can."""
    step: bool = False
    """The next step may try."""

    def failed(self, *, ranks: bool) -> None:
        """Wait again, twice as long."""
        self.at, self.step, self.ranks = time.monotonic() + self.seconds, False, ranks
        self.seconds = min(2 * self.seconds, LAST_RETRY_SECONDS)

    @property
    def due(self) -> bool:
        """Whether to try now."""
        return not self.step and time.monotonic() >= self.at


def pending_room(maximum: int, job_id: str | None) -> int:
    """How many groups may be pending if one more of this job is admitted: the state lists each with the id of its job."""
    return maximum if job_id is None else maximum * _UUID_BYTES // max(_UUID_BYTES, len(orjson.dumps(job_id)))
