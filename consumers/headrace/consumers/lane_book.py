"""A lane's memory between two claims: its models, its position, and what it has not written yet.

Guarantees: void after any failed commit; a claim makes a new one. One event loop uses it, between awaits it is consistent: there
is no lock.
"""

import asyncio
from dataclasses import dataclass, field

from headrace.consumers.model_run import ModelRun
from headrace.consumers.outgoing import Outgoing
from headrace.schemas.state import LaneState


@dataclass(slots=True, kw_only=True)
class LaneBook:
    """What the owner of a lane knows."""

    state: LaneState
    """As committed, but for `commands_through`, which moves as commands are read."""
    position: int
    """Offset of the next record of `trajectory-groups`."""
    runs: dict[str, ModelRun] = field(default_factory=dict)
    dead_letters: list[Outgoing] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a record was taken in: a bucket may be complete."""
    unreported: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when subscribers should hear of something even if no step comes."""

    @property
    def has_news(self) -> bool:
        """Whether a commit would tell anybody anything."""
        return bool(self.dead_letters) or any(run.unreported for run in self.runs.values())

    def note_news(self) -> None:
        """A record was taken in: wake those who wait for a bucket, or for something to report."""
        self.changed.set()
        self.note_unreported()

    def note_unreported(self) -> None:
        """Wake the reporter, if there is something to report."""
        if self.has_news:
            self.unreported.set()

    @property
    def waiting_bytes(self) -> int:
        """Memory of all groups that wait."""
        return sum(run.waiting_bytes for run in self.runs.values())
