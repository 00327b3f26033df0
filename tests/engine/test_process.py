"""`headrace engine` as a process: what it prints, how it ends, and what it refuses."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import uuid

import httpx
import pytest
from tests.engine.site import SOON, Acks, Site, acks_of, site_with

HEADRACE = [sys.executable, "-m", "headrace.cli", "engine"]


def environment(site: Site) -> dict[str, str]:
    return os.environ | {
        "HEADRACE_KAFKA__BOOTSTRAP_SERVERS": str(site.settings.kafka.bootstrap_servers),
        "HEADRACE_TOPICS": site.settings.topics.model_dump_json(),
        "HEADRACE_STORE": site.settings.store.model_dump_json(),
        "HEADRACE_BASE_MODELS": f'{{"tiny": {{"path": "{site.base}"}}}}',
        "PYTHONUNBUFFERED": "1",
    }


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
async def test_a_signal_lets_a_request_end_takes_the_acks_back_and_ends_it(kafka, tiny_model, tmp_path, number, code):
    async with site_with(kafka, tiny_model, tmp_path, f"t{uuid.uuid4().hex[:10]}.") as site, acks_of(site) as acks:
        await ends_cleanly(site, acks, number, code)


async def ends_cleanly(site: Site, acks: Acks, number: int, code: int) -> None:
    options = ["--base-model", "tiny", "--port", "0", "--engine-id", "p", "--threads", "1"]
    process = await asyncio.create_subprocess_exec(
        *HEADRACE, *options, env=environment(site), cwd=site.work, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(SOON):
            said = (await process.stdout.readline()).decode().split()
            assert said[:3] == ["Serving", "tiny", "at"]
            async with httpx.AsyncClient(base_url=said[3], timeout=SOON) as client:
                body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "n": 8, "max_tokens": 100}
                async with client.stream("POST", "chat/completions", json=body | {"stream": True}) as answer:
                    lines = answer.aiter_lines()
                    await anext(lines)
                    await acks.of("p:tiny", lambda ack: ack is not None)
                    process.send_signal(number)
                    rest = [line async for line in lines if line]
                assert rest[-1] == "data: [DONE]"
            _, errors = await process.communicate()
            assert process.returncode == code, errors.decode()
            assert b"Traceback" not in errors
            await acks.of("p:tiny", lambda ack: ack is None)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_what_it_can_not_start_with_is_said_in_a_line(kafka, tiny_model, tmp_path):
    async with site_with(kafka, tiny_model, tmp_path, f"t{uuid.uuid4().hex[:10]}.") as site:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = str(taken.getsockname()[1])
            for options, says in (
                (["--base-model", "nobody"], "there are tiny"),
                (["--base-model", "tiny", "--port", port], "can't listen"),
            ):
                process = await asyncio.create_subprocess_exec(
                    *HEADRACE, *options, env=environment(site), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
                )
                _, errors = await asyncio.wait_for(process.communicate(), SOON)
                assert process.returncode == 1
                assert says in errors.decode()
                assert b"Traceback" not in errors
