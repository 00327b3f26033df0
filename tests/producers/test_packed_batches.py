"""Batches that are compressed ahead of their turn have the bytes that aiokafka would send."""

import asyncio
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.producer.message_accumulator import BatchBuilder
from aiokafka.record.default_records import DefaultRecordBatch
from tests.producers.conftest import MODEL, make_group

from headrace.core.settings import Settings
from headrace.producers import TrajectoryProducer
from headrace.producers.packed_batches import _PackedBuilder, _Packing
from headrace.schemas.codec import SampledGroup, sampled

ZSTD = 4
VALUES = [bytes([i]) * 20_000 for i in range(3)]


def full(builder: BatchBuilder) -> None:
    """Fill it until it takes no more."""
    at = 0
    while builder.append(timestamp=5, key=b"k", value=VALUES[at % 3], headers=[("n", b"v")]) is not None:
        at += 1


def packed(threads: ThreadPoolExecutor, expected: tuple[int, int, int]) -> _PackedBuilder:
    builder = _PackedBuilder(60_000, ZSTD)
    builder.packing = _Packing(threads, lambda: expected)
    return builder


@pytest.mark.parametrize("due", [(7, 1, 40), (7, 1, 41), (8, 0, 0), (2**62, 32_000, 2**31 - 1), (7, 1, -(2**31))])
def test_a_full_batch_has_aiokafkas_bytes_whatever_its_turn_finds_it_expected(due: tuple[int, int, int]) -> None:
    plain = BatchBuilder(60_000, ZSTD)
    with ThreadPoolExecutor(1) as threads:
        ahead = packed(threads, (7, 1, 40))
        full(plain)
        full(ahead)
        assert ahead.packing.begun is not None
        assert ahead.size() == plain.size()
        for builder in (plain, ahead):
            builder._set_producer_state(*due)
        assert bytes(ahead._build()) == bytes(plain._build())
        assert ahead.size() == plain.size()
        assert DefaultRecordBatch(bytes(ahead._build())).validate_crc()


def test_a_batch_whose_turn_comes_before_it_is_full_has_the_state_of_its_turn() -> None:
    plain = BatchBuilder(60_000, ZSTD)
    with ThreadPoolExecutor(1) as threads:
        ahead = packed(threads, (7, 1, 40))
        for builder in (plain, ahead):
            builder.append(timestamp=5, key=None, value=VALUES[1], headers=[])
            builder._set_producer_state(9, 2, 3)
        assert ahead.packing.begun is None
        assert bytes(ahead.begun().result()) == bytes(plain._build()) == bytes(ahead._build())
        assert ahead.append(timestamp=5, key=None, value=b"", headers=[]) is None


async def test_a_full_batch_is_compressed_while_the_one_before_it_is_on_its_way(
    producer_settings: Settings, monkeypatch: pytest.MonkeyPatch, read_all: Any
) -> None:
    """And what stands in the log is what was sent, in order, though each batch had its number before its turn."""
    answered, begun = threading.Event(), threading.Event()
    in_time: list[bool] = []
    made: list[Any] = []

    def noted(builder: _PackedBuilder) -> "Future[bytearray]":
        if builder not in made:
            made.append(builder)
        if len(made) > 1:
            begun.set()
        return plain(builder)

    plain = _PackedBuilder.begun
    monkeypatch.setattr(_PackedBuilder, "begun", noted)
    async with TrajectoryProducer(producer_settings, model_id=MODEL) as producer:
        client = producer._link._client
        assert isinstance(client, AIOKafkaProducer)
        send = client.client.send

        async def held(*args: Any, **options: Any) -> Any:
            answer = await send(*args, **options)
            if made and not answered.is_set():
                in_time.append(await asyncio.to_thread(begun.wait, 60))
                answered.set()
            return answer

        monkeypatch.setattr(client.client, "send", held)
        groups: list[SampledGroup] = [sampled(make_group(tokens=9_000)) for _ in range(30)]
        reports = await asyncio.gather(*[await producer.submit(group) for group in groups])
    assert in_time[0]
    assert [report.offset for report in reports] == list(range(30))
    assert len({builder.packing.told for builder in made} - {None}) > 3
    assert all(builder.packing.due in {None, builder.packing.told} for builder in made if builder.packing.told)
    assert len(await read_all()) == 30
