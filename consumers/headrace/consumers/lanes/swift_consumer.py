"""An aiokafka consumer that touches what it fetches fewer times: a lane's reader spends most of its time on moving bytes.

aiokafka collects an answer in pieces, each with a turn of the event loop and copies of its own, and computes checksums in software, which
is a third of all it does. Here an answer is received into one buffer, out of which its batches are copied once; `swift_batches.py` checks
and unpacks them.

Guarantees: the records, errors and requests of `AIOKafkaConsumer`. Connections are taken over while nothing is under way on them, and end
as aiokafka ends them. Gives up: independence of aiokafka's internals: it needs the release that pyproject.toml names (as
`core/raw_fetch.py`).
"""

import asyncio
import struct
import time
import weakref
from collections import defaultdict
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.conn import AIOKafkaConnection, CloseReason
from aiokafka.protocol.fetch import FetchRequest

from headrace.consumers.lanes.swift_batches import ROOM, make_swift

_SIZE = struct.Struct(">i")
_ROOM = 5 << 20
"""For most answers: as many bytes as a lane's reader asks for, and a little more."""


class SwiftConsumer(AIOKafkaConsumer):  # type: ignore[misc]  # aiokafka is untyped
    """As `AIOKafkaConsumer`; arguments as there."""

    async def start(self) -> None:
        """Connect."""
        self._plain_send, self._plain_connection = self._client.send, self._client._get_conn
        self._client.send, self._client._get_conn = self._send, self._connection
        self._rooms: defaultdict[TopicPartition, bytearray] = defaultdict(lambda: bytearray(ROOM))
        """Memory that is kept is faster; pages of it that nothing was written to cost nothing."""
        await super().start()
        self._plain_process, self._fetcher._proc_fetch_request = self._fetcher._proc_fetch_request, self._process

    async def _connection(self, *args: object, **options: object) -> AIOKafkaConnection | None:
        connection = await self._plain_connection(*args, **options)
        if connection is not None:
            take_over(connection)
        return connection

    async def _send(self, node_id: int, request: object, **options: object) -> Any:  # noqa: ANN401 - any answer of Kafka's
        answer = await self._plain_send(node_id, request, **options)
        if isinstance(request, FetchRequest):
            request.answer = answer
        return answer

    async def _process(self, assignment: object, node_id: int, request: Any) -> Any:  # noqa: ANN401 - aiokafka is untyped
        found = await self._plain_process(assignment, node_id, request)
        # No turn of the loop since the fetcher has made records of the answer: nobody has read one.
        answer = vars(request).pop("answer", None)
        for topic, partitions in () if answer is None else answer.topics:
            for partition, *_, data in partitions:
                where = TopicPartition(topic, partition)
                records = getattr(self._fetcher._records.get(where), "_partition_records", None)
                make_swift(records, data, self._rooms[where])
        return found


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
        body = self._buffer
        self._await_size()
        if (connection := self._connection()) is not None and not _fetched(connection, body):
            connection._handle_frame(bytes(body))

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


def _fetched(connection: AIOKafkaConnection, body: memoryview) -> bool:
    """Answer a fetch as aiokafka does, but without its copy of all the answer; False: it is another answer, or not the one that is due."""
    correlation_id, request, future = connection._requests[0]
    if correlation_id is None or request.API_KEY != FetchRequest.API_KEY or future.done():
        return False
    reading = _Reading(body)
    if request.parse_response_header(reading).correlation_id != correlation_id:
        return False
    future.set_result(request.RESPONSE_TYPE.decode(reading))
    connection._last_action = time.monotonic()
    connection._requests.popleft()
    return True


class _Reading:
    """What aiokafka's types read from."""

    def __init__(self, body: memoryview) -> None:
        self._body = body
        self._at = 0

    def read(self, count: int) -> bytes:
        """The next bytes, fewer at the end."""
        begin = self._at
        self._at = begin + count
        return bytes(self._body[begin : self._at])
