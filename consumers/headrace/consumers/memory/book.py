"""A lane's memory between two claims: its models, its position, and what it has not written yet.

Guarantees: void after any failed commit; a claim makes a new one. One event loop uses it, between awaits it is consistent: there
is no lock.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from headrace.consumers.memory.model_run import ModelRun
from headrace.consumers.memory.outgoing import Outgoing
from headrace.schemas.state import LaneState

_LETTER_BYTES = 16 * 1024 * 1024
_RECORDS = 5_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningStep:
    """What is on the device for this lane."""

    model_id: str
    job_id: str | None
    offsets: frozenset[int]
    task: "asyncio.Task[Any]"


@dataclass(slots=True, kw_only=True)
class LaneBook:
    """What the owner of a lane knows."""

    state: LaneState
    """As committed, but for `commands_through`, which moves as commands are read."""
    position: int
    """Offset of the next record of `trajectory-groups`."""
    ledger_end: int = 0
    """No record of the lane's `steps` stands at or after this offset."""
    unclean: bool = False
    """The owner before did not give the lane up in order: a batch of it may be what ended it."""
    running: "RunningStep | None" = None
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

    @property
    def much_is_unwritten(self) -> bool:
        """Whether reading must wait for a commit: one transaction has all of it, and has a time limit."""
        letters = sum(len(letter.value or b"") for letter in self.dead_letters)
        events = sum(len(run.rejected) + len(run.rejected_trajectories) for run in self.runs.values())
        return letters > _LETTER_BYTES or len(self.dead_letters) + events > _RECORDS

    def give_up(self, model_id: str, job_id: str | None = None) -> None:
        """End the step that runs, if it is of this model (and job): what it was for is not wanted any more."""
        if self.running is not None and self.running.model_id == model_id and job_id in {None, self.running.job_id}:
            self.running.task.cancel()

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
