"""All models of a lane in memory, the lane's position, and what is not committed yet.

Guarantees: one event loop uses it, and it is consistent between two awaits, so it needs no lock. Limitations: it is void after any failed
commit; a claim makes a new one.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from headrace.consumers.worker.lane_model import LaneModel
from headrace.consumers.worker.outgoing import OutgoingRecord
from headrace.schemas.state import LaneState

_LETTER_BYTES = 16 * 1024 * 1024
_RECORDS = 5_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningStep:
    """The step that runs for this lane."""

    model_id: str
    job_id: str | None
    offsets: frozenset[int]
    task: "asyncio.Task[Any]"


@dataclass(slots=True, kw_only=True)
class LaneModels:
    """The models of one lane, and what runs."""

    state: LaneState
    """As committed, except `commands_through`, which moves as commands are read."""
    position: int
    """Offset of the next record of `trajectory-groups`."""
    ledger_end: int = 0
    """No record of the lane's `steps` has this offset or a higher one."""
    unclean: bool = False
    """The owner before did not release the lane in order: one of its batches may have ended it."""
    running: RunningStep | None = None
    models: dict[str, LaneModel] = field(default_factory=dict)
    dead_letters: list[OutgoingRecord] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a record was taken in: a bucket may be complete."""
    unreported: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when subscribers wait for a report, even if no step comes."""

    @property
    def reportable(self) -> bool:
        """Whether a commit would report anything."""
        return bool(self.dead_letters) or any(model.reportable for model in self.models.values())

    @property
    def backlogged(self) -> bool:
        """Whether reading must wait for a commit: one transaction has all reports, and has a time limit."""
        letters = sum(len(letter.value or b"") for letter in self.dead_letters)
        return letters > _LETTER_BYTES or len(self.dead_letters) + sum(len(model.events) for model in self.models.values()) > _RECORDS

    def runs_step_of(self, model_id: str) -> bool:
        """Whether the step that runs is of this model."""
        return self.running is not None and self.running.model_id == model_id

    def cancel_step(self, model_id: str, job_id: str | None = None) -> None:
        """Cancel the step that runs, if it is of this model (and job)."""
        if self.running is not None and self.running.model_id == model_id and job_id in {None, self.running.job_id}:
            self.running.task.cancel()

    def note_change(self) -> None:
        """A record was taken in: wake the tasks that wait for a bucket, or for something to report."""
        self.changed.set()
        self.note_unreported()

    def note_unreported(self) -> None:
        """Wake the reporting task, if there is something to report."""
        if self.reportable:
            self.unreported.set()

    @property
    def waiting_bytes(self) -> int:
        """Memory of the groups of all models."""
        return sum(model.waiting_bytes for model in self.models.values())
