"""Reads the raw groups of one model out of the log: by time, by id, by the steps that trained on them, by an expression.

Guarantees: only committed records, without a consumer group: nothing in the cluster changes. Groups come in the log's order, with the
record's own bytes, key and headers. A record that cannot be read, or whose payload is gone, is named (`Unusable`). Times are those of the
broker (LogAppendTime), which grow with the offsets; a span without records is empty.
Limitations: job records are left out, since they are no groups.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime
from functools import cache

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition

from headrace.consumers.replay.where import Where
from headrace.core.fetching import records_in, single_reader
from headrace.core.kafka import client_options, plain_errors
from headrace.core.lanes import lane_of
from headrace.core.logged_groups import GROUP_RECORDS, sampled_group
from headrace.core.payloads import PayloadError
from headrace.core.polling import UnreadableRecord
from headrace.core.reading import end_offsets
from headrace.core.settings import Settings
from headrace.core.store import open_store
from headrace.core.topic_admin import lane_count
from headrace.schemas.claim import GroupClaim
from headrace.schemas.codec import SampledGroup
from headrace.schemas.envelope import header_text, model_of
from headrace.schemas.jobs import TrainingJob
from headrace.schemas.reasons import CodecError


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which groups; a field at its default does not restrict them."""

    since: datetime | None = None
    until: datetime | None = None
    offsets: frozenset[int] | None = None
    """Of the model's lane: the groups that the chosen steps trained on."""
    group_ids: frozenset[str] = frozenset()
    where: Where | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RawGroup:
    """A group that fits."""

    record: ConsumerRecord
    claimed: bool
    """The record is a claim; the payload stays in the object store."""
    sampled: SampledGroup | None
    """Decoded, with the id that its lane calls it by; None where the reader does not decode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unusable:
    """A record in the span that can't be judged or decoded, or a group that is no longer in the log."""

    offset: int
    detail: str


class GroupReader:
    """Reads the groups of one model that fit a selection.

    Args:
        settings: Of this process.
        model_id: Whose groups; of a shadow, the model that it shadows.
        selection: Which of them.
        decode: Whether `RawGroup.sampled` is wanted also where the selection does not need it.
    """

    def __init__(self, settings: Settings, model_id: str, selection: Selection, *, decode: bool) -> None:
        self._settings = settings
        self._model_id = model_id
        self._selection = selection
        self._decode = decode or bool(selection.group_ids) or selection.where is not None
        self._store = cache(lambda: open_store(settings.store.url, settings.s3))
        self.groups = 0
        """Groups of the model in the span until now, whether they fit or not."""

    async def read(self) -> AsyncGenerator[RawGroup | Unusable]:
        """What fits, in the log's order, to the end that the log has now. Close it (`aclosing`) when leaving early.

        Raises:
            StoreUnavailableError: the store could not answer for a claim's payload.
            KafkaUnavailableError: no broker, or no topics.
        """
        options = client_options(self._settings.kafka, "headrace-replay")
        lanes = await lane_count(options, self._settings.topic_names)
        where = TopicPartition(self._settings.groups_topic, lane_of(self._model_id, lanes))
        end = (await end_offsets(options, where.topic, [where.partition]))[where.partition]
        with plain_errors(options):
            async with single_reader(options, where) as consumer:
                first, stop = await _span(consumer, where, end, self._selection.since, self._selection.until)
                wanted = self._wanted(first, stop)
                if wanted is not None:
                    first, stop = max(first, min(wanted, default=stop)), min(stop, max(wanted, default=first - 1) + 1)
                async with aclosing(records_in(consumer, range(first, stop))) as records:
                    async for record in records:
                        if isinstance(record, UnreadableRecord):
                            (wanted or set()).discard(record.offset)
                            yield Unusable(offset=record.offset, detail="no Headrace client can read it: its model is unknown")
                        elif record.key == self._model_id.encode() and (wanted is None or record.offset in wanted):
                            if wanted is not None:
                                wanted.remove(record.offset)
                            if (found := await asyncio.to_thread(self._judge, record)) is not None:
                                yield found
                for offset in sorted(wanted or ()):
                    yield Unusable(offset=offset, detail="a step trained on it, and the log does not have it any more")

    def _wanted(self, first: int, stop: int) -> set[int] | None:
        """The chosen offsets; where a time was given as well, those that came then."""
        chosen = self._selection
        if chosen.offsets is None:
            return None
        earliest, latest = 0 if chosen.since is None else first, None if chosen.until is None else stop
        return {offset for offset in chosen.offsets if earliest <= offset and (latest is None or offset < latest)}

    def _judge(self, record: ConsumerRecord) -> RawGroup | Unusable | None:
        """What a record is, if it fits. Blocks."""
        try:
            model = model_of(header_text(record.headers), GROUP_RECORDS)
            if model is TrainingJob:
                return None
            self.groups += 1
            if not self._decode:
                return RawGroup(record=record, claimed=model is GroupClaim, sampled=None)
            sampled = sampled_group(record, self._store)
        except (CodecError, PayloadError) as error:
            return Unusable(offset=record.offset, detail=str(error))
        chosen = self._selection
        fits = not chosen.group_ids or sampled.group.group_id in chosen.group_ids
        if fits and (chosen.where is None or chosen.where.fits(sampled)):
            return RawGroup(record=record, claimed=model is GroupClaim, sampled=sampled)
        return None


async def _span(
    consumer: AIOKafkaConsumer, where: TopicPartition, end: int, since: datetime | None, until: datetime | None
) -> tuple[int, int]:
    """Offsets `[first, stop)` of the records that came at or after `since` and before `until`."""

    async def offset_at(time: datetime) -> int:
        """Of the first record at or after a time; the end where there is none."""
        found = (await consumer.offsets_for_times({where: max(0, int(time.timestamp() * 1000))}))[where]
        return end if found is None else int(found.offset)

    first = (await consumer.beginning_offsets([where]))[where]
    if since is not None:
        first = max(first, await offset_at(since))
    stop = end if until is None else min(end, await offset_at(until))
    return first, max(first, stop)
