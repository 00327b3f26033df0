"""What a run came to: the ledger of each model, what became of each record, and what subscribers saw."""

from collections import Counter, defaultdict
from dataclasses import dataclass

from tests.chaos.stream import JOB, TRAINED, Entry
from tests.chaos.witness import Witness

from headrace.core.settings import Settings
from headrace.schemas.envelope import type_of
from headrace.schemas.events import GroupRejected, JobStateChanged, StepCompleted
from headrace.schemas.state import ModelState, StepRecord
from headrace.schemas.weights import WeightsPublished

Offset = tuple[int, int]
"""Partition, offset of `trajectory-groups`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All of a run that can be compared with another."""

    steps: dict[str, list[StepRecord]]
    """By model, in the order of the log."""
    published: dict[str, list[WeightsPublished]]
    states: dict[str, ModelState]
    """The last of each model."""
    fates: dict[Offset, list[str]]
    """What became of each record: once each is what it should be."""
    jobs: dict[str, list[str]]
    """States of each job, as subscribers saw them."""
    event_ids: Counter[str]
    completed: Counter[tuple[str, int]]
    """`StepCompleted` by model and step."""
    foreign_letters: int
    """Dead letters of other topics."""


def gather(settings: Settings, places: dict[Offset, Entry], witness: Witness) -> Facts:
    """Sort what a witness has seen."""
    topic = settings.topic_names.trajectory_groups
    steps: defaultdict[str, list[StepRecord]] = defaultdict(list)
    fates: dict[Offset, list[str]] = {place: [JOB] if entry.expected == JOB else [] for place, entry in places.items()}
    for record in witness.of(StepRecord):
        steps[record.model_id].append(record)
        for offset in trained(record):
            fates.setdefault((record.lane, offset), []).append(TRAINED)
    for event in witness.of(GroupRejected):
        fates.setdefault((event.partition, event.offset), []).append(str(event.reason))
    foreign = 0
    for seen in witness.seen.values():
        if seen.record is None:
            if seen.headers["headrace-error-topic"] == topic:
                place = (int(seen.headers["headrace-error-partition"]), int(seen.headers["headrace-error-offset"]))
                fates.setdefault(place, []).append(seen.headers["headrace-error-reason"])
            else:
                foreign += 1
    published: defaultdict[str, list[WeightsPublished]] = defaultdict(list)
    for weights in witness.of(WeightsPublished):
        published[weights.model_id].append(weights)
    jobs: defaultdict[str, list[str]] = defaultdict(list)
    for change in witness.of(JobStateChanged):
        jobs[change.job_id].append(change.state.value)
    return Facts(
        steps=dict(steps),
        published=dict(published),
        states={state.model_id: state for state in witness.of(ModelState)},
        fates=fates,
        jobs=dict(jobs),
        event_ids=Counter(seen.event_id for seen in witness.seen.values() if seen.record is not None and _once(seen.headers)),
        completed=Counter((event.model_id, event.step) for event in witness.of(StepCompleted)),
        foreign_letters=foreign,
    )


def trained(record: StepRecord) -> list[int]:
    """The offsets of a step's groups."""
    return [offset for part in record.offsets for offset in range(part.first, part.last + 1)]


_STATES = {type_of(ModelState), "headrace.lane-state.v1", "headrace.job-document.v1"}


def _once(headers: dict[str, str]) -> bool:
    """Whether it is an event, not a state that is written again and again."""
    return headers.get("ce_type") not in _STATES
