"""An aiokafka consumer that touches what it fetches fewer times: a lane's reader spends most of its time on moving bytes.

aiokafka collects an answer in pieces, each with a turn of the event loop and copies of its own, and computes checksums in software, which
is a third of all it does. Here an answer is received into one buffer, and checksums are computed by the processor.

Guarantees: the records, errors and requests of `AIOKafkaConsumer`. Each batch's checksum is verified; one that is wrong, or of an older
kind of batch, is left to aiokafka's own check, which says so. Connections are taken over while nothing is under way on them, and end as
aiokafka ends them. Gives up: independence of aiokafka's internals: it needs the release that pyproject.toml names (as `core/raw_fetch.py`).
"""

import asyncio
import struct
import weakref
from typing import Any

import google_crc32c
import numpy as np
from aiokafka import AIOKafkaConsumer
from aiokafka.conn import AIOKafkaConnection, CloseReason
from aiokafka.protocol.fetch import FetchRequest

_BATCH = struct.Struct(">qiibI")
"""Base offset, length of what follows the length, leader epoch, magic, checksum of what follows the checksum."""
_LENGTH_END, _CHECKSUM_END = 12, 21
_MAGIC = 2
_SIZE = struct.Struct(">i")
_ROOM = 5 << 20
"""For most answers: as many bytes as a lane's reader asks for, and a little more."""


class SwiftConsumer(AIOKafkaConsumer):  # type: ignore[misc]  # aiokafka is untyped
    """As `AIOKafkaConsumer`; arguments as there."""

    async def start(self) -> None:
        """Connect."""
        self._plain_send, self._plain_connection = self._client.send, self._client._get_conn
        self._client.send, self._client._get_conn = self._send, self._connection
        await super().start()

    async def _connection(self, *args: object, **options: object) -> AIOKafkaConnection | None:
        connection = await self._plain_connection(*args, **options)
        if connection is not None:
            take_over(connection)
        return connection

    async def _send(self, node_id: int, request: object, **options: object) -> Any:  # noqa: ANN401 - any answer of Kafka's
        answer = await self._plain_send(node_id, request, **options)
        if isinstance(request, FetchRequest) and self._fetcher is not None:
            # No await until the fetcher has asked for this: it makes records of the answer at once.
            sets = (partition[-1] for _topic, partitions in answer.topics for partition in partitions)
            self._fetcher._check_crcs = self._check_crcs and not all(map(intact, sets))
        return answer


def intact(batches: bytes | None) -> bool:
    """Whether all batches have their checksums; False also where that can't be said here. The last may be cut off: nobody reads it."""
    if google_crc32c.implementation != "c":
        return False
    if not batches:
        return True
    data = np.frombuffer(batches, np.uint8)  # slices without copies, which the library takes; it takes no memoryview
    at = 0
    while len(batches) - at >= _BATCH.size:
        _, length, _, magic, checksum = _BATCH.unpack_from(batches, at)
        stop = at + _LENGTH_END + length
        if magic != _MAGIC or stop < at + _CHECKSUM_END:
            return False
        if stop > len(batches):
            break
        if google_crc32c.value(data[at + _CHECKSUM_END : stop]) != checksum:
            return False
        at = stop
    return True


def take_over(connection: AIOKafkaConnection) -> None:
    """Receive the answers of a connection by `FrameProtocol` from now on, if nothing is under way on it."""
    if connection._writer is None or connection._requests or connection._reader._buffer:
        return
    transport = connection._writer.transport
    if isinstance(transport.get_protocol(), FrameProtocol) or transport.is_closing():
        return
    connection._read_task.cancel()
    transport.set_protocol(FrameProtocol(connection))


class FrameProtocol(asyncio.BufferedProtocol):
    """Receives Kafka's answers, each four bytes with its size and a body, into one buffer after the other.

    Args:
        connection: Whose answers they are.
    """

    def __init__(self, connection: AIOKafkaConnection) -> None:
        self._connection = weakref.ref(connection)
        self._streams: asyncio.StreamReaderProtocol = connection._protocol
        """What it was received by before: knows who waits for writing and closing."""
        self._room = bytearray(_ROOM)
        """Kept: memory that is new at each answer costs more than the bytes in it."""
        self._await_size()

    def _await_size(self) -> None:
        self._sized = False
        self._buffer = memoryview(self._room)[: _SIZE.size]
        self._filled = 0

    def _await_body(self) -> None:
        (size,) = _SIZE.unpack(self._buffer)
        if size <= 0:
            raise ValueError(f"an answer of {size} bytes")
        room = self._room if size <= len(self._room) else bytearray(size)
        self._sized = True
        self._buffer = memoryview(room)[:size]
        self._filled = 0

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's signature
        """Where the next bytes belong."""
        return self._buffer[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """So many bytes have come; an exception ends the connection."""
        self._filled += nbytes
        if self._filled < len(self._buffer):
            return
        if not self._sized:
            self._await_body()
            return
        body = bytes(self._buffer)
        self._await_size()
        if (connection := self._connection()) is not None:
            connection._handle_frame(body)

    def eof_received(self) -> bool | None:
        """The broker says no more."""
        self._streams.eof_received()
        self._end(EOFError("the broker closed the connection"))
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended, by whomever."""
        self._streams.connection_lost(exc)
        self._end(exc or EOFError("the connection was closed"))

    def pause_writing(self) -> None:
        """As before."""
        self._streams.pause_writing()

    def resume_writing(self) -> None:
        """As before."""
        self._streams.resume_writing()

    def _end(self, error: Exception) -> None:
        if (connection := self._connection()) is not None:
            connection.close(reason=CloseReason.CONNECTION_BROKEN, exc=error)
