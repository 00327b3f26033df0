"""One step as a page: what the tables have of it, and its report; where that is gone, what the log still says at the ledger's offsets.

Guarantees: a group is only shown as one of this model's step, since its place comes from the step's own report or ledger record.
Limitations: groups beyond `_GROUPS` on one page.
"""

import asyncio
from dataclasses import dataclass

from headrace.core.ledger import StepRange, read_ledger
from headrace.core.lineage import Lineage
from headrace.core.model_views import ModelView
from headrace.core.reports import NoReportError, read_report
from headrace.core.store import DigestMismatchError
from headrace.gateway.dashboard.answers import GroupRow, StepPage, TrajectoryRow
from headrace.gateway.dashboard.seen import model_row, step_row
from headrace.gateway.gate import Gate
from headrace.gateway.problems import ProblemError
from headrace.gateway.step_history import StepEntry, whole_steps
from headrace.gateway.tables import Tables
from headrace.schemas.state import ReportedGroup, ReportedTrajectory

_GROUPS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGroups:
    """What a step trained on, as far as that is still known."""

    lane: int
    groups: tuple[ReportedGroup, ...]
    timings: dict[str, float]
    rows: str
    problem: str | None


async def step_of(gate: Gate, tables: Tables, view: ModelView, step: int) -> StepEntry:
    """A step of the model's present incarnation.

    Raises:
        ProblemError: 404.
        HeadraceError: Kafka does not answer.
    """
    found = (await whole_steps(gate.settings, tables.history(view), [step])).get(step)
    if found is None:
        raise ProblemError(404, f"model {view.name} has no step {step}")
    return found


async def step_groups(gate: Gate, view: ModelView, entry: StepEntry) -> StepGroups:
    """From the report, else from the log.

    Raises:
        HeadraceError: neither the store nor Kafka answered.
    """
    try:
        report = await asyncio.to_thread(read_report, gate.store, entry.report)
    except (NoReportError, DigestMismatchError) as error:
        problem = str(error)
    else:
        return StepGroups(lane=report.lane, groups=report.groups, timings=report.timings, rows=report.rows, problem=None)
    only = StepRange(first=entry.step, last=entry.step)
    records = await read_ledger(gate.settings, view.model_id, incarnation=entry.incarnation, steps=only, shadow_of=view.shadow_of)
    if not records:
        raise ProblemError(404, f"step {entry.step} of {view.name} is not in the ledger any more")
    told = await Lineage(gate.settings, gate.store, view.model_id, view.state, records).version(records[0])
    return StepGroups(lane=records[0].lane, groups=told.groups, timings={}, rows="none", problem=told.problem or problem)


async def step_page(gate: Gate, tables: Tables, view: ModelView, entry: StepEntry) -> StepPage:
    """The page."""
    found = await step_groups(gate, view, entry)
    history = tables.history(view)
    return StepPage(
        model=model_row(tables, view),
        step=step_row(entry),
        metrics=dict(entry.metrics),
        timings=found.timings,
        groups=[_group(group) for group in found.groups[:_GROUPS]],
        more_groups=max(0, len(found.groups) - _GROUPS),
        rows=found.rows,
        problem=found.problem,
        first=history.first_step or entry.step,
        last=entry.step if history.last is None else history.last.step,
    )


def trajectory_row(trajectory: ReportedTrajectory) -> TrajectoryRow:
    """A trajectory as a row."""
    return TrajectoryRow(
        index=trajectory.index,
        reward=trajectory.reward,
        advantage=trajectory.advantage,
        tokens=trajectory.tokens,
        trainable_tokens=trajectory.trainable_tokens,
        versions=(trajectory.initial_policy_version, trajectory.final_policy_version),
    )


def _group(group: ReportedGroup) -> GroupRow:
    return GroupRow(group_id=group.group_id, producer=group.producer, trajectories=[trajectory_row(each) for each in group.trajectories])
