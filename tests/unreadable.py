"""Records that a broker takes and the Kafka client can't hand over: a header's name is no UTF-8, or bytes stand behind a gzip stream."""

from collections.abc import Sequence

from aiokafka import AIOKafkaProducer
from aiokafka.record.default_records import _DefaultRecordBatchBuilderPy


class NotText(str):
    """A header name that is no UTF-8 on the wire."""

    __slots__ = ()

    def encode(self, *_: object) -> bytes:
        return b"\xff\xfe"


class _Torn(_DefaultRecordBatchBuilderPy):  # type: ignore[misc]  # aiokafka is untyped
    """A gzip stream with bytes behind it, which Java passes by and Python's gzip does not."""

    def _maybe_compress(self) -> bool:
        assert super()._maybe_compress()
        self._buffer += b"no gzip member"
        return True


Headers = list[tuple[str, bytes | None]]
UNREADABLE: Headers = [(NotText("x"), b"")]
"""Headers of a record that is unreadable."""


async def send_unreadable(producer: AIOKafkaProducer, topic: str, partition: int, key: bytes | None) -> int:
    """Write one with a header name that is no text; its offset."""
    return await send_batch(producer, topic, partition, [(key, b"{}", UNREADABLE)])


async def send_torn(producer: AIOKafkaProducer, topic: str, partition: int, key: bytes | None, count: int = 1) -> int:
    """Write a batch of `count` records that can't be decompressed; the offset of the first."""
    return await send_batch(producer, topic, partition, [(key, b"{}" + bytes(1000), [])] * count, torn=True)


async def send_batch(
    producer: AIOKafkaProducer,
    topic: str,
    partition: int,
    records: Sequence[tuple[bytes | None, bytes | None, Headers]],
    *,
    torn: bool = False,
    compression: int = 0,
) -> int:
    """Write records of any kind (key, value, headers) as one batch; the offset of the first."""
    batch = producer.create_batch()
    kind = _Torn if torn else _DefaultRecordBatchBuilderPy
    batch._builder = kind(
        magic=2,
        compression_type=1 if torn else compression,
        is_transactional=False,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        batch_size=16 * 1024 * 1024,
    )
    for key, value, headers in records:
        batch.append(key=key, value=value, timestamp=None, headers=headers)
    batch.close()
    return int((await (await producer.send_batch(batch, topic, partition=partition))).offset)
