"""Time limits that a lost cancellation does not outlive."""

import asyncio
import contextlib

import pytest

from headrace.core.deadline import deadline


async def test_a_block_that_loses_the_first_cancellation_is_ended_by_the_next():
    """As `asyncio.wait_for` loses one before Python 3.12."""
    lost = []

    async def losing() -> None:
        while len(lost) < 2:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError as error:
                lost.append(error)
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        async with deadline(0.01, again=0.01):
            await losing()
    assert len(lost) == 2
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0)  # nothing is left to arrive


async def test_a_block_in_time_is_left_alone():
    async with deadline(60):
        await asyncio.sleep(0)


async def test_an_error_of_the_block_stays_itself():
    with pytest.raises(ValueError, match="mine"):
        async with deadline(60):
            raise ValueError("mine")


async def test_a_cancellation_from_outside_is_not_a_time_out():
    inside = asyncio.Event()

    async def work() -> None:
        async with deadline(60):
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancellation_from_outside_wins_over_a_time_out_at_the_same_moment():
    async def work() -> None:
        async with deadline(0.01, again=60):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                ended.set()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()  # cancelled from outside while it cleans up
                raise

    ended = asyncio.Event()
    task = asyncio.create_task(work())
    await ended.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_limits_may_stand_inside_each_other():
    with pytest.raises(TimeoutError):
        async with deadline(0.01, again=0.01), deadline(60):
            await asyncio.Event().wait()
    async with deadline(60):
        with pytest.raises(TimeoutError):
            async with deadline(0.01, again=0.01):
                await asyncio.Event().wait()
