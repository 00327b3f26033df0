"""A job of 50 MB, sent to a gateway as a process: what it takes in memory."""

import asyncio
import json
from pathlib import Path

import httpx
import pytest
from tests.conformance.conftest import Part, free_port
from tests.gateway.conftest import gateway_settings
from tests.gateway.job_bodies import make_model, trajectory

from headrace.core.topic_admin import apply

MB = 1_000_000


def peak_mb(pid: int) -> float:
    """The most that a process has had in memory."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / MB


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from Linux's /proc")
@pytest.mark.parametrize("tokens", [400, 12_000])
async def test_a_job_of_50_mb_takes_less_than_300_mb(kafka: str, topic_prefix: str, tmp_path: Path, tokens: int) -> None:
    """Many small groups, or few of 8 MB."""
    settings = gateway_settings(kafka, topic_prefix, tmp_path, port=free_port())
    await apply(settings)
    one = json.dumps({"trajectories": [trajectory(float(i % 2), [i + 9] * tokens) for i in range(8)]}, separators=(",", ":"))
    gateway = Part(settings, tmp_path / "gateway.log", "gateway")
    try:
        address = f"http://127.0.0.1:{settings.gateway.port}"
        await asyncio.to_thread(gateway.until_it_answers, f"{address}/v1/health", 60)
        async with httpx.AsyncClient(base_url=address, timeout=120, trust_env=False) as http:
            model = await make_model(http)
            groups = ",".join([one] * (50 * MB // len(one)))
            answer = await http.post("/v1/preview/training-jobs", content=f'{{"model_id":"{model}","trajectory_groups":[{groups}]}}')
        assert answer.status_code == 200, answer.text
        assert peak_mb(gateway.process.pid) < 300
    finally:
        gateway.stop()
