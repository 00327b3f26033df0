"""One transaction of a lane: every change that is not committed yet, as records, and how memory follows the commit.

Guarantees: every changed model, the lane, the events, the dead letters and (with a step) the ledger record, the job's document and the
weights are in one list of records, taken at one moment without an await between (the lane-record invariant). `build` changes nothing;
`Transaction.apply` marks exactly these changes as committed. Limitations: that the records fit the broker's limit is not computed; details
are cut, and lists are bounded.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from headrace.consumers.worker.lane_model import LaneModel
from headrace.consumers.worker.lane_models import LaneModels
from headrace.consumers.worker.model_draft import ModelChange, ModelEvent, counted
from headrace.consumers.worker.outgoing import OutgoingRecord, event_id, sealed_record
from headrace.schemas.base import utc_now
from headrace.schemas.events import GroupRejected, JobStateChanged, Starved, StepCompleted, TrajectoryRejected
from headrace.schemas.reasons import RejectionReason
from headrace.schemas.state import LaneState, StepRecord
from headrace.schemas.topics import Topics, lane_key
from headrace.schemas.weights import WeightsPublished, WeightsRef


@dataclass(frozen=True, slots=True, kw_only=True)
class StepToCommit:
    """What a step adds to the transaction of its model."""

    model_id: str
    record: StepRecord
    completed: StepCompleted
    published: WeightsPublished
    snapshot: WeightsRef | None
    """Where the step stored one."""
    offsets: tuple[int, ...]
    """Of the groups that it trained on."""
    num_sequences: int
    """Packed rows."""
    accelerator: str
    """The device that it ran on."""
    window_ids: int = 0
    """How many of the ids admitted since the last snapshot this snapshot contains."""
    reported: tuple[int, int, int] = (0, 0, 0)
    """Rejections in its report: listed groups, listed trajectories, and those that are only counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenSnapshot:
    """A snapshot of a state that was committed without one."""

    ref: WeightsRef
    window_ids: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One model's part."""

    model: LaneModel
    change: ModelChange
    window_ids: int
    """How many ids the transaction's snapshot contains; 0 without a snapshot."""
    step: StepToCommit | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Transaction:
    """Records to commit, and how memory changes when they are committed."""

    records: tuple[OutgoingRecord, ...]
    lane: LaneState
    parts: tuple[_Part, ...]
    dead_letters: int

    def apply(self, models: LaneModels) -> None:
        """The transaction is committed."""
        for part in self.parts:
            part.model.apply(part.change)
            part.model.window.snapshot_committed(part.window_ids)
            if part.step is not None:
                part.model.since_step.remove(part.step.reported)
        del models.dead_letters[: self.dead_letters]
        # Commands may have been applied during the commit: their position stays.
        models.state = self.lane.model_copy(update={"commands_through": models.state.commands_through})


def build(
    models: LaneModels,
    *,
    topics: Topics,
    source: str,
    step: StepToCommit | None = None,
    snapshots: Mapping[str, TakenSnapshot] | None = None,
    clean: bool = False,
) -> Transaction:
    """Every uncommitted change of the lane, as one transaction. Changes nothing.

    Args:
        models: The lane in memory.
        topics: Topic names.
        source: `ce_source` of the records.
        step: The step that is committed with it, if any. Its groups have left `waiting` already.
        snapshots: By model id, of committed states.
        clean: The lane is released in order with this.
    """
    lane, position = models.state, models.position
    records: list[OutgoingRecord] = []
    parts: list[_Part] = []
    needed = [position]
    for model in models.models.values():
        model_id, window = model.state.model_id, model.window
        own = step if step is not None and step.model_id == model_id else None
        taken = (snapshots or {}).get(model_id)
        fields: Mapping[str, object] = {}
        window_ids = 0
        if own is not None:
            fields = _fields_of_step(model, own, models.ledger_end)
            window_ids = own.window_ids if own.snapshot is not None else 0
            records.extend(_step_records(topics, source, lane.lane, own, model))
        elif taken is not None:
            fields, window_ids = (
                _fields_of_snapshot(taken.ref, model.state.policy_version, window.since_text(taken.window_ids)),
                taken.window_ids,
            )
        change = model.next_change(position, **fields)
        needed.extend(pending.offset for pending in change.state.pending)
        if change.state.needed_from is not None and change.state.status != "deleted":
            needed.append(change.state.needed_from)
        if model.dirty or fields:
            parts.append(_Part(model=model, change=change, window_ids=window_ids, step=own))
            records.extend(_model_records(topics, source, lane, model, change))
    written = lane.model_copy(update={"scanned": max(lane.scanned, position), "mark": min(needed), "clean": clean, "updated_at": utc_now()})
    records.append(sealed_record(written, topic=topics.models, key=lane_key(lane.lane), source=source, partition=lane.lane))
    records.extend(models.dead_letters)
    return Transaction(records=tuple(records), lane=written, parts=tuple(parts), dead_letters=len(models.dead_letters))


def _fields_of_step(model: LaneModel, step: StepToCommit, ledger_end: int) -> dict[str, object]:
    """What a step changes of its model's state."""
    state, record = model.state, step.record
    changes: dict[str, object] = {
        "policy_version": record.policy_version_after,
        "last_attempt": record.attempt,
        "weights": record.weights,
        "scalars": record.scalars,
        "groups_trained": state.groups_trained + record.groups,
        "refusals_before": counted(model.events, GroupRejected, state.refusals),
        "trajectory_refusals_before": counted(model.events, TrajectoryRejected, state.trajectory_refusals),
    }
    if step.snapshot is not None:
        return changes | _fields_of_snapshot(step.snapshot, record.step, model.window.since_text(step.window_ids))
    first = min(step.offsets, default=None)
    needed = [offset for offset in (state.needed_from, first) if offset is not None]
    return changes | {"steps_since": (*state.steps_since, ledger_end), "needed_from": min(needed, default=None)}


def _fields_of_snapshot(ref: WeightsRef, step: int, window_since: str) -> dict[str, object]:
    return {"snapshot": ref, "snapshot_step": step, "steps_since": (), "needed_from": None, "window_since": window_since}


def _step_records(topics: Topics, source: str, lane: int, step: StepToCommit, model: LaneModel) -> list[OutgoingRecord]:
    # Counted here, where the list is closed: this transaction also reports what was rejected since the step began.
    state = model.state
    refusals = {
        "refusals": _difference(counted(model.events, GroupRejected, state.refusals), state.refusals_before),
        "trajectory_refusals": _difference(
            counted(model.events, TrajectoryRejected, state.trajectory_refusals), state.trajectory_refusals_before
        ),
    }

    def sealed(record: StepRecord | StepCompleted | WeightsPublished, topic: str, kind: str) -> OutgoingRecord:
        identity = event_id(step.record.incarnation, str(step.record.step), kind)
        return sealed_record(record, topic=topic, key=step.model_id, source=source, partition=lane, event_id=identity)

    return [
        sealed(step.record.model_copy(update=refusals), topics.steps, "step-record"),
        sealed(step.completed, topics.training_events, "step-completed"),
        sealed(step.published, topics.weights, "weights-published"),
    ]


def _model_records(topics: Topics, source: str, lane: LaneState, model: LaneModel, change: ModelChange) -> list[OutgoingRecord]:
    state = change.state
    records = [sealed_record(state, topic=topics.models, key=state.model_id, source=source, partition=lane.lane)]
    for event in model.events:
        identity = event_id(state.incarnation, *_identity(event))
        records.append(
            sealed_record(event, topic=topics.training_events, key=state.model_id, source=source, partition=lane.lane, event_id=identity)
        )
    for job_id, document in change.documents.items():
        # Readers fold later commands over the document (the lane-owns-documents invariant).
        through = document.model_copy(update={"commands_through": lane.commands_through})
        records.append(sealed_record(through, topic=topics.jobs, key=job_id, source=source))
    return records


def _identity(event: ModelEvent) -> tuple[str, str]:
    """What an event is about, and its kind: both are the same if it is reported again."""
    match event:
        case GroupRejected():
            return str(event.offset), "group-rejected"
        case TrajectoryRejected():
            return f"{event.offset}/{event.trajectory}", "trajectory-rejected"
        case JobStateChanged():
            return f"{event.job_id}/{event.moves}", event.state.value
        case Starved():
            return f"{event.policy_version}/{sum(event.refusals.values())}", "starved"
        case _:
            return str(event.changes), "model-status-changed"


def _difference(now: Mapping[RejectionReason, int], before: Mapping[RejectionReason, int]) -> dict[RejectionReason, int]:
    return dict(Counter(now) - Counter(before))
