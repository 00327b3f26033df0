"""Sending dead letters again, or dropping them: once, the process that else tries it at the same time.

A partition of `dead-letters` has one transactional id for all who resolve its letters. The process that comes starts a producer with it,
which fences those before and waits for their last transaction to end; then reads the partition to the end that was written; then decides:
as lanes do (exactly-once rules 1 to 3). The record that is sent and the mark that it was are one transaction.

Guarantees: a letter is sent again at most once, and marked exactly if it was; one that is resolved already is refused with who, when and
where to. After anything but a clean commit, what happened is read again, never concluded from the error. A letter goes back to the topic
and partition it came from, or, where the partition was what was wrong with it, to that of its key. Limitations: one transaction for all
that was asked for; it is done in parts, so that no one who reads those topics waits for long.
"""

import asyncio
import logging
import random
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError

from headrace.core.dead_letters import (
    CLIENT_ID,
    DeadLetter,
    LetterFilter,
    NoSuchLetterError,
    Original,
    OriginalGoneError,
    Place,
    list_letters,
    nothing_at,
    open_cut,
    open_originals,
    read_letters_from,
    require_partition,
)
from headrace.core.deadline import deadline
from headrace.core.kafka import ClientOptions, client_options
from headrace.core.lanes import lane_of
from headrace.core.settings import Settings
from headrace.core.topic_admin import partition_counts
from headrace.core.unpacking import MAX_BATCH_BYTES
from headrace.schemas.dead_letters import DeadLetterResolved
from headrace.schemas.envelope import seal
from headrace.schemas.reasons import DeadLetterReason

logger = logging.getLogger(__name__)

Action = Literal["retried", "dropped"]
Delivery = asyncio.Future[Any]
"""What aiokafka gives for a record on its way: its topic, partition and offset."""
_SOURCE = "headrace/dead-letters"
_LETTERS_AT_ONCE = 32
_BYTES_AT_ONCE = 16 * 1024 * 1024
_TRIES = 5
_PAUSE = (0.5, 2.0)
"""Seconds between tries, drawn from here: longer than a try takes, so that two who fenced each other do not meet again."""
_COMMIT_SECONDS = 30.0
_STOP_SECONDS = 5.0
_TRANSACTION_TIMEOUT_MS = 10_000
"""An open transaction holds up who reads the lane: one of a process that was killed ends after this."""
_MAX_REQUEST_BYTES = 2 * MAX_BATCH_BYTES
"""More than any record that can be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one letter that was asked for."""

    place: Place
    resolved: DeadLetterResolved | None = None
    """As it was written by this call; None: it was refused."""
    refused: str | None = None
    """Why, and what to do."""


@dataclass(slots=True, kw_only=True)
class _Request:
    """What was asked for of one partition, and how far it is."""

    action: Action
    by: str
    offsets: Sequence[int]
    attempt: str
    outcomes: dict[int, Outcome] = field(default_factory=dict)


async def resolve(settings: Settings, action: Action, wanted: Sequence[Place] | LetterFilter, *, by: str) -> list[Outcome]:
    """Send letters again (`retried`), or decide to forget them (`dropped`: the record stays until retention takes it).

    Args:
        settings: Of this process.
        action: Which of both.
        wanted: Places, or all that fit and wait for someone.
        by: Who asks; written down.

    Returns:
        One outcome for each letter, in the order asked for.

    Raises:
        KafkaUnavailableError: no broker, or a topic is missing.
    """
    places = [letter.place for letter in await list_letters(settings, wanted)] if isinstance(wanted, LetterFilter) else wanted
    offsets: dict[int, list[int]] = defaultdict(list)
    for place in dict.fromkeys(places):
        offsets[place.partition].append(place.offset)
    outcomes: dict[Place, Outcome] = {}
    for partition, asked in offsets.items():
        request = _Request(action=action, by=by, offsets=sorted(asked), attempt=str(uuid.uuid4()))
        for offset, outcome in (await _LetterBox(settings, partition).resolve(request)).items():
            outcomes[Place(partition=partition, offset=offset)] = outcome
    return [outcomes[place] for place in dict.fromkeys(places)]


class _LetterBox:
    """One partition of `dead-letters`, for as long as no one else claims it."""

    def __init__(self, settings: Settings, partition: int) -> None:
        self._topics = settings.topic_names
        self._topic = self._topics.dead_letters
        self._partition = partition
        self._options: ClientOptions = client_options(settings.kafka, CLIENT_ID)
        self._counts: Mapping[str, int] = {}

    async def resolve(self, request: _Request) -> dict[int, Outcome]:
        try:
            await require_partition(self._options, self._topic, self._partition)
        except NoSuchLetterError as error:
            return {offset: self._outcome(offset, refused=str(error)) for offset in request.offsets}
        self._counts = await partition_counts(self._options)
        for tries in range(1, _TRIES + 1):
            try:
                await self._claim_and_resolve(request)
            except (KafkaError, TimeoutError, AssertionError) as error:
                # aiokafka answers some states after a fence with AssertionError. What happened is read by the next try (rule 3).
                logger.info("%s partition %d, try %d: %r", self._topic, self._partition, tries, error)
                last = error
                await asyncio.sleep(random.uniform(*_PAUSE) * tries)
            else:
                return request.outcomes
        unclear = (
            f"it is not known whether it was {request.action}: {_TRIES} tries ended in {type(last).__name__} ({last}). "
            "Someone else may be at the letters of this partition: `headrace dlq show` tells what became of it"
        )
        return {offset: self._outcome(offset, refused=unclear) for offset in request.offsets} | request.outcomes

    async def _claim_and_resolve(self, request: _Request) -> None:
        producer = AIOKafkaProducer(
            **self._options,
            transactional_id=f"{self._topic}-resolver-{self._partition}",
            transaction_timeout_ms=_TRANSACTION_TIMEOUT_MS,
            acks="all",
            linger_ms=0,
            retry_backoff_ms=20,
            max_request_size=_MAX_REQUEST_BYTES,
            compression_type="zstd",  # a record may be in its topic only because it was compressed
        )
        try:
            await producer.start()
            letters = await read_letters_from(self._options, self._topic, self._partition, request.offsets[0])
            todo = [letter for offset in request.offsets if (letter := self._judge(request, offset, letters)) is not None]
            for part in _parts(todo):
                originals = {}
                if request.action == "retried":
                    try:
                        originals = await self._originals(part)
                    except OriginalGoneError as error:  # a letter that is cut is a part of its own
                        request.outcomes[part[0].place.offset] = self._outcome(part[0].place.offset, refused=str(error))
                        continue
                async with deadline(_COMMIT_SECONDS):
                    request.outcomes |= await self._commit(producer, request, part, originals)
        finally:
            with suppress(KafkaError, AssertionError, TimeoutError):
                async with deadline(_STOP_SECONDS):
                    await producer.stop()

    async def _originals(self, part: Sequence[DeadLetter]) -> dict[int, Original]:
        """By the letters' offsets."""
        if part[0].cut is not None:
            return {part[0].place.offset: await open_cut(self._options, part[0])}
        return await open_originals(self._options, self._topic, self._partition, [letter.place.offset for letter in part])

    def _judge(self, request: _Request, offset: int, letters: Mapping[Place, DeadLetter]) -> DeadLetter | None:
        """The letter, if something is to be done about it; else its outcome is noted."""
        place = Place(partition=self._partition, offset=offset)
        letter = letters.get(place)
        if letter is None:
            request.outcomes[offset] = self._outcome(offset, refused=nothing_at(place))
        elif letter.resolved is not None and letter.resolved.attempt == request.attempt:
            request.outcomes[offset] = self._outcome(offset, resolved=letter.resolved)  # by a commit whose answer was lost
        elif letter.resolved is not None:
            request.outcomes[offset] = self._outcome(offset, refused=_resolved_already(letter.resolved))
        elif request.action == "retried" and (problem := self._why_not_again(letter)) is not None:
            request.outcomes[offset] = self._outcome(offset, refused=problem)
        else:
            return letter
        return None

    async def _commit(
        self, producer: AIOKafkaProducer, request: _Request, part: Sequence[DeadLetter], originals: Mapping[int, Original]
    ) -> dict[int, Outcome]:
        await producer.begin_transaction()
        try:
            records = [
                DeadLetterResolved(
                    partition=self._partition, offset=letter.place.offset, action=request.action, by=request.by, attempt=request.attempt
                )
                for letter in part
            ]
            if request.action == "retried":
                sent = await asyncio.gather(*[await self._send_again(producer, letter, originals) for letter in part])
                records = [
                    record.model_copy(update={"topic": to.topic, "new_partition": to.partition, "new_offset": to.offset})
                    for record, to in zip(records, sent, strict=True)
                ]
            await asyncio.gather(*[await self._mark(producer, letter, record) for letter, record in zip(part, records, strict=True)])
            await producer.commit_transaction()
        except BaseException:
            # The process that reads the lane should not wait for the time-out. Where this fails, that ends it.
            with suppress(KafkaError, AssertionError, TimeoutError):
                async with deadline(_STOP_SECONDS):
                    await producer.abort_transaction()
            raise
        return {record.offset: self._outcome(record.offset, resolved=record) for record in records}

    async def _send_again(self, producer: AIOKafkaProducer, letter: DeadLetter, originals: Mapping[int, Original]) -> Delivery:
        original = originals[letter.place.offset]
        partition = letter.partition
        if letter.reason == DeadLetterReason.WRONG_LANE and letter.model is not None:
            partition = lane_of(letter.model, self._counts[letter.topic])
        delivery: Delivery = await producer.send(
            letter.topic, value=original.value, key=original.key, partition=partition, headers=list(original.headers)
        )
        return delivery

    async def _mark(self, producer: AIOKafkaProducer, letter: DeadLetter, record: DeadLetterResolved) -> Delivery:
        value, headers = seal(record, source=_SOURCE)
        delivery: Delivery = await producer.send(self._topic, value=value, key=letter.key, partition=self._partition, headers=headers)
        return delivery

    def _why_not_again(self, letter: DeadLetter) -> str | None:
        came_from = f"{letter.topic} partition {letter.partition} offset {letter.offset}"
        too_large = letter.reason == DeadLetterReason.TOO_LARGE and letter.key is None and letter.size is None
        if too_large or letter.reason == DeadLetterReason.UNREADABLE_HEADERS:
            why = "they are more than a reader takes" if too_large else "no client here can read its headers"
            how = "in smaller batches" if too_large else "with header names in UTF-8"
            return (
                f"its bytes are not in the letter, because {why}: the record stays at {came_from} until retention takes it. "
                f"Have its sender send it again, {how}; then drop the letter"
            )
        if letter.topic not in {self._topics.trajectory_groups, self._topics.commands}:
            return (
                f"it came from {came_from}, which is no topic of this prefix ({self._topics.prefix}) that a worker reads: "
                "send it again with the settings of the workers that read that topic, or drop it"
            )
        count = self._counts.get(letter.topic, 0)
        if not 0 <= letter.partition < count:
            return f"it came from {came_from}, and that topic has {count} partitions now: it can't go back there"
        if letter.reason == DeadLetterReason.WRONG_LANE and letter.model is None:
            return "its partition was wrong, and no key says which is right: have its sender send it again with the model id as key"
        if letter.key is None and letter.size is None:
            return "it has neither key nor value: there is nothing to send"
        return None

    def _outcome(self, offset: int, *, resolved: DeadLetterResolved | None = None, refused: str | None = None) -> Outcome:
        return Outcome(place=Place(partition=self._partition, offset=offset), resolved=resolved, refused=refused)


def _parts(letters: Sequence[DeadLetter]) -> Iterator[Sequence[DeadLetter]]:
    """The letters as transactions; one that is cut is alone: its original may be large, and may be gone."""
    part: list[DeadLetter] = []
    for letter in letters:
        full = len(part) == _LETTERS_AT_ONCE or sum(other.size or 0 for other in part) > _BYTES_AT_ONCE
        if part and (full or letter.cut is not None or part[0].cut is not None):
            yield part
            part = []
        part.append(letter)
    if part:
        yield part


def _resolved_already(done: DeadLetterResolved) -> str:
    where = f": it is {done.topic} partition {done.new_partition} offset {done.new_offset}" if done.action == "retried" else ""
    return f"it was {done.action} by {done.by} at {done.resolved_at:%Y-%m-%d %H:%M:%S} UTC{where}"
