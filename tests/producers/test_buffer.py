"""The byte buffer: first come, first served, and no deadlock."""

import asyncio

import pytest

from headrace.producers.buffer import ByteBuffer


async def started(*waits: object) -> list[asyncio.Task[None]]:
    """Tasks that have run up to their first wait."""
    tasks = [asyncio.create_task(wait) for wait in waits]  # type: ignore[arg-type]  # coroutines
    await asyncio.sleep(0)
    return tasks


async def test_what_fits_is_taken_at_once_and_what_does_not_waits():
    buffer = ByteBuffer(10)
    assert buffer.try_take(6)
    assert not buffer.try_take(5)
    (waiting,) = await started(buffer.take(5))
    assert not waiting.done()
    buffer.give_back(6)
    await waiting
    assert buffer.used == 5


async def test_a_small_one_does_not_overtake_a_large_one_that_waits():
    buffer = ByteBuffer(10)
    buffer.try_take(8)
    large, small = await started(buffer.take(9), buffer.take(1))
    assert not buffer.try_take(1)
    assert not small.done()
    buffer.give_back(8)
    await asyncio.gather(large, small)
    assert buffer.used == 10


async def test_something_larger_than_the_buffer_goes_alone_when_the_buffer_is_empty():
    buffer = ByteBuffer(10)
    buffer.try_take(1)
    huge, after = await started(buffer.take(100), buffer.take(1))
    buffer.give_back(1)
    await huge
    assert not after.done()
    buffer.give_back(100)
    await after
    assert buffer.used == 1


async def test_a_cancelled_wait_takes_nothing_and_lets_the_next_one_in():
    buffer = ByteBuffer(10)
    buffer.try_take(8)
    large, small = await started(buffer.take(9), buffer.take(1))
    large.cancel()
    await small
    assert buffer.used == 9


async def test_a_wait_cancelled_in_the_moment_of_its_grant_gives_the_bytes_back():
    buffer = ByteBuffer(10)
    buffer.try_take(10)
    (waiting,) = await started(buffer.take(10))
    buffer.give_back(10)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert buffer.used == 0
