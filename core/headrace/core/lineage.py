"""Where a version comes from, and where a group went.

Guarantees: what a step trained on is told from its report, or, where that was not kept or is gone, from the log at the ledger's offsets; a
step of which neither is left is named, so that "unknown" never hides one. Limitations: an index of group ids; a search reads the reports of
all steps, newest first. A version is influenced by every step before it since the state that training continued from (`influenced`).
"""

import asyncio
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal

import orjson

from headrace.core.kafka import client_options
from headrace.core.kept import kept_or_none
from headrace.core.lanes import lane_of
from headrace.core.logged_groups import LoggedGroup, logged_group, logged_groups
from headrace.core.reading import OffsetLostError, stream_to_end
from headrace.core.reports import NoReportError, read_report
from headrace.core.settings import Settings
from headrace.core.store import DigestMismatchError, ObjectStore
from headrace.core.topic_admin import lane_count
from headrace.schemas.envelope import header_text, type_of
from headrace.schemas.events import GroupRejected, TrajectoryRejected
from headrace.schemas.state import ModelState, Pending, Rebased, ReportedGroup, StepRecord, StepReport

_THREADS = 8
_REFUSALS = {type_of(GroupRejected), type_of(TrajectoryRejected)}


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionLineage:
    """What the step that made a version trained on."""

    record: StepRecord
    groups: tuple[ReportedGroup, ...]
    """Without a report only ids, offsets and producers; without the log either, nothing."""
    source: Literal["report", "log", "nothing"]
    problem: str | None
    """Why it is not from the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLineage:
    """What became of a group. It may have been refused and sent again: then both are told."""

    group_id: str
    status: Literal["trained", "waiting", "refused", "sent", "unknown"]
    """`sent`: it stands in the log beyond what its owner has committed: it waits for more groups, or no worker has read it yet."""
    trained: StepRecord | None
    """The step that trained on it."""
    group: ReportedGroup | None
    """As that step trained on it."""
    versions: tuple[int, ...]
    """That it influenced."""
    waiting: Pending | None
    """Also of a group that is only `sent`: its offset."""
    refusals: tuple[GroupRejected, ...]
    trajectories_refused: tuple[TrajectoryRejected, ...]
    """Refused alone, the rest of the group continued."""
    unsearched: tuple[int, ...]
    """Steps of which neither report nor log is left: it may have trained there."""


class Lineage:
    """Lineage of one model.

    Args:
        settings: Of this process.
        store: Where reports are.
        model_id: Which.
        state: As its owner wrote it last; None for an incarnation that has ended, or that no owner has taken up: nothing waits there.
        records: Its ledger, all steps of the incarnation.
    """

    def __init__(
        self, settings: Settings, store: ObjectStore, model_id: str, state: ModelState | None, records: Sequence[StepRecord]
    ) -> None:
        self._options = client_options(settings.kafka, "headrace-lineage")
        self._topics = settings.topic_names
        self._groups = settings.groups_topic
        self._store = store
        self._state = state
        self._records = records
        self._model_id = model_id
        self._home = (state.shadow_of if state is not None else None) or model_id
        """Whose lane it is, and whose groups."""

    async def version(self, record: StepRecord) -> VersionLineage:
        """What a step trained on.

        Raises:
            StoreUnavailableError: the store did not answer.
            KafkaUnavailableError: no broker.
        """
        (report,) = await asyncio.to_thread(self._read, [record])
        if isinstance(report, StepReport):
            return VersionLineage(record=record, groups=report.groups, source="report", problem=None)
        try:
            groups = await self._logged(_offsets(record))
        except OffsetLostError as error:
            return VersionLineage(record=record, groups=(), source="nothing", problem=f"{report}; and {error}")
        return VersionLineage(record=record, groups=tuple(map(_as_reported, groups.values())), source="log", problem=str(report))

    async def group(self, group_id: str) -> GroupLineage:
        """What became of a group.

        Raises:
            StoreUnavailableError: the store did not answer.
            KafkaUnavailableError: no broker.
        """
        reports = await asyncio.to_thread(self._read, self._records)
        told = [(record, report) for record, report in zip(self._records, reports, strict=True) if isinstance(report, StepReport)]
        refusals = {each.offset: each for _, report in told for each in report.refused if each.group_id == group_id}
        lost = {
            (each.offset, each.trajectory): each for _, report in told for each in report.refused_trajectories if each.group_id == group_id
        }
        found = next(((record, group) for record, report in told for group in report.groups if group.group_id == group_id), None)
        unsearched: list[int] = []
        if found is None:
            silent = [record for record, report in zip(self._records, reports, strict=True) if not isinstance(report, StepReport)]
            found, unsearched = await self._search_log(silent, group_id)
        waiting = sent = None
        if found is None:
            waiting = await self._waiting(group_id)
        if found is None and waiting is None and not refusals:
            of_events, lost_of_events = await self._refused(group_id)
            refusals |= of_events
            lost |= lost_of_events
            sent = None if refusals else await self._sent(group_id)
        status: Literal["trained", "waiting", "refused", "sent", "unknown"] = "unknown"
        if found is not None:
            status = "trained"
        elif waiting is not None:
            status = "waiting"
        elif refusals:
            status = "refused"
        elif sent is not None:
            status = "sent"
        return GroupLineage(
            group_id=group_id,
            status=status,
            trained=None if found is None else found[0],
            group=None if found is None else found[1],
            versions=() if found is None else influenced(self._records, found[0]),
            waiting=waiting or sent,
            refusals=tuple(refusals.values()),
            trajectories_refused=tuple(lost.values()),
            unsearched=tuple(unsearched),
        )

    def _read(self, records: Sequence[StepRecord]) -> list[StepReport | Exception]:
        """The reports of steps, or why there is none."""

        def read(record: StepRecord) -> StepReport | Exception:
            try:
                return read_report(self._store, record.report)
            except (NoReportError, DigestMismatchError) as error:
                return error

        with ThreadPoolExecutor(_THREADS, thread_name_prefix="headrace-lineage") as pool:
            return list(pool.map(read, records))

    async def _logged(self, offsets: Iterable[int]) -> dict[int, LoggedGroup]:
        return await logged_groups(self._options, self._store, self._groups, await self._lane(), offsets)

    async def _search_log(self, records: Sequence[StepRecord], group_id: str) -> tuple[tuple[StepRecord, ReportedGroup] | None, list[int]]:
        """Among the offsets of steps, newest first; and the steps whose offsets are gone."""
        for at, record in enumerate(reversed(records)):
            try:
                groups = await self._logged(_offsets(record))
            except OffsetLostError:
                # The log loses its beginning: what was before is gone, too.
                return None, [each.step for each in records[: len(records) - at] if each.offsets]
            for group in groups.values():
                if group.group_id == group_id:
                    return (record, _as_reported(group)), []
        return None, []

    async def _waiting(self, group_id: str) -> Pending | None:
        offsets = {pending.offset: pending for pending in self._state.pending} if self._state is not None else {}
        try:
            groups = await self._logged(offsets)
        except OffsetLostError:  # the model will stop for it; those that are there can't be told from those that are not
            return None
        return next((offsets[offset] for offset, group in groups.items() if group.group_id == group_id), None)

    async def _sent(self, group_id: str) -> Pending | None:
        """In the log beyond what the owner has committed."""
        if self._state is None:
            return None
        batches = stream_to_end(self._options, self._groups, [await self._lane()])
        async with aclosing(batches):
            async for batch in batches:
                for record in batch:
                    if record.offset < self._state.scanned or record.key != self._home.encode():
                        continue
                    group = await asyncio.to_thread(logged_group, record, self._store)
                    if group is not None and group.group_id == group_id:
                        return Pending(offset=group.offset, job_id=group.job_id)
        return None

    async def _refused(self, group_id: str) -> tuple[dict[int, GroupRejected], dict[tuple[int, int], TrajectoryRejected]]:
        """From `training-events`, which has all refusals as long as it keeps them."""
        written = orjson.dumps(group_id)
        groups: dict[int, GroupRejected] = {}
        trajectories: dict[tuple[int, int], TrajectoryRejected] = {}
        batches = stream_to_end(self._options, self._topics.training_events, [await self._lane()])
        async with aclosing(batches):
            async for batch in batches:
                for record in batch:
                    if record.key != self._model_id.encode() or written not in (record.value or b""):
                        continue
                    if header_text(record.headers).get("ce_type") not in _REFUSALS:
                        continue
                    match kept_or_none(record, (GroupRejected, TrajectoryRejected)):
                        case GroupRejected() as refused if refused.group_id == group_id:
                            groups[refused.offset] = refused
                        case TrajectoryRejected() as lost if lost.group_id == group_id:
                            trajectories[lost.offset, lost.trajectory] = lost
        return groups, trajectories

    async def _lane(self) -> int:
        if self._records:
            return self._records[0].lane
        return lane_of(self._home, await lane_count(self._options, self._topics))


def influenced(records: Sequence[StepRecord], step: StepRecord) -> tuple[int, ...]:
    """Versions that rest on a step: its own and all later ones, up to a `rebased` record that went back to before it.

    A step without an update trained on nothing, so no version rests on it.
    """
    if step.updates == 0:
        return ()
    versions = []
    for record in records:
        if record.step < step.step:
            continue
        if record.rebased is not None and record.step > step.step and _resumed_from(record.rebased) < step.step:
            break
        versions.append(record.policy_version_after)
    return tuple(versions)


def _resumed_from(rebased: Rebased) -> int:
    return rebased.step - 1 if rebased.resumed_from is None else rebased.resumed_from


def _offsets(record: StepRecord) -> list[int]:
    return [offset for found in record.offsets for offset in range(found.first, found.last + 1)]


def _as_reported(group: LoggedGroup) -> ReportedGroup:
    return ReportedGroup(group_id=group.group_id, offset=group.offset, producer=group.producer, trajectories=())
