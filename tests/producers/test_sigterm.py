"""SIGTERM flushes what is buffered; then the process ends, or continues, as it would have without us."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tests.producers.conftest import ReadAll

from headrace.core.settings import Settings

PRELUDE = """
import asyncio, json, signal, sys, time
from headrace.core.settings import Settings
from headrace.producers import SyncTrajectoryProducer, TrajectoryProducer
from tests.producers.conftest import make_group
settings = Settings.model_validate_json(sys.argv[1])
def say(text):
    print(text, flush=True)
"""

ASYNC = """
async def main():
    async with TrajectoryProducer(settings, model_id="00000000-0000-4000-8000-000000000001", flush_on_sigterm={flag}) as producer:
        for _ in range(3):
            await producer.submit(make_group())
        say("buffered")
        await asyncio.sleep(60)
asyncio.run(main())
"""

SYNC = """
producer = SyncTrajectoryProducer(settings, model_id="00000000-0000-4000-8000-000000000001", flush_on_sigterm={flag})
producer.start()
for _ in range(3):
    producer.submit(make_group())
say("buffered")
time.sleep(60)
"""

HANDLER = """
def host(signum, frame):
    say("host handler")
    raise SystemExit(7)
signal.signal(signal.SIGTERM, host)
"""


@asynccontextmanager
async def running(script: str, settings: Settings) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that has three groups in its buffer, which lingers for two seconds."""
    lingering = settings.model_copy(update={"producer": settings.producer.model_copy(update={"linger_ms": 2000})})
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PRELUDE + script, lingering.model_dump_json(), stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), 60) == b"buffered\n"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def ended(process: asyncio.subprocess.Process) -> tuple[int, bytes]:
    process.send_signal(signal.SIGTERM)
    rest, _ = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode is not None
    return process.returncode, rest


@pytest.mark.parametrize("script", [ASYNC, SYNC])
async def test_what_is_buffered_is_flushed_and_the_process_ends_by_the_signal(producer_settings: Settings, read_all: ReadAll, script: str):
    async with running(script.format(flag=None), producer_settings) as process:
        assert await ended(process) == (-signal.SIGTERM, b"")
    assert len(await read_all()) == 3


@pytest.mark.parametrize("script", [ASYNC, SYNC])
async def test_a_handler_of_the_host_is_called_after_the_flush_if_asked(producer_settings: Settings, read_all: ReadAll, script: str):
    async with running(HANDLER + script.format(flag=True), producer_settings) as process:
        assert await ended(process) == (7, b"host handler\n")
    assert len(await read_all()) == 3


async def test_a_handler_of_the_host_is_left_alone_unless_asked(producer_settings: Settings, read_all: ReadAll):
    async with running(HANDLER + SYNC.format(flag=None), producer_settings) as process:
        assert await ended(process) == (7, b"host handler\n")
    assert await read_all() == []


async def test_a_host_that_ignores_sigterm_goes_on_ignoring_it(producer_settings: Settings):
    script = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SYNC.format(flag=None).replace(
        "time.sleep(60)", "input()\nproducer.close()\nsay('end')"
    )
    lingering = producer_settings.model_copy(update={"producer": producer_settings.producer.model_copy(update={"linger_ms": 10})})
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PRELUDE + script, lingering.model_dump_json(), stdout=subprocess.PIPE, stdin=subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"buffered\n"
    process.send_signal(signal.SIGTERM)
    rest, _ = await asyncio.wait_for(process.communicate(b"\n"), 30)
    assert (process.returncode, rest) == (0, b"end\n")


async def test_the_handler_goes_when_the_last_producer_closes(producer_settings: Settings):
    script = SYNC.format(flag=None).replace(
        "time.sleep(60)", "producer.close()\nsay(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)\ninput()"
    )
    async with running(script, producer_settings) as process:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"True\n"
