"""What a lane writes in one transaction: everything that it knows and nobody else does yet.

Guarantees: every dirty model, the lane, the events, the dead letters and (with a step) the ledger record, the job's document and
the weights are in one list of records, taken at one moment without an await between; `apply` makes memory say what was written,
no more. Gives up: size below the broker's limit by proof; details are cut, pending lists and windows are bounded.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from headrace.consumers.model_run import ModelRun, counted
from headrace.consumers.outgoing import Outgoing, event_id, outgoing
from headrace.schemas.base import utc_now
from headrace.schemas.events import StepCompleted
from headrace.schemas.jobs import JobDocument
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One model's share."""

    run: ModelRun
    state: ModelState
    revision: int
    rejected: int
    rejected_trajectories: int
    job_events: int
    documents: dict[str, JobDocument]


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
                documents=part.documents,
            )


def build(
    *,
    topics: Topics,
    source: str,
    lane: LaneState,
    position: int,
    runs: Iterable[ModelRun],
    dead_letters: list[Outgoing],
    step: CommittedStep | None = None,
) -> Transaction:
    """Everything that is new, as one transaction.

    Args:
        topics: Topic names.
        source: `ce_source` of the records.
        lane: The lane's state, its commands position up to date.
        position: Offset of the next record of `trajectory-groups` to read.
        runs: All models of the lane.
        dead_letters: Not written yet.
        step: The step that is committed with it, if any. Its groups must still be in `waiting`; they are taken out here.
    """
    records: list[Outgoing] = []
    parts: list[_Part] = []
    needed = [position]
    for run in runs:
        update: dict[str, object] = {}
        if step is not None and step.model_id == run.state.model_id:
            for offset in step.offsets:
                del run.waiting[offset]
            run.intent = None
            run.touch()
            update = {
                "policy_version": step.record.policy_version_after,
                "last_attempt": step.record.attempt,
                "snapshot": step.snapshot or run.state.snapshot,
                "weights": step.record.weights,
                "scalars": step.record.scalars,
                "groups_trained": run.state.groups_trained + step.record.groups,
            }
            records.extend(_step_records(topics, source, lane.lane, step, run))
        state = run.state_at(position, **update)
        needed.extend(pending.offset for pending in state.pending)
        if run.dirty:
            parts.append(
                _Part(
                    run=run,
                    state=state,
                    revision=run.revision,
                    rejected=len(run.rejected),
                    rejected_trajectories=len(run.rejected_trajectories),
                    job_events=len(run.job_events),
                    documents=dict(run.documents),
                )
            )
            records.extend(_model_records(topics, source, lane.lane, run, state))
    written = lane.model_copy(update={"scanned": max(lane.scanned, position), "mark": min(needed), "updated_at": utc_now()})
    records.append(outgoing(written, topic=topics.models, key=lane_key(lane.lane), source=source, partition=lane.lane))
    records.extend(dead_letters)
    return Transaction(records=tuple(records), lane=written, parts=tuple(parts), dead_letters=len(dead_letters))


def _step_records(topics: Topics, source: str, lane: int, step: CommittedStep, run: ModelRun) -> list[Outgoing]:
    # Counted here, where the list is closed: what came since the step began is in this transaction too.
    refusals = {"refusals": counted(run.rejected), "trajectory_refusals": counted(run.rejected_trajectories)}

    def sealed(record: StepRecord | StepCompleted | WeightsPublished, topic: str, kind: str) -> Outgoing:
        identity = event_id(step.record.incarnation, str(step.record.step), kind)
        return outgoing(record, topic=topic, key=step.model_id, source=source, partition=lane, event_id=identity)

    return [
        sealed(step.record.model_copy(update=refusals), topics.steps, "step-record"),
        sealed(step.completed, topics.training_events, "step-completed"),
        sealed(step.published, topics.weights, "weights-published"),
    ]


def _model_records(topics: Topics, source: str, lane: int, run: ModelRun, state: ModelState) -> list[Outgoing]:
    model_id = state.model_id
    records = [outgoing(state, topic=topics.models, key=model_id, source=source, partition=lane)]
    for refusal in run.rejected:
        identity = event_id(state.incarnation, str(refusal.offset), "group-rejected")
        records.append(outgoing(refusal, topic=topics.training_events, key=model_id, source=source, partition=lane, event_id=identity))
    for lost in run.rejected_trajectories:
        identity = event_id(state.incarnation, f"{lost.offset}/{lost.trajectory}", "trajectory-rejected")
        records.append(outgoing(lost, topic=topics.training_events, key=model_id, source=source, partition=lane, event_id=identity))
    for event in run.job_events:
        identity = event_id(state.incarnation, event.job_id, event.state.value)
        records.append(outgoing(event, topic=topics.training_events, key=model_id, source=source, partition=lane, event_id=identity))
    records.extend(outgoing(document, topic=topics.jobs, key=job_id, source=source) for job_id, document in run.documents.items())
    return records
