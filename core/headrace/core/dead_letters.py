"""Dead letters as people look at them: what stands in `dead-letters`, and what became of each.

Guarantees: a letter shows its original's key and headers untouched, ours taken off; what someone sent again or dropped says so. A record
there that is neither a letter nor about one is passed by. The original of a letter that is cut is read where it was, and must have the
letter's digest. Limitations: a listing holds no values; `open_originals` reads them. Looking at one letter reads all that was written
behind it, since what became of it stands there.
"""

from collections.abc import Collection, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Self

from aiokafka import ConsumerRecord

from headrace.core.errors import HeadraceError
from headrace.core.fetching import fetch_offsets
from headrace.core.kafka import ClientOptions, client_options
from headrace.core.reading import OffsetLostError, offsets_since, stream_to_end
from headrace.core.settings import Settings
from headrace.core.topic_admin import partition_count
from headrace.schemas.dead_letters import (
    ERROR_REASON,
    ERROR_SHA256,
    ERROR_VALUE,
    DeadLetterResolved,
    record_digest,
    split_headers,
)
from headrace.schemas.dead_letters import is_dead_letter as is_letter
from headrace.schemas.envelope import header_text, open_record
from headrace.schemas.reasons import CodecError

CLIENT_ID = "headrace-dead-letters"
_EPOCH = datetime.fromtimestamp(0, UTC)


class NoSuchLetterError(HeadraceError):
    """No dead letter stands at a place, or the text names no place."""


class OriginalGoneError(HeadraceError):
    """A letter has only the beginning of its record, and the record is gone."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Place:
    """Where a letter is in `dead-letters`. Example: `Place.parse("3:17")`."""

    partition: int
    offset: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """From `PARTITION:OFFSET`.

        Raises:
            NoSuchLetterError: the text is no such thing.
        """
        partition, colon, offset = text.strip().partition(":")
        if not (colon and partition.isdecimal() and offset.isdecimal() and len(offset) < 19 and len(partition) < 10):
            raise NoSuchLetterError(
                f"{text!r} names no dead letter: write PARTITION:OFFSET as `headrace dlq list` shows them, such as 3:17"
            )
        return cls(partition=int(partition), offset=int(offset))

    def __str__(self) -> str:
        """As `parse` reads it."""
        return f"{self.partition}:{self.offset}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Original:
    """The record as it was, for the process that sends it again."""

    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """An original that was too large for its letter."""

    sha256: str
    """`record_digest` of it."""
    key_bytes: int
    headers: int
    """How many it has; the letter has the first ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """One letter, without its value."""

    place: Place
    key: bytes | None
    headers: tuple[tuple[str, bytes], ...]
    """The original's."""
    size: int | None
    """Bytes of the original's value; None: it had none."""
    cut: "Cut | None"
    """What is known of an original that the letter has only the beginning of; None: the letter has all of it."""
    reason: str
    """Of `DeadLetterReason`; a newer release may know more of them."""
    path: str
    detail: str
    error_type: str
    topic: str
    """Where the record came from: topic, partition, offset, and when it was written there."""
    partition: int
    offset: int
    sent_at: datetime | None
    written_at: datetime
    """When it became a dead letter."""
    resolved: DeadLetterResolved | None = None

    @property
    def model(self) -> str | None:
        """The model that the key names; None: there is no key, no text in it, or only its beginning."""
        try:
            return None if self.key is None or (self.cut is not None and self.cut.key_bytes > len(self.key)) else self.key.decode()
        except UnicodeDecodeError:
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterFilter:
    """Which letters. Example: `LetterFilter(reason="unknown_model")`."""

    reason: str | None = None
    keys: frozenset[str] | None = None
    """One of these is the key."""
    since: datetime | None = None
    """Became dead letters at this time or later."""
    resolved: bool = False
    """Those that were sent again or dropped too."""

    def fits(self, letter: DeadLetter) -> bool:
        """Whether a letter is meant."""
        return (
            (self.reason is None or letter.reason == self.reason)
            and (self.keys is None or letter.model in self.keys)
            and (self.since is None or letter.written_at >= self.since)
            and (self.resolved or letter.resolved is None)
        )


async def list_letters(settings: Settings, wanted: LetterFilter | None = None) -> list[DeadLetter]:
    """The letters that fit, by the time they were written; by default all that wait for someone.

    Raises:
        KafkaUnavailableError: no broker, or no such topic.
    """
    wanted = wanted or LetterFilter()
    options, topic = client_options(settings.kafka, CLIENT_ID), settings.topic_names.dead_letters
    # What became of a letter was written after it: nothing before the time matters.
    start = {} if wanted.since is None else await offsets_since(options, topic, wanted.since)
    found = await read_letters(options, topic, None, start)
    return sorted((letter for letter in found.values() if wanted.fits(letter)), key=lambda letter: (letter.written_at, letter.place))


async def get_letter(settings: Settings, place: Place) -> tuple[DeadLetter, Original]:
    """One letter with its original; of one that is cut, with what the letter has of it.

    Raises:
        NoSuchLetterError: none stands there.
        KafkaUnavailableError: no broker, or no such topic.
    """
    options, topic = client_options(settings.kafka, CLIENT_ID), settings.topic_names.dead_letters
    await require_partition(options, topic, place.partition)
    letter = (await read_letters_from(options, topic, place.partition, place.offset)).get(place)
    if letter is None:
        raise NoSuchLetterError(nothing_at(place))
    return letter, (await open_originals(options, topic, place.partition, [place.offset]))[place.offset]


async def read_letters(
    options: ClientOptions, topic: str, partitions: Collection[int] | None, start: Mapping[int, int]
) -> dict[Place, DeadLetter]:
    """All letters from the given offsets to the end that is written, each with what became of it.

    Raises:
        OffsetLostError: a start is not there any more.
    """
    letters: dict[Place, DeadLetter] = {}
    async with aclosing(stream_to_end(options, topic, partitions, start=start)) as batches:
        async for batch in batches:
            for record in batch:
                if is_letter(record.headers):
                    letter = open_letter(record)
                    letters[letter.place] = letter
                elif (said := _resolution(record)) is not None:
                    place = Place(partition=said.partition, offset=said.offset)
                    if place in letters:
                        letters[place] = replace(letters[place], resolved=said)
    return letters


async def read_letters_from(options: ClientOptions, topic: str, partition: int, first: int) -> dict[Place, DeadLetter]:
    """The letters of one partition from an offset on, as many as retention left."""
    try:
        return await read_letters(options, topic, [partition], {partition: first})
    except OffsetLostError:
        return await read_letters(options, topic, [partition], {})


async def open_originals(options: ClientOptions, topic: str, partition: int, offsets: Collection[int]) -> dict[int, Original]:
    """The records that letters stand for, by the letters' offsets.

    Raises:
        OffsetLostError: one is not there any more; names all that are gone.
    """
    return {offset: _original(record) for offset, record in (await fetch_offsets(options, topic, partition, offsets)).items()}


async def open_cut(options: ClientOptions, letter: DeadLetter) -> Original:
    """The original of a letter that is cut, from where it was.

    Raises:
        OriginalGoneError: it is not there any more, or another record is.
        KafkaUnavailableError: no broker, or no such topic.
    """
    assert letter.cut is not None  # noqa: S101 - the caller's to see
    where = f"{letter.topic} partition {letter.partition} offset {letter.offset}"
    begin = f"the letter has only the beginning of the record, which was {where}"
    try:
        record = (await fetch_offsets(options, letter.topic, letter.partition, [letter.offset]))[letter.offset]
    except OffsetLostError as error:
        raise OriginalGoneError(f"{begin} and is not there any more: have its sender send it again, then drop the letter") from error
    if record_digest(record.key, record.value, record.headers) != letter.cut.sha256:
        raise OriginalGoneError(f"{begin}; another record is there now: have its sender send it again, then drop the letter")
    return Original(key=record.key, value=record.value, headers=record.headers)


async def require_partition(options: ClientOptions, topic: str, partition: int) -> None:
    """Refuse a partition that the topic does not have.

    Raises:
        NoSuchLetterError: says which there are.
        KafkaUnavailableError: no broker, or no such topic.
    """
    count = await partition_count(options, topic)
    if partition >= count:
        raise NoSuchLetterError(f"there is no partition {partition}: {topic} has partitions 0 to {count - 1}")


def nothing_at(place: Place) -> str:
    """What to tell someone who names a place without a letter."""
    return (
        f"no dead letter stands at {place}: `headrace dlq list --all` shows those there are (retention deletes old ones, and offsets "
        "between them hold records of what became of a letter)"
    )


def open_letter(record: ConsumerRecord) -> DeadLetter:
    """A letter from its record.

    Raises:
        ValueError: the record is no dead letter.
    """
    headers, ours = split_headers(record.headers)
    value = _original(record).value
    size = None if value is None else len(value)
    cut = None
    if ERROR_SHA256 in ours:
        cut = Cut(sha256=ours[ERROR_SHA256], key_bytes=_number(ours, "key-bytes"), headers=_number(ours, "headers"))
        size = None if value is None else _number(ours, "value-bytes")
    return DeadLetter(
        place=Place(partition=record.partition, offset=record.offset),
        key=record.key,
        headers=headers,
        size=size,
        cut=cut,
        reason=ours[ERROR_REASON],
        path=ours.get("headrace-error-path", ""),
        detail=ours.get("headrace-error-detail", ""),
        error_type=ours.get("headrace-error-type", ""),
        topic=ours.get("headrace-error-topic", ""),
        partition=_number(ours, "partition"),
        offset=_number(ours, "offset"),
        sent_at=_time(_number(ours, "time")),
        written_at=_time(record.timestamp) or _EPOCH,
    )


def _original(record: ConsumerRecord) -> Original:
    headers, ours = split_headers(record.headers)
    return Original(key=record.key, value=None if ours.get(ERROR_VALUE) == "null" else record.value, headers=headers)


def _number(ours: Mapping[str, str], name: str) -> int:
    """A header of Headrace that is a number; -1 where it is none, as a record that can't be handed over has no time."""
    try:
        return int(ours.get(f"headrace-error-{name}", ""))
    except ValueError:
        return -1


def _time(milliseconds: int) -> datetime | None:
    """None where there is none: the time of a record is its sender's to set, to any number."""
    try:
        return None if milliseconds < 0 else datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return None


def _resolution(record: ConsumerRecord) -> DeadLetterResolved | None:
    try:
        opened = open_record(record.value, header_text(record.headers), (DeadLetterResolved,))
    except CodecError:
        return None  # another's record
    assert isinstance(opened, DeadLetterResolved)  # noqa: S101 - the only type that was allowed
    return opened if opened.partition == record.partition else None
