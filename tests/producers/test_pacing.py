"""The pace gate: never too far ahead, never stuck."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.producers import PaceGate


def passes(gate: PaceGate) -> int:
    """How many slots pass now."""
    count = 0
    while gate.free:
        assert gate.acquire_sync(timeout=10)
        count += 1
    return count


@given(
    lag=st.integers(0, 4),
    batch=st.integers(1, 8),
    first=st.integers(0, 100),
    choices=st.lists(st.sampled_from(["rollout", "train", "fail"]), max_size=200),
)
def test_no_group_is_older_than_the_lag_at_its_cut(lag: int, batch: int, first: int, choices: list[str]):
    gate = PaceGate(lag, batch, version=first)
    version, queue = first, []
    for choice in choices:
        if choice == "rollout" and gate.free:
            gate.acquire_sync()
            queue.append(version)
        elif choice == "fail" and gate.free:
            gate.acquire_sync()
            gate.give_back()
        elif choice == "train" and len(queue) >= batch:
            cut, queue = queue[:batch], queue[batch:]
            assert all(version - sampled <= lag for sampled in cut)
            version += 1
            gate.observe(version)


@given(lag=st.integers(0, 4), batch=st.integers(1, 8), steps=st.integers(0, 5))
def test_there_is_always_room_for_the_batch_that_the_next_version_needs(lag: int, batch: int, steps: int):
    gate = PaceGate(lag, batch, version=0)
    assert passes(gate) == (lag + 1) * batch
    for step in range(steps):
        gate.observe(step + 1)
        assert passes(gate) == batch


@given(lag=st.integers(0, 4), batch=st.integers(1, 12), producers=st.integers(1, 5), version=st.integers(0, 20))
def test_shares_of_several_producers_sum_to_no_more_than_one_gate(lag: int, batch: int, producers: int, version: int):
    share = 1 / producers
    if share * batch * (lag + 1) < 1:
        with pytest.raises(ValueError, match="nothing would pass"):
            PaceGate(lag, batch, share)
        return
    gates = [PaceGate(lag, batch, share, version=0) for _ in range(producers)]
    for gate in gates:
        gate.observe(version)
    assert sum(passes(gate) for gate in gates) <= (version + lag + 1) * batch


@pytest.mark.parametrize(("lag", "batch", "share"), [(-1, 1, 1.0), (0, 0, 1.0), (0, 1, 0.0), (0, 1, 1.5)])
def test_settings_without_sense_are_refused(lag: int, batch: int, share: float):
    with pytest.raises(ValueError, match="must be"):
        PaceGate(lag, batch, share)


async def test_nothing_passes_before_the_first_version_is_known_and_versions_do_not_go_back():
    gate = PaceGate(0, 1)
    waiting = asyncio.create_task(gate.acquire())
    await asyncio.sleep(0)
    assert not waiting.done()
    gate.observe(57)
    await waiting
    gate.observe(3)
    assert gate.version == 57
    assert gate.free == 0


async def test_a_slot_whose_rollout_fails_is_given_back():
    gate = PaceGate(0, 1, version=0)

    async def rollout() -> None:
        async with gate.slot():
            assert gate.free == 0
            raise RuntimeError("rollout")

    with pytest.raises(RuntimeError, match="rollout"):
        await rollout()
    assert gate.free == 1
    async with gate.slot():
        pass
    assert gate.free == 0


async def test_waiters_pass_in_their_order():
    gate = PaceGate(0, 1, version=0)
    await gate.acquire()
    passed: list[int] = []

    async def one(i: int) -> None:
        await gate.acquire()
        passed.append(i)

    waiting = [asyncio.create_task(one(i)) for i in range(3)]
    await asyncio.sleep(0)
    for version in (1, 2, 3):
        gate.observe(version)
    await asyncio.gather(*waiting)
    assert passed == [0, 1, 2]


async def test_a_cancelled_wait_keeps_no_slot_even_in_the_moment_of_its_grant():
    gate = PaceGate(0, 1, version=0)
    await gate.acquire()
    early, granted = asyncio.create_task(gate.acquire()), asyncio.create_task(gate.acquire())
    await asyncio.sleep(0)
    early.cancel()
    await asyncio.sleep(0)
    gate.observe(1)
    granted.cancel()
    for task in (early, granted):
        with pytest.raises(asyncio.CancelledError):
            await task
    assert gate.free == 1


async def test_threads_wait_for_versions_that_an_event_loop_observes():
    gate = PaceGate(0, 2, version=0)
    inside = threading.Semaphore(0)

    def agent() -> None:
        for _ in range(3):
            with gate.slot():
                inside.release()

    with ThreadPoolExecutor(2) as threads:
        agents = [threads.submit(agent) for _ in range(2)]
        for version in (1, 2):
            await asyncio.to_thread(lambda: [inside.acquire() for _ in range(2)])
            gate.observe(version)
        await asyncio.gather(*[asyncio.wrap_future(a) for a in agents])
    assert gate.free == 0


def test_a_thread_may_stop_waiting():
    gate = PaceGate(0, 1, version=0)
    assert gate.acquire_sync()
    assert not gate.acquire_sync(timeout=0.01)
    gate.observe(1)
    assert gate.free == 1
