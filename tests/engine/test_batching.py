"""What becomes one batch, and what happens when there is too much of it."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from headrace.engine.sampling.batching import Batcher, EngineBusyError, SampleJob, SamplingError
from headrace.engine.sampling.decoding import RowDraw
from headrace.engine.sampling.policy_engine import PolicyEngine
from headrace.engine.sampling.sampled_row import RowPiece, RowRequest, SampledRow

SOON = 30.0


class Watched(PolicyEngine):
    """The real engine; it remembers its calls, and waits before each while it is held."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, threads=1)
        self.calls: list[tuple[str | None, int]] = []
        self.entered = threading.Semaphore(0)
        self.go_on = threading.Event()
        self.go_on.set()

    def sample(self, weights: str | None, rows: list[SampledRow]) -> None:  # type: ignore[override]
        self.calls.append((weights, len(rows)))
        self.entered.release()
        assert self.go_on.wait(SOON)
        super().sample(weights, rows)


@pytest.fixture
def engine(tiny_model: Path) -> Watched:
    return Watched(tiny_model)


@pytest_asyncio.fixture
async def start(engine: Watched) -> AsyncIterator[Callable[..., Batcher]]:
    started: list[tuple[Batcher, asyncio.Task[None]]] = []

    def start(**options: int) -> Batcher:
        batcher = Batcher(engine, **options)
        started.append((batcher, asyncio.create_task(batcher.run())))
        return batcher

    yield start
    engine.go_on.set()
    for batcher, running in started:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await batcher.close()


def job(engine: PolicyEngine, rows: int = 1, *, weights: str | None = None, max_tokens: int = 4, **fields: object) -> SampleJob:
    wanted = {"prompt": (7, 8), "draw": RowDraw(seed=1), "max_tokens": max_tokens, "stop_ids": frozenset({1})} | fields
    return SampleJob(weights, [RowRequest(**wanted)] * rows, engine.text_of)  # type: ignore[arg-type]  # fields by name


async def done(job: SampleJob) -> list[RowPiece]:
    async with asyncio.timeout(SOON):
        return [piece async for piece in job.pieces()]


async def entered(engine: Watched) -> None:
    assert await asyncio.to_thread(engine.entered.acquire, timeout=SOON)


async def test_what_arrives_together_is_one_batch(engine, start):
    batcher = start()
    jobs = [job(engine, 2) for _ in range(5)]
    for each in jobs:
        batcher.submit(each)
    await asyncio.gather(*map(done, jobs))
    assert engine.calls == [(None, 10)]


async def test_what_arrives_while_a_batch_runs_is_the_next_one_by_its_weights(engine, start, tiny_model):
    batcher = start()
    await batcher.call(lambda: engine.hold("w", tiny_model, engine.read(tiny_model)))
    engine.go_on.clear()
    first = job(engine)
    batcher.submit(first)
    await entered(engine)
    later = [job(engine), job(engine, weights="w"), job(engine, 3), job(engine, weights="w")]
    for each in later:
        batcher.submit(each)
    assert batcher.rows_waiting == 6
    engine.go_on.set()
    await asyncio.gather(*map(done, [first, *later]))
    assert engine.calls == [(None, 1), (None, 4), ("w", 2)]


async def test_a_batch_is_bounded_and_a_larger_request_is_one_of_its_own(engine, start):
    batcher = start(rows_at_once=4)
    jobs = [job(engine, rows) for rows in (3, 2, 1, 6)]
    for each in jobs:
        batcher.submit(each)
    await asyncio.gather(*map(done, jobs))
    assert engine.calls == [(None, 4), (None, 2), (None, 6)]


async def test_a_full_queue_refuses_at_once(engine, start):
    batcher = start(rows_waiting=3)
    engine.go_on.clear()
    running = job(engine)
    batcher.submit(running)
    await entered(engine)
    waiting = [job(engine, 2), job(engine)]
    for each in waiting:
        batcher.submit(each)
    with pytest.raises(EngineBusyError, match="3 completions wait already"):
        batcher.submit(job(engine))
    engine.go_on.set()
    await asyncio.gather(*map(done, [running, *waiting]))
    batcher.submit(again := job(engine))
    assert await done(again)


async def test_a_short_request_is_done_before_the_long_one_in_its_batch(engine, start):
    batcher = start()
    short, long = job(engine, max_tokens=1), job(engine, 4, max_tokens=100, stop_ids=frozenset(), in_pieces=True)
    told: list[str] = []

    async def follow(name: str, which: SampleJob) -> None:
        await done(which)
        told.append(name)

    batcher.submit(long)
    batcher.submit(short)
    await asyncio.gather(follow("long", long), follow("short", short))
    assert told == ["short", "long"]
    assert len(engine.calls) == 1


async def test_a_request_that_is_given_up_ends_at_its_next_token(engine, start):
    batcher = start()
    left, stays = [job(engine, max_tokens=120, stop_ids=frozenset(), in_pieces=True) for _ in range(2)]
    batcher.submit(left)
    batcher.submit(stays)
    async with asyncio.timeout(SOON):
        async for _ in left.pieces():
            left.give_up()
            break
    pieces = await done(stays)
    assert sum(len(piece.token_ids) for piece in pieces) == 120
    assert left.rows[0].ended
    assert left._pieces.qsize() < 119


async def test_a_batch_that_fails_fails_its_requests_only(engine, start, monkeypatch):
    batcher = start()
    failing, fine = job(engine, weights="nobody"), job(engine)
    batcher.submit(failing)
    batcher.submit(fine)
    with pytest.raises(SamplingError, match="nobody"):
        await done(failing)
    assert await done(fine)


async def test_an_engine_that_ends_says_so_to_all_who_wait(engine, tiny_model):
    batcher = Batcher(engine)
    running = asyncio.create_task(batcher.run())
    engine.go_on.clear()
    jobs = [job(engine, max_tokens=100), job(engine, weights="w")]
    for each in jobs:
        batcher.submit(each)
    await entered(engine)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    engine.go_on.set()
    await batcher.close()
    for each in jobs:
        with pytest.raises(SamplingError, match="was stopped"):
            await done(each)
    with pytest.raises(EngineBusyError, match="ending"):
        batcher.submit(job(engine))
