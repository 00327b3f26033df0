"""What unpacks to more than the bound is refused before it is unpacked, with each of Kafka's codecs."""

import tracemalloc
from collections.abc import Callable

import pytest
from aiokafka import codec
from aiokafka.record.default_records import DefaultRecordBatch, _DefaultRecordBatchBuilderPy, _DefaultRecordBatchPy

from headrace.core import unpacking
from headrace.core.unpacking import TooLargeError, UnpackingError, bounded, unpack_zstd

CODECS = {"gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}
Headers = list[tuple[str, bytes | None]]


def batch(compression: int, value: bytes, headers: Headers | None = None, count: int = 1) -> bytes:
    builder = _DefaultRecordBatchBuilderPy(
        magic=2,
        compression_type=compression,
        is_transactional=False,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        batch_size=1 << 30,
    )
    for offset in range(count):
        builder.append(offset, None, None, value, headers or [])
    return bytes(builder.build())


@pytest.mark.parametrize("kind", [DefaultRecordBatch, _DefaultRecordBatchPy])
@pytest.mark.parametrize("compression", CODECS.values(), ids=CODECS.keys())
def test_a_batch_beyond_the_bound_is_refused_and_one_below_it_is_read(
    kind: Callable[[bytes], object], compression: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpacking, "MAX_BATCH_BYTES", 1_000_000)
    small, large = batch(compression, bytes(999_900)), batch(compression, bytes(1_000_001))
    with bounded():
        assert [record.value for record in kind(small)] == [bytes(999_900)]
        with pytest.raises(TooLargeError, match="more than 1000000"):
            list(kind(large))
    assert len(list(kind(large))) == 1, "who does not ask for the bound has none"


def test_snappy_blocks_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacking, "MAX_BATCH_BYTES", 100_000)
    packed = codec.snappy_encode(bytes(200_000), xerial_blocksize=32 * 1024)
    with pytest.raises(TooLargeError):
        unpacking._snappy(packed, 100_000)
    assert unpacking._snappy(packed, 200_000) == bytes(200_000)


@pytest.mark.parametrize("unpack", [unpacking._gzip, unpacking._lz4, unpacking._snappy, unpack_zstd])
def test_memory_is_bounded_by_what_is_asked_for(unpack: Callable[[bytes, int], bytes]) -> None:
    encode = getattr(codec, f"{unpack.__name__.removeprefix('_').removeprefix('unpack_')}_encode")
    bomb = encode(bytes(100_000_000))
    tracemalloc.start()
    try:
        with pytest.raises(TooLargeError):
            unpack(bomb, 1_000_000)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


def test_frames_are_bounded_together_and_what_is_no_zstd_is_said() -> None:
    frame = codec.zstd_encode(bytes(600))
    assert unpack_zstd(frame + frame, 1200) == bytes(1200)
    with pytest.raises(TooLargeError):
        unpack_zstd(frame + frame, 1199)
    with pytest.raises(UnpackingError):
        unpack_zstd(b"no zstd", 1200)


@pytest.mark.parametrize("cut", ["gzip", "snappy", "lz4", "zstd"])
def test_a_torn_batch_is_an_unpacking_error_with_each_codec(cut: str) -> None:
    torn = batch(CODECS[cut], bytes(1000))[:-3]
    with bounded(), pytest.raises(UnpackingError):
        list(_DefaultRecordBatchPy(torn))


def test_a_large_batch_with_millions_of_parts_is_refused_before_they_are_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacking, "_LARGE_BYTES", 10_000)
    monkeypatch.setattr(unpacking, "MAX_PARTS", 1000)
    with bounded():
        assert len(list(DefaultRecordBatch(batch(4, bytes(20), [("a", b"")], count=499)))) == 499
        with pytest.raises(TooLargeError, match="more than 1000 records and headers"):
            list(DefaultRecordBatch(batch(4, bytes(20_000), [("", None)] * 1001)))
        with pytest.raises(TooLargeError, match="more than 1000 records and headers"):
            list(DefaultRecordBatch(batch(4, bytes(20), count=1001)))
