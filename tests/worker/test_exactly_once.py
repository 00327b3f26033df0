"""Rules 1 to 5 of how a lane is owned, each made to happen against the real broker."""

import asyncio

import pytest
from aiokafka import AIOKafkaProducer

from headrace.consumers.worker.balancer import Balancer
from headrace.consumers.worker.claim import PartitionCountError, read_states
from headrace.consumers.worker.commits import FencedError, LaneWriter, OutcomeUnknownError
from headrace.consumers.worker.outgoing import OutgoingRecord, sealed_record
from headrace.core.kafka import client_options
from headrace.core.reading import read_to_end
from headrace.core.settings import Settings
from headrace.schemas.state import LaneState
from headrace.schemas.topics import lane_key


def writer_of(settings: Settings, lane: int = 0) -> LaneWriter:
    return LaneWriter(settings, lane, client_options(settings.kafka, "test-lane"))


def lane_record(settings: Settings, mark: int, *, partitions: int = 2) -> OutgoingRecord:
    state = LaneState(lane=0, mark=mark, scanned=mark, partitions=partitions)
    return sealed_record(state, topic=settings.topic_names.models, key=lane_key(0), source="test", partition=0)


async def mark_of(settings: Settings) -> int:
    memory = await read_states(client_options(settings.kafka, "test"), settings.topic_names, 0, settings.groups_topic)
    return memory.lane.mark


async def test_fence_then_read_a_claim_reads_beyond_another_producers_open_transaction(settings: Settings) -> None:
    owner = writer_of(settings)
    await owner.start()
    await owner.commit([lane_record(settings, 1)], mark=1)
    foreign = AIOKafkaProducer(**client_options(settings.kafka, "foreign"), transactional_id=f"{settings.topics.prefix}foreign")
    await foreign.start()
    await foreign.begin_transaction()
    await foreign.send_and_wait(settings.topic_names.models, b"{}", key=b"foreign", partition=0)
    await owner.commit([lane_record(settings, 2)], mark=2)
    claiming = asyncio.create_task(_claim(settings))
    # The committed record stands behind the open transaction: a read to the last stable offset would answer 1 now.
    done, _ = await asyncio.wait({claiming}, timeout=1.0)
    assert not done
    await foreign.abort_transaction()
    assert await claiming == 2
    await foreign.stop()
    await owner.stop()


async def _claim(settings: Settings) -> int:
    claimant = writer_of(settings)
    await claimant.start()
    try:
        return await mark_of(settings)
    finally:
        await claimant.stop()


async def test_fence_then_read_fencing_before_reading_never_sees_a_stale_state(settings: Settings) -> None:
    for mark in range(1, 11):
        owner = writer_of(settings)
        await owner.start()
        await owner.commit([lane_record(settings, mark)], mark=mark)
        claimant = writer_of(settings)
        await claimant.start()
        assert await mark_of(settings) == mark
        await owner.stop()
        await claimant.stop()


async def test_a_fenced_owner_can_not_commit_and_what_it_wrote_is_invisible(settings: Settings) -> None:
    zombie, owner = writer_of(settings), writer_of(settings)
    await zombie.start()
    await zombie.commit([lane_record(settings, 1)], mark=1)
    await owner.start()
    with pytest.raises((FencedError, OutcomeUnknownError)):
        await zombie.commit([lane_record(settings, 666)], mark=666)
    await owner.commit([lane_record(settings, 2)], mark=2)
    assert await mark_of(settings) == 2
    records = await read_to_end(client_options(settings.kafka, "test"), settings.topic_names.models, [0])
    assert [LaneState.model_validate_json(record.value or b"").mark for record in records] == [1, 2]
    await zombie.stop()
    await owner.stop()


async def test_await_every_send_a_refused_record_takes_its_whole_transaction_with_it(settings: Settings) -> None:
    owner = writer_of(settings)
    await owner.start()
    too_large = OutgoingRecord(topic=settings.topic_names.weights, key=b"m", value=b"x" * 1_500_000, headers=(), partition=0)
    with pytest.raises(OutcomeUnknownError):
        await owner.commit([lane_record(settings, 5), too_large], mark=5)
    await owner.stop()
    assert await _claim(settings) == 0


async def test_unknown_outcome_after_an_unclear_commit_only_reading_tells_what_happened(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = writer_of(settings)
    await owner.start()
    really = owner._producer.commit_transaction

    async def answer_is_lost() -> None:
        await really()
        raise TimeoutError

    monkeypatch.setattr(owner._producer, "commit_transaction", answer_is_lost)
    with pytest.raises(OutcomeUnknownError):
        await owner.commit([lane_record(settings, 7)], mark=7)
    await owner.stop()
    assert await _claim(settings) == 7


async def test_kept_lane_a_lane_that_stays_is_not_released_by_a_rebalance(settings: Settings) -> None:
    first, second = Balancer(settings), Balancer(settings)
    await first.start()
    await _until(first, {0, 1})
    await second.start()
    await asyncio.gather(_until_share(first), _until_share(second))
    assert first.lanes | second.lanes == {0, 1}
    kept = first.lanes
    first.on_partitions_revoked([])
    assert first.lanes == kept
    await second.stop()
    await _until(first, {0, 1})
    await first.stop()


async def test_one_lane_another_partition_count_than_at_the_first_claim_is_refused(settings: Settings) -> None:
    owner = writer_of(settings)
    await owner.start()
    await owner.commit([lane_record(settings, 1, partitions=12)], mark=1)
    with pytest.raises(PartitionCountError, match="have 2 partitions, but lane 0 was first claimed with 12"):
        await mark_of(settings)
    await owner.stop()


async def _until(balancer: Balancer, lanes: set[int]) -> None:
    async with asyncio.timeout(60):
        while balancer.lanes != lanes:
            balancer.changed.clear()
            await balancer.changed.wait()


async def _until_share(balancer: Balancer) -> None:
    async with asyncio.timeout(60):
        while len(balancer.lanes) != 1:
            balancer.changed.clear()
            await balancer.changed.wait()
