"""What stands between a Kafka record and a subscriber's function: reading, skipping, acknowledging, one record at a time.

FastStream's own way fails on a header that is not UTF-8, and its `ack` commits the position of every partition, past what failed.

Guarantees: our codec reads the record, and `ce_type` decides; another type and a tombstone are skipped; what can't be read is logged
with topic, partition and offset and skipped: an observer does not die of foreign data. With a group, a record's offset is committed
after its handler returned, that record's alone; a handler that raises gets the same record again, after a pause that grows to
`_LONGEST_PAUSE`, and nothing behind it in its partition is committed before (at least once). Without a group a failure is logged and
the next record comes (at most once). Limitations: with a group, progress of the subscriber's other partitions while one of its records
fails.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.errors import IllegalStateError, KafkaError
from faststream import BaseMiddleware
from faststream.exceptions import IgnoredException
from faststream.message import StreamMessage
from pydantic import BaseModel

from headrace.schemas.carried import CARRIED, topic_of
from headrace.schemas.dead_letters import is_dead_letter
from headrace.schemas.envelope import header_text, model_of, open_record
from headrace.schemas.errors import CodecError
from headrace.schemas.reasons import DeadLetterReason

logger = logging.getLogger(__name__)

_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0  # seconds; well below the time a group waits for its member's next poll

Parser = Callable[[ConsumerRecord], Awaitable[StreamMessage[Any]]]


async def parse(record: ConsumerRecord, original: Parser) -> StreamMessage[Any]:
    """FastStream's message of a record, whatever bytes its headers hold."""
    readable = tuple((name, value.encode()) for name, value in header_text(record.headers).items())
    return await original(replace(record, headers=readable))


class RecordScope:
    """The scope of one subscriber, made once; called for every record.

    Args:
        model: The record type that the function takes.
        durable: It has a group, so positions are kept.
    """

    def __init__(self, model: type[BaseModel], *, durable: bool) -> None:
        self.model = model
        self.durable = durable
        self._carried = CARRIED[topic_of(model)]
        self._pause = _FIRST_PAUSE

    def __call__(self, raw: ConsumerRecord, /, *, context: Any) -> "_Middleware":  # noqa: ANN401 - FastStream's own repository
        """What FastStream enters around a record."""
        return _Middleware(raw, context=context, scope=self)

    async def decode(self, message: StreamMessage[Any]) -> BaseModel | None:
        """The record; None for a tombstone.

        Raises:
            CodecError: it can't be read, or its topic does not carry it.
        """
        record: ConsumerRecord = message.raw_message
        if record.value is None:
            return None
        return open_record(record.value, message.headers, self._carried)

    async def consume(self, call: Callable[[Any], Awaitable[Any]], message: StreamMessage[Any]) -> Any:  # noqa: ANN401 - a handler's result
        """Run the handler on a record that is meant for it, and keep the position."""
        record: ConsumerRecord = message.raw_message
        result = None
        if await self._is_mine(message, record):
            try:
                result = await call(message)
            except IgnoredException:
                raise
            except Exception:
                if not self.durable:
                    raise
                await self._again(message, record)
                return None
        self._pause = _FIRST_PAUSE
        if self.durable:
            await self._commit(message, record)
        return result

    async def _is_mine(self, message: StreamMessage[Any], record: ConsumerRecord) -> bool:
        # A dead letter keeps its sender's `ce_type`, and may lack one: it is never a record of Headrace.
        if record.value is None or is_dead_letter(record.headers):
            return False
        try:
            return model_of(message.headers, self._carried) is self.model and await message.decode() is not None
        except CodecError as error:
            # Another type is everyday: a newer Headrace, or another's record. What claims to be ours and is broken is not.
            level = logging.DEBUG if error.reason is DeadLetterReason.UNKNOWN_TYPE else logging.WARNING
            logger.log(level, "skipped %s: %s: %s", _where(record), error.reason, error)
            return False

    async def _again(self, message: StreamMessage[Any], record: ConsumerRecord) -> None:
        """Stand at the failed record again, so that nothing behind it is delivered before it."""
        logger.exception("the handler of %s failed at %s; the record comes again in %g s", self.model.__name__, _where(record), self._pause)
        try:
            _consumer(message).seek(TopicPartition(record.topic, record.partition), record.offset)
        except IllegalStateError:
            logger.info("%s belongs to another member now, which gets it", _where(record))
            return
        await asyncio.sleep(self._pause)  # a pause between attempts, no synchronisation
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    async def _commit(self, message: StreamMessage[Any], record: ConsumerRecord) -> None:
        try:
            await _consumer(message).commit({TopicPartition(record.topic, record.partition): record.offset + 1})
        except KafkaError as error:
            # The partition moved to another member, or Kafka is away: the record may come again, which at least once allows.
            logger.warning("the position after %s was not kept: %s: %s", _where(record), type(error).__name__, error)


class _Middleware(BaseMiddleware[Any, Any]):
    def __init__(self, raw: ConsumerRecord, /, *, context: Any, scope: RecordScope) -> None:  # noqa: ANN401 - FastStream's own repository
        super().__init__(raw, context=context)
        self._scope = scope

    async def consume_scope(self, call_next: Callable[[Any], Awaitable[Any]], msg: StreamMessage[Any]) -> Any:  # noqa: ANN401 - a handler's result
        return await self._scope.consume(call_next, msg)


def _consumer(message: StreamMessage[Any]) -> AIOKafkaConsumer:
    return message.consumer  # type: ignore[attr-defined]  # KafkaMessage has it; the raw consumer


def _where(record: ConsumerRecord) -> str:
    return f"{record.topic} partition {record.partition} offset {record.offset}"
