"""What a lane writes in one transaction: everything that it knows and nobody else does yet.

Guarantees: every dirty model, the lane, the events, the dead letters and (with a step) the ledger record, the job's document and
the weights are in one list of records, taken at one moment without an await between; `apply` makes memory say what was written,
no more. Gives up: size below the broker's limit by proof; details are cut, pending lists and windows are bounded.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headrace.consumers.memory.model_run import ModelRun
from headrace.consumers.memory.outgoing import Outgoing, event_id, outgoing
from headrace.consumers.memory.refusals import counted
from headrace.schemas.base import utc_now
from headrace.schemas.events import Starved, StepCompleted
from headrace.schemas.jobs import JobDocument
from headrace.schemas.reasons import RejectionReason
from headrace.schemas.state import LaneState, ModelState, StepRecord
from headrace.schemas.topics import Topics, lane_key
from headrace.schemas.weights import WeightsPublished, WeightsRef


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedStep:
    """What a step adds to the transaction of its model."""

    model_id: str
    record: StepRecord
    completed: StepCompleted
    published: WeightsPublished
    snapshot: WeightsRef | None
    """Where the step stored one."""
    offsets: tuple[int, ...]
    """Groups used up."""
    num_sequences: int
    """Packed rows."""
    accelerator: str
    """What the step ran on."""
    window_ids: int = 0
    """Of the ids admitted since the last snapshot, those that this one holds."""
    reported: tuple[int, int, int] = (0, 0, 0)
    """Refusals that its report lists: groups, trajectories, and those that it only counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenSnapshot:
    """A snapshot of a state that is committed already."""

    ref: WeightsRef
    window_ids: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One model's share."""

    run: ModelRun
    state: ModelState
    revision: int
    rejected: int
    rejected_trajectories: int
    job_events: int
    notices: int
    documents: dict[str, JobDocument]
    window_ids: int
    """The ids that the transaction's snapshot holds; 0 where it has none."""
    step: CommittedStep | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Transaction:
    """Records to commit, and what becomes of memory when they are in."""

    records: tuple[Outgoing, ...]
    lane: LaneState
    parts: tuple[_Part, ...]
    dead_letters: int

    def apply(self) -> None:
        """The transaction is in."""
        for part in self.parts:
            part.run.committed(
                part.state,
                revision=part.revision,
                rejected=part.rejected,
                rejected_trajectories=part.rejected_trajectories,
                job_events=part.job_events,
                notices=part.notices,
                documents=part.documents,
            )
            part.run.window.snapshot_is_in(part.window_ids)
            if part.step is not None:
                groups, trajectories, unlisted = part.step.reported
                del part.run.refused_since[:groups]
                del part.run.refused_trajectories_since[:trajectories]
                part.run.refused_unlisted -= unlisted


def build(
    *,
    topics: Topics,
    source: str,
    lane: LaneState,
    position: int,
    runs: Iterable[ModelRun],
    dead_letters: list[Outgoing],
    ledger_end: int = 0,
    step: CommittedStep | None = None,
    snapshots: Mapping[str, TakenSnapshot] | None = None,
    clean: bool = False,
) -> Transaction:
    """Everything that is new, as one transaction.

    Args:
        topics: Topic names.
        source: `ce_source` of the records.
        lane: The lane's state, its commands position up to date.
        position: Offset of the next record of `trajectory-groups` to read.
        runs: All models of the lane.
        dead_letters: Not written yet.
        ledger_end: No record of the lane's `steps` stands at or after this offset.
        step: The step that is committed with it, if any. Its groups must still be in `waiting`; they are taken out here.
        snapshots: By model id, of committed states: taken as the lane is given up.
        clean: The lane is given up in order with this.
    """
    records: list[Outgoing] = []
    parts: list[_Part] = []
    needed = [position]
    for run in runs:
        update: dict[str, object] = {}
        own = step if step is not None and step.model_id == run.state.model_id else None
        taken = (snapshots or {}).get(run.state.model_id)
        if own is not None:
            for offset in own.offsets:
                del run.waiting[offset]
            run.intent = run.rebasing = run.start_from = None
            run.lingered = False
            run.touch()
            update = _after_step(run, own, ledger_end)
            records.extend(_step_records(topics, source, lane.lane, own, run))
        elif taken is not None:
            run.touch()
            update = _snapshot_now(taken.ref, run.state.policy_version, run.window.since_text(taken.window_ids))
        state = run.state_at(position, **update)
        needed.extend(pending.offset for pending in state.pending)
        if state.needed_from is not None and state.status != "deleted":
            needed.append(state.needed_from)
        if run.dirty:
            parts.append(
                _Part(
                    run=run,
                    state=state,
                    revision=run.revision,
                    rejected=len(run.rejected),
                    rejected_trajectories=len(run.rejected_trajectories),
                    job_events=len(run.job_events),
                    notices=len(run.notices),
                    documents=dict(run.documents),
                    window_ids=own.window_ids if own is not None and own.snapshot else 0 if taken is None else taken.window_ids,
                    step=own,
                )
            )
            records.extend(_model_records(topics, source, lane, run, state))
    written = lane.model_copy(update={"scanned": max(lane.scanned, position), "mark": min(needed), "clean": clean, "updated_at": utc_now()})
    records.append(outgoing(written, topic=topics.models, key=lane_key(lane.lane), source=source, partition=lane.lane))
    records.extend(dead_letters)
    return Transaction(records=tuple(records), lane=written, parts=tuple(parts), dead_letters=len(dead_letters))


def _after_step(run: ModelRun, step: CommittedStep, ledger_end: int) -> dict[str, object]:
    """What a step changes of its model's state."""
    state, record = run.state, step.record
    changes: dict[str, object] = {
        "policy_version": record.policy_version_after,
        "last_attempt": record.attempt,
        "weights": record.weights,
        "scalars": record.scalars,
        "groups_trained": state.groups_trained + record.groups,
        "refusals_before": counted(run.rejected, state.refusals),
        "trajectory_refusals_before": counted(run.rejected_trajectories, state.trajectory_refusals),
    }
    if step.snapshot is not None:
        return changes | _snapshot_now(step.snapshot, record.step, run.window.since_text(step.window_ids))
    first = min(step.offsets, default=None)
    needed = [offset for offset in (state.needed_from, first) if offset is not None]
    return changes | {"steps_since": (*state.steps_since, ledger_end), "needed_from": min(needed, default=None)}


def _snapshot_now(ref: WeightsRef, step: int, window_since: str) -> dict[str, object]:
    return {"snapshot": ref, "snapshot_step": step, "steps_since": (), "needed_from": None, "window_since": window_since}


def _step_records(topics: Topics, source: str, lane: int, step: CommittedStep, run: ModelRun) -> list[Outgoing]:
    # Counted here, where the list is closed: what came since the step began is in this transaction too.
    state = run.state
    refusals = {
        "refusals": _since(counted(run.rejected, state.refusals), state.refusals_before),
        "trajectory_refusals": _since(counted(run.rejected_trajectories, state.trajectory_refusals), state.trajectory_refusals_before),
    }

    def sealed(record: StepRecord | StepCompleted | WeightsPublished, topic: str, kind: str) -> Outgoing:
        identity = event_id(step.record.incarnation, str(step.record.step), kind)
        return outgoing(record, topic=topic, key=step.model_id, source=source, partition=lane, event_id=identity)

    return [
        sealed(step.record.model_copy(update=refusals), topics.steps, "step-record"),
        sealed(step.completed, topics.training_events, "step-completed"),
        sealed(step.published, topics.weights, "weights-published"),
    ]


def _model_records(topics: Topics, source: str, lane: LaneState, run: ModelRun, state: ModelState) -> list[Outgoing]:
    model_id = state.model_id
    records = [outgoing(state, topic=topics.models, key=model_id, source=source, partition=lane.lane)]
    for refusal in run.rejected:
        identity = event_id(state.incarnation, str(refusal.offset), "group-rejected")
        records.append(outgoing(refusal, topic=topics.training_events, key=model_id, source=source, partition=lane.lane, event_id=identity))
    for lost in run.rejected_trajectories:
        identity = event_id(state.incarnation, f"{lost.offset}/{lost.trajectory}", "trajectory-rejected")
        records.append(outgoing(lost, topic=topics.training_events, key=model_id, source=source, partition=lane.lane, event_id=identity))
    for event in run.job_events:
        identity = event_id(state.incarnation, f"{event.job_id}/{event.moves}", event.state.value)
        records.append(outgoing(event, topic=topics.training_events, key=model_id, source=source, partition=lane.lane, event_id=identity))
    for notice in run.notices:
        kind = "starved" if isinstance(notice, Starved) else "model-status-changed"
        what = f"{notice.policy_version}/{sum(notice.refusals.values())}" if isinstance(notice, Starved) else str(notice.changes)
        identity = event_id(state.incarnation, what, kind)
        records.append(outgoing(notice, topic=topics.training_events, key=model_id, source=source, partition=lane.lane, event_id=identity))
    for job_id, document in run.documents.items():
        # Later commands than these are folded over it by whoever reads it (rule 16).
        through = document.model_copy(update={"commands_through": lane.commands_through})
        records.append(outgoing(through, topic=topics.jobs, key=job_id, source=source))
    return records


def _since(now: Mapping[RejectionReason, int], before: Mapping[RejectionReason, int]) -> dict[RejectionReason, int]:
    return dict(Counter(now) - Counter(before))
