"""Which groups stand in the log at given offsets: their ids and producers, without their tokens.

For what a report does not tell: groups that wait, and steps whose report is gone. Guarantees: the id is the one that the lane knows the
group by, `<partition>-<offset>` where the producer gave none. Gives up: speed, a group's JSON is parsed whole.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from aiokafka import ConsumerRecord

from headrace.core.fetching import fetch_offsets
from headrace.core.kafka import ClientOptions
from headrace.core.payloads import PayloadError, redeem
from headrace.core.store import ObjectStore
from headrace.schemas.claim import GroupClaim
from headrace.schemas.codec import JSON_TYPE, decode_group
from headrace.schemas.envelope import header_text, model_of, open_record
from headrace.schemas.errors import CodecError
from headrace.schemas.jobs import TrainingJob
from headrace.schemas.trajectory import TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedGroup:
    """A group as it stands in `trajectory-groups`."""

    offset: int
    group_id: str
    job_id: str | None
    producer: str | None
    """`ce_source` of its record."""


async def logged_groups(
    options: ClientOptions, store: ObjectStore, topic: str, lane: int, offsets: Iterable[int]
) -> dict[int, LoggedGroup]:
    """The groups at these offsets; what is there and is no group, or can't be read, is left out.

    Args:
        options: From `client_options`.
        store: Where claimed payloads are.
        topic: Full name of `trajectory-groups`.
        lane: Partition.
        offsets: In any order.

    Raises:
        OffsetLostError: the log does not have them all (any more).
        StoreUnavailableError: the store did not answer.
        KafkaUnavailableError: no broker.
    """
    records = await fetch_offsets(options, topic, lane, offsets)

    def read_all() -> dict[int, LoggedGroup]:
        found = {offset: logged_group(record, store) for offset, record in records.items()}
        return {offset: group for offset, group in found.items() if group is not None}

    return await asyncio.to_thread(read_all)


def logged_group(record: ConsumerRecord, store: ObjectStore) -> LoggedGroup | None:
    """The group of a record; None if it is none, or can't be read. Blocks where a claim does not say its group's id."""
    headers = header_text(record.headers)
    try:
        kind = model_of(headers, (TrajectoryGroup, GroupClaim, TrainingJob))
        if kind is TrainingJob:
            return None
        if kind is GroupClaim:
            claimed = open_record(record.value, headers, (GroupClaim,))
            assert isinstance(claimed, GroupClaim)  # noqa: S101 - narrows the type: nothing else was asked for
            if claimed.group_id is not None:
                return _named(record, headers.get("ce_source"), claimed.group_id, claimed.job_id)
            body, content_type = redeem(store, claimed), claimed.content_type
        else:
            body, content_type = record.value or b"", headers.get("content-type", JSON_TYPE)
        group = decode_group(body, content_type).group
    except (CodecError, PayloadError):
        return None
    return _named(record, headers.get("ce_source"), group.group_id, group.job_id)


def _named(record: ConsumerRecord, producer: str | None, group_id: str | None, job_id: str | None) -> LoggedGroup:
    name = group_id or f"{record.partition}-{record.offset}"
    return LoggedGroup(offset=record.offset, group_id=name, job_id=job_id, producer=producer)
