"""Compressed data is unpacked within a bound that is set before it is read.

aiokafka unpacks a whole batch at once, whatever comes out: 13 KB on the broker can be 400 MB in memory. Importing this module puts a bound
around the codecs that aiokafka's record classes use. The bound holds inside `bounded()`, which `polling` enters for every read of
Headrace; consumers of the process that do not belong to Headrace are as before.

Guarantees: inside `bounded()` no batch becomes more than `MAX_BATCH_BYTES`, with any of Kafka's codecs and any number of frames, nor, if it
is large, more than `MAX_PARTS` records and headers, each of which is an object in Python; whatever is wrong with it, the error is an
`UnpackingError`. `unpack_zstd` makes no more than it is told. Decompression stops at the bound.
Limitations: the bound is per batch, so a reader takes few records at a time (`polling`). The codecs are replaced in the modules of
aiokafka's public record classes, under the names that aiokafka gives them there; a test reads real batches beyond the bound.
"""

import gzip
import io
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import cramjam
import numpy as np
from aiokafka.record import default_records, legacy_records
from aiokafka.record.util import decode_varint

from headrace.core.outages import said

MAX_BATCH_BYTES = 32 * 1024 * 1024
"""Twice the largest record that any part of Headrace writes."""
MAX_PARTS = 100_000
"""Records and headers of a batch above `_LARGE_BYTES`."""
_LARGE_BYTES = 4 * 1024 * 1024

_XERIAL = b"\x82SNAPPY\x00\x00\x00\x00\x01\x00\x00\x00\x01"
"""What Java's snappy streams begin with; blocks follow, each behind its size."""
_BLOCK_SIZE = struct.Struct(">i")

_is_bounded: ContextVar[bool] = ContextVar("headrace_unpacking_is_bounded", default=False)


class UnpackingError(Exception):
    """The data becomes larger than the bound, or can't be decompressed."""


class TooLargeError(UnpackingError):
    """The data becomes larger than the bound."""


@contextmanager
def bounded() -> Iterator[None]:
    """Bound what aiokafka unpacks for this task."""
    token = _is_bounded.set(True)
    try:
        yield
    finally:
        _is_bounded.reset(token)


def unpack_zstd(packed: bytes | memoryview, most: int) -> bytes:
    """The content of zstd frames.

    Raises:
        TooLargeError: it is more than `most` bytes.
        UnpackingError: it is no zstd.
    """
    return _into_room(cramjam.zstd.decompress_into, packed, most)


def _gzip(packed: bytes | memoryview, most: int) -> bytes:
    with gzip.GzipFile(fileobj=io.BytesIO(packed), mode="r") as stream:
        data = stream.read(most + 1)
    if len(data) > most:
        raise TooLargeError(_too_large(packed, most))
    return data


def _snappy(packed: bytes | memoryview, most: int) -> bytes:
    view = memoryview(packed)
    if bytes(view[: len(_XERIAL)]) != _XERIAL:
        return _snappy_block(view, most)
    parts, at, left = [], len(_XERIAL), most
    while at < len(view):
        (size,) = _BLOCK_SIZE.unpack_from(view, at)
        if size < 0:
            raise UnpackingError(f"a snappy block of {size} bytes")
        at += _BLOCK_SIZE.size
        try:
            parts.append(_snappy_block(view[at : at + size], left))
        except TooLargeError:
            raise TooLargeError(_too_large(packed, most)) from None
        left -= len(parts[-1])
        at += size
    return b"".join(parts)


def _snappy_block(block: memoryview, most: int) -> bytes:
    """A block declares its size, and snappy makes no more of it than that."""
    if cramjam.snappy.decompress_raw_len(block) > most:
        raise TooLargeError(_too_large(block, most))
    return bytes(cramjam.snappy.decompress_raw(block))


def _lz4(packed: bytes | memoryview, most: int) -> bytes:
    return _into_room(cramjam.lz4.decompress_into, packed, most)


def _into_room(decompress_into: Callable[..., int], packed: bytes | memoryview, most: int) -> bytes:
    """Decompress into memory of `most` bytes: the decompressor stops where that is full, and pages that it does not reach cost nothing."""
    room = np.empty(most, np.uint8)
    try:
        return room[: decompress_into(packed, room.data)].tobytes()
    except cramjam.DecompressionError as error:
        if "whole buffer" in str(error):
            raise TooLargeError(_too_large(packed, most)) from error
        raise UnpackingError(str(error)) from error


def _too_large(packed: bytes | memoryview, most: int) -> str:
    return f"{len(packed)} bytes unpack to more than {most}"


def _check_parts(records: bytes) -> None:
    """Count records and headers without making any; what can't be counted is left to aiokafka, which says what is wrong."""
    at = parts = 0
    while at < len(records):
        try:
            length, start = decode_varint(records, at)
            count, _ = decode_varint(records, headers_at(records, start))
        except IndexError:
            return
        if length <= 0:
            return
        at = start + length
        parts += 1 + max(count, 0)
        if parts > MAX_PARTS:
            raise TooLargeError(f"it has more than {MAX_PARTS} records and headers")


def headers_at(records: bytes | bytearray, start: int) -> int:
    """Where the number of a record's headers stands.

    Args:
        records: Of a batch, unpacked.
        start: Of this record, behind its length.
    """
    for _ in range(3):  # attributes, time, offset
        _, start = decode_varint(records, start)
    for _ in range(2):  # key, value
        size, start = decode_varint(records, start)
        start += max(size, 0)
    return start


def _guarded(
    plain: Callable[..., bytes], unpack: Callable[[bytes | memoryview, int], bytes], check: Callable[[bytes], object]
) -> Callable[..., bytes]:
    def decode(packed: bytes | memoryview) -> bytes:
        if not _is_bounded.get():
            return plain(packed)
        try:
            records = unpack(packed, MAX_BATCH_BYTES)
            if len(records) > _LARGE_BYTES:
                check(records)
        except UnpackingError:
            raise
        except Exception as error:  # each codec has errors of its own
            raise UnpackingError(said(error)) from error
        return records

    return decode


_CODECS = {"gzip_decode": _gzip, "snappy_decode": _snappy, "lz4_decode": _lz4, "zstd_decode": unpack_zstd}


def _install() -> None:
    """Guard the codecs of both kinds of batches, in Python and in C."""
    kinds = ((default_records, default_records.DefaultRecordBatch, _check_parts), (legacy_records, legacy_records.LegacyRecordBatch, len))
    for python, kind, check in kinds:
        for module in {python, sys.modules[kind.__module__]}:
            for name, unpack in _CODECS.items():
                if (plain := getattr(module, name, None)) is not None:
                    setattr(module, name, _guarded(plain, unpack, check))


_install()
