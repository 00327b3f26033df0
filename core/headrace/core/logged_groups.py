"""Which groups stand in the log at given offsets: their ids and producers, without their tokens.

For what a report does not tell: groups that wait, and steps whose report is gone. Guarantees: the id is the one that the lane knows the
group by, `<partition>-<offset>` where the producer gave none. Limitations: speed, a group's JSON is parsed whole.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from aiokafka import ConsumerRecord

from headrace.core.fetching import fetch_offsets
from headrace.core.kafka import ClientOptions
from headrace.core.payloads import PayloadError, redeem
from headrace.core.store import ObjectStore
from headrace.schemas.carried import CARRIED
from headrace.schemas.claim import GroupClaim
from headrace.schemas.codec import JSON_TYPE, SampledGroup, decode_group
from headrace.schemas.envelope import header_text, model_of, open_record
from headrace.schemas.jobs import TrainingJob
from headrace.schemas.reasons import CodecError, DeadLetterReason
from headrace.schemas.topics import TRAJECTORY_GROUPS

GROUP_RECORDS = CARRIED[TRAJECTORY_GROUPS]
"""What `trajectory-groups` carries."""


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
        kind = model_of(headers, GROUP_RECORDS)
        if kind is TrainingJob:
            return None
        claim = claim_of(record) if kind is GroupClaim else None
        named = claim if claim is not None and claim.group_id else sampled_group(record, lambda: store).group
    except (CodecError, PayloadError):
        return None
    return LoggedGroup(offset=record.offset, group_id=str(named.group_id), job_id=named.job_id, producer=headers.get("ce_source"))


def sampled_group(record: ConsumerRecord, store: Callable[[], ObjectStore]) -> SampledGroup:
    """A group decoded whole, its payload fetched where it is a claim, and called as its lane calls it. Blocks.

    Args:
        record: Of `trajectory-groups`, and no job.
        store: Asked for where the record is a claim.

    Raises:
        CodecError: it can't be read.
        PayloadError: its payload is gone, or is not what it should be.
        StoreUnavailableError: the store did not answer.
    """
    body, content_type, name = group_body(record, store)
    sampled = decode_group(body, content_type)
    if not sampled.group.group_id:
        sampled.group.group_id = name
    return sampled


def group_body(record: ConsumerRecord, store: Callable[[], ObjectStore]) -> tuple[bytes, str, str]:
    """A group as it was encoded, its content type, and what its lane calls it if it does not say. Otherwise as `sampled_group`."""
    headers = header_text(record.headers)
    name = f"{record.partition}-{record.offset}"
    if model_of(headers, GROUP_RECORDS) is GroupClaim:
        claim = claim_of(record)
        return redeem(store(), claim).tobytes(), claim.content_type, claim.group_id or name
    if record.value is None:
        raise CodecError(DeadLetterReason.NOT_JSON, "", "the record has no value")
    return record.value, headers.get("content-type", JSON_TYPE), name


def claim_of(record: ConsumerRecord) -> GroupClaim:
    """A record that is a claim.

    Raises:
        CodecError: it can't be read.
    """
    claim = open_record(record.value, header_text(record.headers), (GroupClaim,))
    assert isinstance(claim, GroupClaim)  # noqa: S101 - narrows the type: nothing else was asked for
    return claim
