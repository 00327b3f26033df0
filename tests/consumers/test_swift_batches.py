"""Batches that are checked and unpacked by the fast way are those that aiokafka unpacks, and what it refuses is refused as it does."""

import random
import re
from collections.abc import Callable, Iterable
from typing import Any

import cramjam
import google_crc32c
import pytest
import zstandard
from aiokafka import TopicPartition
from aiokafka.consumer.fetcher import READ_COMMITTED, PartitionRecords
from aiokafka.errors import CorruptRecordException
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.record.legacy_records import LegacyRecordBatchBuilder
from aiokafka.record.memory_records import MemoryRecords

from headrace.consumers.lanes.swift_batches import ROOM, _Batches, make_swift

GZIP, LZ4, ZSTD = 1, 3, 4
WHERE = TopicPartition("t", 0)
HEAD = 61


def batch(values: Iterable[bytes | None], codec: int = 0, first: int = 0, *, transactional: bool = False) -> bytes:
    builder = DefaultRecordBatchBuilder(2, codec, transactional, 7 if transactional else -1, 0, -1, 1 << 24)
    for i, value in enumerate(values):
        builder.append(i, 1000 + i, b"key" if i % 2 else None, value, [("name", b"%d" % i), ("nothing", None)])
    made = bytearray(builder.build())
    made[:8] = first.to_bytes(8, "big")  # not under the checksum
    return bytes(made)


def repacked(plain: bytes, pack: Callable[[bytes], bytes]) -> bytes:
    """A batch of zstd with another body than aiokafka packs, and the checksum that belongs to it."""
    body = pack(plain[HEAD:])
    made = bytearray(plain[:HEAD] + body)
    made[8:12] = (len(made) - 12).to_bytes(4, "big")
    made[22] |= ZSTD
    made[17:21] = google_crc32c.value(bytes(made[21:])).to_bytes(4, "big")
    return bytes(made)


def records_of(data: bytes, *, swift: bool, aborted: list[tuple[int, int]] | None = None) -> PartitionRecords:
    records = PartitionRecords(WHERE, MemoryRecords(data), aborted, 0, None, None, True, READ_COMMITTED)
    if swift:
        make_swift(records, data, bytearray(ROOM))
        assert type(records._records) is _Batches
    return records


def read(data: bytes, *, swift: bool, aborted: list[tuple[int, int]] | None = None) -> tuple[list[Any], Any, int]:
    """The records, the error that ended them (without its numbers: positions count from elsewhere), where the next begins."""
    records = records_of(data, swift=swift, aborted=aborted)
    found: list[Any] = []
    try:
        found.extend(records)
    except Exception as error:  # noqa: BLE001 - to compare it
        return found, (type(error), re.sub(r"\d+", "n", str(error))), records.next_fetch_offset
    return found, None, records.next_fetch_offset


@pytest.mark.parametrize("codec", [0, GZIP, LZ4, ZSTD])
def test_each_codecs_records_are_read_up_to_a_batch_that_is_cut_off(codec: int) -> None:
    rng = random.Random(codec)
    whole = batch([b"a", None, b"", rng.randbytes(300_000)], codec) + batch([b"b" * 5000], codec, 4)
    for data in (whole, whole[:-1], whole + whole[:30]):
        assert read(data, swift=True) == read(data, swift=False)
    records, error, upto = read(whole, swift=True)
    assert (len(records), error, upto) == (5, None, 5)


def test_zstd_is_unpacked_by_the_swift_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cramjam.zstd, "decompress", None)  # aiokafka's
    assert [record.value for record in read(batch([b"a", b"b" * 5000], ZSTD), swift=True)[0]] == [b"a", b"b" * 5000]


def test_batches_of_an_aborted_transaction_are_passed_by() -> None:
    data = batch([b"a"], ZSTD) + batch([b"b", b"c"], ZSTD, 1, transactional=True) + batch([b"d"], ZSTD, 3)
    assert read(data, swift=True, aborted=[(7, 1)]) == read(data, swift=False, aborted=[(7, 1)])
    assert [record.value for record in read(data, swift=True, aborted=[(7, 1)])[0]] == [b"a", b"d"]


@pytest.mark.parametrize("at", [17, 21, 40, -1])
@pytest.mark.parametrize("codec", [0, ZSTD])
def test_a_batch_with_another_byte_in_its_checksum_or_in_what_that_covers_is_refused(at: int, codec: int) -> None:
    one, other = batch([b"a"], codec), bytearray(batch([b"b", b"c"], codec, 1))
    other[at] ^= 0x80
    assert read(one + other, swift=True) == read(one + other, swift=False)
    found, error, _ = read(one + other, swift=True)
    assert ([record.value for record in found], error[0]) == ([b"a"], CorruptRecordException)


def test_batches_of_an_older_kind_are_left_to_aiokafka() -> None:
    older = LegacyRecordBatchBuilder(1, 0, 1 << 16)
    older.append(0, 1, None, b"old")
    data = bytes(older.build())
    records = PartitionRecords(WHERE, MemoryRecords(data), None, 0, None, None, True, READ_COMMITTED)
    make_swift(records, data, bytearray(ROOM))
    assert type(records._records) is MemoryRecords


def test_frames_that_are_not_as_usual_are_read_as_aiokafka_reads_them() -> None:
    plain = batch([b"a" * 100, b"b" * 3000, b"c"])
    usual = zstandard.ZstdCompressor()
    kinds: dict[str, Callable[[bytes], bytes]] = {
        "usual": usual.compress,
        "no size": zstandard.ZstdCompressor(write_content_size=False).compress,
        "with a checksum": zstandard.ZstdCompressor(write_checksum=True).compress,
        "two frames": lambda body: usual.compress(body[:500]) + usual.compress(body[500:]),
        "no frame": lambda body: body,
        "nothing": lambda _: b"",
        "empty frame": lambda _: usual.compress(b""),
        "bytes behind it": lambda body: usual.compress(body) + b"more",
        "wrong checksum": lambda body: zstandard.ZstdCompressor(write_checksum=True).compress(body)[:-1] + b"?",
        "cut off": lambda body: usual.compress(body)[:-1],
        "its last block is missing": lambda body: bytes(cramjam.zstd.compress(body))[:-3],
        "a record too few": lambda body: usual.compress(body[: len(body) - 20]),
        "a record too many": lambda body: usual.compress(body + body[-20:]),
    }
    read_well = []
    for name, pack in kinds.items():
        data = batch([b"before"], ZSTD) + repacked(b"\0" * 7 + b"\1" + plain[8:], pack)
        assert read(data, swift=True) == read(data, swift=False), name
        if read(data, swift=True)[1] is None:
            read_well.append(name)
    assert read_well == ["usual", "no size", "with a checksum", "two frames"]


def test_a_batch_that_is_larger_than_usual_is_read_as_aiokafka_reads_it() -> None:
    for write_size in (True, False):
        data = repacked(batch([bytes(3 << 20), b"a"]), zstandard.ZstdCompressor(write_content_size=write_size).compress)
        assert read(data, swift=True) == read(data, swift=False)
        assert len(read(data, swift=True)[0]) == 2


def test_whatever_the_frames_bytes_are_they_are_read_and_refused_as_aiokafka_does() -> None:
    rng = random.Random(6)
    plain = batch([b"a" * 40, b"", rng.randbytes(200), b"b" * 300])
    packers = [zstandard.ZstdCompressor(write_content_size=size, write_checksum=check) for size in (True, False) for check in (True, False)]
    for _ in range(1000):

        def pack(body: bytes) -> bytes:
            changed = bytearray(rng.choice(packers).compress(body))
            for _ in range(rng.randint(0, 2)):
                changed[rng.randrange(min(len(changed), rng.choice((8, 20, 1000))))] = rng.randrange(256)
            return bytes(changed[: rng.choice((None, None, rng.randrange(len(changed))))])

        data = repacked(plain, pack)
        assert read(data, swift=True) == read(data, swift=False), data


def test_whatever_the_records_bytes_are_they_are_read_and_refused_as_aiokafka_does() -> None:
    rng = random.Random(5)
    plain = batch([b"a" * 40, None, b"", b"b" * 300])
    refused = 0
    for _ in range(1000):
        changed = bytearray(plain)
        for _ in range(rng.randint(1, 3)):
            changed[rng.randrange(HEAD, len(plain))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        if rng.random() < 0.2:
            del changed[rng.randrange(HEAD, len(plain)) :]
        if rng.random() < 0.1:
            changed[57:61] = rng.choice((-1, 0, 3, 5, 1 << 30)).to_bytes(4, "big", signed=True)
        data = repacked(bytes(changed), zstandard.ZstdCompressor().compress)
        swift, slow = read(data, swift=True), read(data, swift=False)
        assert swift == slow, bytes(changed)
        refused += swift[1] is not None
    assert 100 < refused < 980  # both ends are met


def test_a_name_that_is_no_text_raises_what_it_raises_for_aiokafka() -> None:
    data = repacked(batch([b"a", b"b"]).replace(b"name", b"n\xffme"), zstandard.ZstdCompressor().compress)
    assert read(data, swift=True) == read(data, swift=False)
    with pytest.raises(UnicodeDecodeError):
        list(records_of(data, swift=True))
