"""The judgement over a run with faults: equal to the undisturbed one, bit for bit, and everything exactly once.

Each problem is one line that names the model, the step or the record. Not compared, because time or read-ahead decides them: attempts,
URIs, seconds, and in which step's transaction a refusal was counted (the totals are compared).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tests.chaos.facts import Facts, Offset, trained
from tests.chaos.stream import Entry, Stream

from headrace.core.errors import HeadraceError
from headrace.core.store import ObjectStore
from headrace.schemas.state import StepRecord

_OF_THE_PROCESS = ("seconds", "tokens_per_second", "peak_memory_bytes")
"""Metrics of the process that ran the step, not of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a run is found to be."""

    problems: tuple[str, ...]
    lost: int
    """Records without a fate, and versions that were not published."""
    duplicated: int
    """Records with more than one fate, and versions, steps and events seen more than once."""


def judge(stream: Stream, places: Mapping[Offset, Entry], calm: Facts, storm: Facts, store: ObjectStore) -> Verdict:
    """Compare a run with faults with the undisturbed one."""
    lost = [*_without_fate(places, storm), *_unpublished(stream, storm)]
    duplicated = [*_with_fates(places, storm), *_seen_twice(storm)]
    others = [
        *_unexpected(places, storm),
        *(line for learner in stream.learners for line in _steps(learner.name, learner.model_id, calm, storm)),
        *_states(stream, calm, storm),
        *_jobs(calm, storm),
        *_attempts(stream, storm),
        *_stored(storm, store),
    ]
    return Verdict(problems=(*lost, *duplicated, *others), lost=len(lost), duplicated=len(duplicated))


def expected_of(places: Mapping[Offset, Entry], facts: Facts) -> list[str]:
    """How a run differs from what the stream says must become of its records."""
    return [*_without_fate(places, facts), *_with_fates(places, facts), *_unexpected(places, facts)]


def _place(place: Offset) -> str:
    return f"trajectory-groups {place[0]}/{place[1]}"


def _without_fate(places: Mapping[Offset, Entry], facts: Facts) -> Iterator[str]:
    for place, entry in places.items():
        if not facts.fates[place]:
            yield f"{_place(place)} of {entry.learner} is lost: expected {entry.expected}, found nothing"


def _with_fates(places: Mapping[Offset, Entry], facts: Facts) -> Iterator[str]:
    for place, fates in facts.fates.items():
        if len(fates) > 1:
            yield f"{_place(place)} has {len(fates)} fates: {', '.join(fates)}"
        if place not in places:
            yield f"{_place(place)} was never written, but is {fates}"


def _unexpected(places: Mapping[Offset, Entry], facts: Facts) -> Iterator[str]:
    for place, entry in places.items():
        if len(facts.fates[place]) == 1 and facts.fates[place][0] != entry.expected:
            yield f"{_place(place)} of {entry.learner} is {facts.fates[place][0]}, expected {entry.expected}"
    if facts.foreign_letters:
        yield f"{facts.foreign_letters} dead letters of other topics, where none were sent"


def _unpublished(stream: Stream, facts: Facts) -> Iterator[str]:
    for learner in stream.learners:
        versions = {weights.policy_version for weights in facts.published.get(learner.model_id, [])}
        for version in range(1, stream.steps[learner.name] + 1):
            if version not in versions:
                yield f"{learner.name}: version {version} was never published"


def _seen_twice(facts: Facts) -> Iterator[str]:
    for model_id, published in facts.published.items():
        versions = [weights.policy_version for weights in published]
        for version in sorted(set(versions)):
            if versions.count(version) > 1:
                yield f"{model_id}: version {version} was published {versions.count(version)} times"
        if versions != sorted(versions):
            yield f"{model_id}: versions were not published in order"
    for model_id, steps in facts.steps.items():
        numbers = [record.step for record in steps]
        for number in sorted(set(numbers)):
            if numbers.count(number) > 1:
                yield f"{model_id}: step {number} is in the ledger {numbers.count(number)} times"
    for (model_id, step), times in facts.completed.items():
        if times > 1:
            yield f"{model_id}: step {step} was said to be completed {times} times"
    for event_id, times in facts.event_ids.items():
        if times > 1:
            yield f"event {event_id} was seen {times} times"


def _steps(name: str, model_id: str, calm: Facts, storm: Facts) -> Iterator[str]:
    """The first difference of a model's ledger."""
    expected, found = calm.steps.get(model_id, []), storm.steps.get(model_id, [])
    if len(expected) != len(found):
        yield f"{name}: {len(found)} steps, expected {len(expected)}"
    for before, after in zip(expected, found, strict=False):
        for what, was, now in _compared(before, after):
            if was != now:
                yield f"{name}: step {before.step} differs in {what}: {now!r}, expected {was!r}"
                return


def _compared(calm: StepRecord, storm: StepRecord) -> Iterator[tuple[str, object, object]]:
    for field in ("step", "policy_version_before", "policy_version_after", "incarnation", "job_id", "lane", "groups", "cut"):
        yield field, getattr(calm, field), getattr(storm, field)
    yield "trained offsets", trained(calm), trained(storm)
    for field in ("config_digest", "plan_digest", "seed", "updates", "loss", "grad_norm", "scalars_before", "scalars", "fingerprint"):
        yield field, getattr(calm, field), getattr(storm, field)
    for name in sorted(calm.metrics.keys() | storm.metrics.keys()):
        if not name.startswith(_OF_THE_PROCESS):
            yield f"metrics[{name}]", calm.metrics.get(name), storm.metrics.get(name)
    yield "weights digest", calm.weights.digest, storm.weights.digest


def _states(stream: Stream, calm: Facts, storm: Facts) -> Iterator[str]:
    fields = ("incarnation", "status", "policy_version", "pending", "open_jobs", "refusals", "trajectory_refusals", "groups_trained")
    for learner in stream.learners:
        before, after = calm.states[learner.model_id], storm.states[learner.model_id]
        for field in (*fields, "scalars", "closed_jobs", "intent"):
            if getattr(before, field) != getattr(after, field):
                yield f"{learner.name}: its state says {field} {getattr(after, field)!r}, expected {getattr(before, field)!r}"


def _jobs(calm: Facts, storm: Facts) -> Iterator[str]:
    for job_id in calm.jobs.keys() | storm.jobs.keys():
        if calm.jobs.get(job_id) != storm.jobs.get(job_id):
            yield f"job {job_id} went through {storm.jobs.get(job_id)}, expected {calm.jobs.get(job_id)}"


def _attempts(stream: Stream, facts: Facts) -> Iterator[str]:
    """What subscribers see is of the ledger's attempts, and of no other."""
    for learner in stream.learners:
        ledger = {record.step: record for record in facts.steps.get(learner.model_id, [])}
        for weights in facts.published.get(learner.model_id, []):
            record = ledger.get(weights.policy_version)
            if record is None:
                yield f"{learner.name}: version {weights.policy_version} was published, but is not in the ledger"
            elif (weights.uri, weights.digest) != (record.weights.uri, record.weights.digest):
                yield f"{learner.name}: version {weights.policy_version} is {weights.uri}, but the ledger has {record.weights.uri}"
        last = facts.states[learner.model_id]
        if ledger and last.last_attempt != ledger[max(ledger)].attempt:
            yield f"{learner.name}: its state says attempt {last.last_attempt}, the ledger {ledger[max(ledger)].attempt}"


def _stored(facts: Facts, store: ObjectStore) -> Iterator[str]:
    """Every published version is in the store, file by file."""
    for published in facts.published.values():
        for weights in published:
            folder = store.resolve(weights.uri)
            for file in weights.files:
                try:
                    store.get_bytes(f"{folder}/{file.path}", sha256=file.sha256)
                except HeadraceError as error:
                    yield f"{weights.model_id}: version {weights.policy_version}: {error}"
