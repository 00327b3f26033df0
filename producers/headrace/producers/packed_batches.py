"""Batches that are compressed while the one before them is on its way.

aiokafka sends a partition one batch at a time and compresses it, on the event loop, when its turn comes. Here a batch that is full is
compressed in a thread at once, and any other large one in a thread when its turn comes.

Guarantees: the bytes that aiokafka would send, with the sequence number that the batch has when its turn comes: it is known when the batch
is full, since all batches before it have theirs; should it have changed, it is put right. Nothing is sent earlier or in another order.
Gives up: independence of aiokafka's internals, which offer no place for this (hence aiokafka<0.15, and tests).
"""

import asyncio
import struct
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.producer.message_accumulator import BatchBuilder
from aiokafka.record.util import calc_crc32c

State = tuple[int, int, int]
"""Producer id and epoch, and the sequence number of a batch's first record."""

_LARGE_BYTES = 32 * 1024
_CHECKSUM, _CHECKED = struct.Struct(">I"), 17
_STATE, _STATE_AT = struct.Struct(">qhi"), 43


def pack_in_threads(client: AIOKafkaProducer, threads: Executor) -> None:
    """Have the large batches of a client compressed in these threads, before the client asks for them."""
    accumulator, sender, transactions = client._message_accumulator, client._sender, client._txn_manager
    create, append, send = accumulator.create_builder, accumulator._append_batch, sender._send_produce_req

    def create_builder(*args: Any, **options: Any) -> Any:  # noqa: ANN401 - aiokafka is untyped
        builder = create(*args, **options)
        builder.__class__ = _PackedBuilder
        return builder

    def append_batch(builder: Any, where: TopicPartition) -> Any:  # noqa: ANN401 - as above
        def expected() -> State:
            return transactions.producer_id, transactions.producer_epoch, transactions.sequence_number(where)

        builder.packing = _Packing(threads, expected)
        return append(builder, where)

    async def pack_then_send(node_id: int, batches: dict[TopicPartition, Any]) -> None:
        under_way = [batch._builder.begun() for batch in batches.values() if batch._builder.size() > _LARGE_BYTES]
        if under_way:
            await asyncio.wait([asyncio.wrap_future(packed) for packed in under_way])
        await send(node_id, batches)

    accumulator.create_builder, accumulator._append_batch, sender._send_produce_req = create_builder, append_batch, pack_then_send


class _Packing:
    """Of one batch: what its builder has beyond aiokafka's."""

    def __init__(self, threads: Executor, expected: Callable[[], State]) -> None:
        self.threads = threads
        self.expected = expected
        self.begun: Future[bytearray] | None = None
        self.size = 0
        self.told: State | None = None
        """What the bytes were packed with, before it was the batch's turn."""
        self.due: State | None = None


class _PackedBuilder(BatchBuilder):  # type: ignore[misc]  # aiokafka is untyped
    packing: _Packing
    _buffer: bytearray | None

    def append(self, **record: Any) -> Any:  # noqa: ANN401 - as above
        metadata = super().append(**record)
        if metadata is None and self.packing.begun is None and self.size() > _LARGE_BYTES:
            self.packing.told = self.packing.expected()
            self._builder.set_producer_state(*self.packing.told)
            self.begun()
        return metadata

    def begun(self) -> "Future[bytearray]":
        """The bytes, which a thread makes, from now on if not already; the batch takes no more records."""
        packing = self.packing
        if packing.begun is None:
            self.close()
            packing.size = self._builder.size()
            packing.begun = packing.threads.submit(_packed, self._builder)
        return packing.begun

    def size(self) -> int:
        return self.packing.size if self.packing.begun is not None and self._buffer is None else int(super().size())

    def _set_producer_state(self, producer_id: int, producer_epoch: int, base_sequence: int) -> None:
        if self.packing.begun is None:
            super()._set_producer_state(producer_id, producer_epoch, base_sequence)
        else:
            self.packing.due = (producer_id, producer_epoch, base_sequence)

    def _build(self) -> bytearray:
        packing = self.packing
        if self._buffer is None and packing.begun is not None:
            made = packing.begun.result()
            if packing.due not in {None, packing.told}:
                _STATE.pack_into(made, _STATE_AT, *packing.due)
                _CHECKSUM.pack_into(made, _CHECKED, calc_crc32c(memoryview(made)[_CHECKED + _CHECKSUM.size :]))
            self._buffer = made
            del self._builder  # as aiokafka does: it has done its work
        buffer: bytearray = super()._build()
        return buffer


def _packed(builder: Any) -> bytearray:  # noqa: ANN401 - as above
    made: bytearray = builder.build()
    return made
