"""The batches of an answer, checked and unpacked one after the other, just before their records are read.

The checksum is computed by the processor, while the batch comes into its cache; zstd is undone by `zstandard`, into memory that is kept,
in three quarters of the time that aiokafka's codec and its copies take.

Guarantees: the records and errors of aiokafka, by aiokafka's own reading of records. Each batch's checksum is verified before anything of
it is unpacked. Whatever is not as usual (an older kind of batch, a wrong checksum, a frame that can't be decompressed or is very large) is
left to aiokafka, which says what it is. Gives up: independence of aiokafka's internals, as `swift_consumer.py`.
"""

import struct
from typing import Any

import google_crc32c
import numpy as np
import zstandard
from aiokafka.consumer.fetcher import PartitionRecords
from aiokafka.record.default_records import DefaultRecordBatch
from aiokafka.record.memory_records import MemoryRecords

_BATCH = struct.Struct(">qiibIh")
"""Base offset, length of what follows the length, leader epoch, magic, checksum of what follows the checksum, attributes."""
_LENGTH_END, _CHECKSUM_END = 12, 21
_SMALLEST = 61
"""Bytes of a batch without records."""
_MAGIC = 2
_CODEC, _CONTROL, _ZSTD = 0x07, 0x20, 4
_CODEC_AT = 22
_FRAME = b"\x28\xb5\x2f\xfd"
_REPEATED_BYTE = 1
_NOTHING = bytes(16)
"""Behind a batch: aiokafka reads a number that stands at its very end, where one is missing, out of what is behind it."""

ROOM = 2 << 20
"""For a batch that is unpacked: what a client makes of one is half of that at most, unless a limit was raised."""


def make_swift(records: Any, data: bytes | None, room: bytearray) -> None:  # noqa: ANN401 - aiokafka is untyped
    """Have these records, of which none was read yet, unpacked here, if they are of the usual kind.

    Args:
        records: As aiokafka made them of the answer, or what it has instead.
        data: The part of the answer that they were made of.
        room: `ROOM` bytes, kept for records of this partition: of the batch that was unpacked there before nothing is read any more.
    """
    if not data or type(records) is not PartitionRecords or type(records._records) is not MemoryRecords:
        return
    if (bounds := _bounds(data)) is not None:
        records._records = _Batches(data, bounds, records, room)


def _bounds(data: bytes) -> list[tuple[int, int]] | None:
    """Where the batches stand; None where one is of an older kind. The last may be cut off: nobody reads it."""
    found = []
    at = 0
    while len(data) - at >= _BATCH.size:
        _, length, _, magic, _, _ = _BATCH.unpack_from(data, at)
        stop = at + _LENGTH_END + length
        if magic != _MAGIC or stop < at + _SMALLEST:
            return None
        if stop > len(data):
            break
        found.append((at, stop))
        at = stop
    return found


class _Batches:
    """In the place of aiokafka's `MemoryRecords`.

    Args:
        data: Batches.
        bounds: Of each.
        reader: Who asks for them, and verifies the checksum of each that it gets, if told so.
        room: One is unpacked there, after the one before was read.
    """

    def __init__(self, data: bytes, bounds: list[tuple[int, int]], reader: PartitionRecords, room: bytearray) -> None:
        self._data = data
        self._bytes = np.frombuffer(data, np.uint8)  # slices without copies, which the library takes; it takes no memoryview
        self._left = iter(bounds)
        self._next = next(self._left, None)
        self._reader, self._room = reader, room
        self._checked = reader._check_crcs

    def has_next(self) -> bool:
        """Whether there is another one."""
        return self._next is not None

    def size_in_bytes(self) -> int:
        """Of the answer's part."""
        return len(self._data)

    def next_batch(self) -> object:
        """The next one."""
        if self._next is None:
            return None
        at, stop = self._next
        self._next = next(self._left, None)
        checksum, attributes = _BATCH.unpack_from(self._data, at)[4:]
        fine = google_crc32c.implementation == "c" and google_crc32c.value(self._bytes[at + _CHECKSUM_END : stop]) == checksum
        self._reader._check_crcs = self._checked and not fine
        batch = memoryview(self._data)[at:stop]
        unpacked = _unpacked(batch, self._room) if fine and attributes & (_CODEC | _CONTROL) == _ZSTD else None
        return DefaultRecordBatch(batch if unpacked is None else unpacked)


def _unpacked(batch: memoryview, room: bytearray) -> memoryview | None:
    """The batch as it would be without zstd, in `room`; None where that is not one whole frame that fits."""
    packed = batch[_SMALLEST:]
    try:
        if not _is_one_frame(packed):
            return None
        with _decompressor.stream_reader(packed) as reading:
            size = _SMALLEST + reading.readinto(memoryview(room)[_SMALLEST : -len(_NOTHING)])
    except (zstandard.ZstdError, IndexError):
        return None
    if size == len(room) - len(_NOTHING):
        return None
    room[:_SMALLEST] = batch[:_SMALLEST]
    room[size : size + len(_NOTHING)] = _NOTHING
    room[_CODEC_AT] &= ~_CODEC
    return memoryview(room)[:size]


def _is_one_frame(packed: memoryview) -> bool:
    """Whether these bytes are a frame with all its blocks, and nothing behind it: `readinto` says nothing of an end that is missing."""
    if packed[:4] != _FRAME:
        return False
    at = zstandard.frame_header_size(packed)
    last = 0
    while not last:
        head = packed[at] | packed[at + 1] << 8 | packed[at + 2] << 16
        last, kind, size = head & 1, head >> 1 & 3, head >> 3
        at += 3 + (1 if kind == _REPEATED_BYTE else size)
    return at + 4 * zstandard.get_frame_parameters(packed).has_checksum == len(packed)


_decompressor = zstandard.ZstdDecompressor()
