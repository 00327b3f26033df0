"""A record that no client of ours can be handed: the name of a header is no UTF-8 text."""

from aiokafka import AIOKafkaProducer
from aiokafka.record.default_records import _DefaultRecordBatchBuilderPy


class NotText(str):
    """A header name that is no UTF-8 on the wire."""

    __slots__ = ()

    def encode(self, *_: object) -> bytes:
        return b"\xff\xfe"


async def send_unreadable(producer: AIOKafkaProducer, topic: str, partition: int, key: bytes | None) -> int:
    """Write one; its offset."""
    batch = producer.create_batch()
    batch._builder = _DefaultRecordBatchBuilderPy(
        magic=2, compression_type=0, is_transactional=False, producer_id=-1, producer_epoch=-1, base_sequence=-1, batch_size=1024
    )
    batch.append(key=key, value=b"{}", timestamp=None, headers=[(NotText("x"), b"")])
    batch.close()
    return int((await (await producer.send_batch(batch, topic, partition=partition))).offset)
