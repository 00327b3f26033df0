"""Records of topics that only our own parts write, told from what else stands there.

A broker takes anybody's records. Ours have their type in a header, stand under the key that they name themselves, and fit their schema.
Guarantees: what is not ours is never taken for ours, and ends no one's reading: each is left out, with one line in the log that says where
it stands; of a compacted topic the last record of Headrace under each key counts, whatever someone wrote over it. Limitations: records that
someone forges well; the process that may write there may do that (give Kafka ACLs). A compaction that took ours away for a foreign record.
"""

from collections.abc import Iterable, Sequence

from aiokafka import ConsumerRecord
from pydantic import BaseModel

from headrace.core.errors import HeadraceError
from headrace.core.polling import leave_out
from headrace.schemas.envelope import header_text, open_record, type_of
from headrace.schemas.reasons import CodecError, DeadLetterReason
from headrace.schemas.topics import key_of

_OF_ANOTHER_RELEASE = {DeadLetterReason.UNSUPPORTED_VERSION, DeadLetterReason.INVALID_SCHEMA}


class NotOursError(HeadraceError):
    """A record is not what its topic is for; says where it stands and what is wrong."""

    def __init__(self, record: ConsumerRecord, detail: str, *, claims: bool) -> None:
        super().__init__(f"{record.topic} partition {record.partition} offset {record.offset} can't be read: {detail}")
        self.detail = detail
        self.claims = claims
        """Its type is one of Headrace, and it is JSON: another release may have written it."""


def open_kept(record: ConsumerRecord, kinds: Sequence[type[BaseModel]]) -> BaseModel:
    """A record of Headrace.

    Args:
        record: Any of the topic.
        kinds: What the topic carries.

    Raises:
        NotOursError: it is none.
    """
    headers = header_text(record.headers)
    claimed = headers.get("ce_type", "").rpartition(".")[0]
    claims = any(type_of(kind).rpartition(".")[0] == claimed for kind in kinds)
    if not claims:
        detail = f"its ce_type is {headers['ce_type']!r}" if claimed else "it has no ce_type"
        raise NotOursError(record, f"{detail}, so it is none of Headrace's that belong here", claims=False)
    try:
        opened = open_record(record.value, headers, kinds)
    except CodecError as error:
        raise NotOursError(record, str(error), claims=error.reason in _OF_ANOTHER_RELEASE) from error
    key = key_of(opened)
    if key is not None and record.key != key.encode():
        raise NotOursError(record, f"it stands under the key {record.key!r}, and is about {key!r}", claims=False)
    return opened


def kept_or_none(record: ConsumerRecord, kinds: Sequence[type[BaseModel]]) -> BaseModel | None:
    """A record of Headrace; None, and a line in the log, where it is none."""
    try:
        return open_kept(record, kinds)
    except NotOursError as error:
        leave_out(record, error.detail)
        return None


def latest_kept(
    records: Iterable[ConsumerRecord], kinds: Sequence[type[BaseModel]], *, strict: bool = False
) -> list[tuple[ConsumerRecord, BaseModel]]:
    """The table that a compacted topic stands for: under each key of a partition the last record of Headrace, unless a tombstone follows.

    Args:
        records: Each partition in offset order.
        kinds: What the topic carries.
        strict: Not to leave out what another release may have written: an older state is no answer where a newer release has written one.

    Raises:
        NotOursError: of such a record, if strict.
    """
    by_key: dict[tuple[int, bytes], list[ConsumerRecord]] = {}
    for record in records:
        if record.key is None:
            continue
        if record.value is None:
            by_key.pop((record.partition, record.key), None)
        else:
            by_key.setdefault((record.partition, record.key), []).append(record)
    table: list[tuple[ConsumerRecord, BaseModel]] = []
    for written in by_key.values():
        for record in reversed(written):
            try:
                table.append((record, open_kept(record, kinds)))
            except NotOursError as error:
                if strict and error.claims:
                    raise
                leave_out(record, error.detail)
            else:
                break
    return table
