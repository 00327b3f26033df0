"""Runs of jobs with `wandbConfig`, offline."""

import asyncio
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from aiokafka.admin import AIOKafkaAdminClient
from tests.gateway.conftest import gateway_settings, running
from tests.gateway.lane_double import LaneDouble
from tests.gateway.rlor_calls import JOBS, create, dataset, keep_alive, state
from wandb.proto.wandb_internal_pb2 import Record

from headrace.core.kafka import client_options
from headrace.core.lanes import lane_of
from headrace.core.settings import Settings
from headrace.core.topic_admin import apply
from headrace.gateway.gate import Gate
from headrace.gateway.rlor.resources import rlor_model_id
from headrace.gateway.rlor.tracking import note_run, tracking
from headrace.schemas.rlor import RlorJob, rlor_job_key


async def until_tracked(settings: Settings, steps: int) -> None:
    """Until the gateways have written so many steps, as their consumer group says."""
    admin = AIOKafkaAdminClient(**client_options(settings.kafka, "test"))
    await admin.start()
    try:
        async with asyncio.timeout(60):
            while True:
                offsets = await admin.list_consumer_group_offsets(f"{settings.topics.prefix.rstrip('.')}-gateway-tracking")
                if sum(found.offset > 0 for found in offsets.values()) >= steps:
                    return
                await asyncio.sleep(0.1)
    finally:
        await admin.close()


def split_records(file: bytes) -> Iterator[bytes]:
    """Records of a file of wandb's: a header of 7 bytes, then LevelDB's log format (blocks of 32 KiB; checksum, length, kind, bytes)."""
    at, parts = 7, b""
    while at + 7 <= len(file):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", file, at + 4)
        parts += file[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in {1, 4}:  # whole, or the last part
            yield parts
            parts = b""


def read_runs(folder: Path) -> list[tuple[dict[str, object], list[dict[str, object]]]]:
    """(the run, what was logged) of each run."""
    found = []
    for path in sorted(folder.rglob("*.wandb")):
        run: dict[str, object] = {}
        history = []
        for data in split_records(path.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                run = {"id": record.run.run_id, "project": record.run.project, "name": record.run.display_name}
            if record.HasField("history"):
                history.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item})
        found.append((run, history))
    return found


async def test_committed_steps_are_in_the_run_of_a_tracked_job(
    kafka: str, topic_prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WANDB_MODE", "offline")
    settings = gateway_settings(kafka, topic_prefix, tmp_path, secrets_key="k" * 32, wandb_dir=tmp_path / "wandb")
    await apply(settings)
    wandb = {"enabled": True, "apiKey": "hush" * 10, "project": "mine"}
    other = settings.model_copy(update={"gateway": settings.gateway.model_copy(update={"instance": "other"})})
    async with running(settings) as client, Gate(other) as gate, tracking(gate):
        await dataset(client, "d1")
        await create(client, "tracked", keep_alive(wandbConfig=wandb))
        await create(client, "plain", keep_alive())
        for job_id in ("tracked", "plain"):
            await train(client, gate, job_id)
        lanes = {lane_of(rlor_model_id("default", job_id), gate.view.lanes) for job_id in ("tracked", "plain")}
        await until_tracked(settings, len(lanes))
        assert (await client.get(f"{JOBS}/tracked")).json()["wandbConfig"]["url"] == ""  # offline
        # What the service would have answered, noted by the one gateway, shown by the other.
        fact = gate.view.tables.facts[rlor_job_key("default", "tracked")]
        assert isinstance(fact, RlorJob)
        await note_run(gate, fact, "https://wandb.example/mine/tracked")
        shown = (await client.get(f"{JOBS}/tracked")).json()["wandbConfig"]
        assert (shown["url"], shown["project"]) == ("https://wandb.example/mine/tracked", "mine")
        assert "wandbConfig" not in (await client.get(f"{JOBS}/plain")).json()
        await client.delete(f"{JOBS}/tracked")
        recreated = (await create(client, "tracked", keep_alive(wandbConfig=wandb))).json()
        assert recreated["wandbConfig"]["url"] == ""
    ((run, history),) = read_runs(tmp_path / "wandb")
    assert run["project"] == "mine"
    assert run["name"] == "mine"
    assert str(run["id"]).startswith("tracked-")
    assert [(row["_step"], row["loss"], row["policy_version"]) for row in history] == [(1, 0.5, 1)]
    for path in (tmp_path / "wandb").rglob("*"):
        assert path.is_dir() or b"hush" not in path.read_bytes(), path


async def train(client: httpx.AsyncClient, gate: Gate, job_id: str) -> None:
    """One step of a job, committed."""
    lane = LaneDouble(gate)
    await lane.take_up(rlor_model_id("default", job_id))
    assert await state(client, job_id) == "RUNNING"
    step = await client.post(f"{JOBS}/{job_id}:executeTrainStep", json={"dataset": "d1", "outputModel": f"{job_id}-1"})
    assert step.status_code == 200, step.text
    fact = (await gate.view.fresh()).facts[rlor_job_key("default", job_id)]
    assert isinstance(fact, RlorJob)
    assert fact.step is not None
    await lane.train(fact.step.training_jobs[0])


async def test_a_fault_of_one_job_affects_no_other_and_no_job_uses_the_gateways_key(
    kafka: str, topic_prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", "the-operators-own-key")
    opened: list[str] = []

    def init(**options: Any) -> SimpleNamespace:
        opened.append(options["settings"].api_key)
        if options["project"] == "ill":
            raise ValueError("embedded null byte\x00")
        return SimpleNamespace(offline=True, url=None, log=lambda *_, **__: None, finish=lambda: None)

    monkeypatch.setattr("wandb.init", init)
    settings = gateway_settings(kafka, topic_prefix, tmp_path, secrets_key="k" * 32, wandb_dir=tmp_path / "wandb")
    await apply(settings)
    key = "own-" * 10
    jobs = {
        "keyless": {"enabled": True, "project": "p"},
        "ill": {"enabled": True, "project": "ill", "apiKey": key},
        "well": {"enabled": True, "project": "p", "apiKey": key},
    }
    async with running(settings) as client:
        gate = client.gate  # type: ignore[attr-defined]
        async with tracking(gate):
            await dataset(client, "d1")
            for job_id, config in jobs.items():
                made = await create(client, job_id, keep_alive(wandbConfig=config))
                assert made.status_code == 200, made.text
                await train(client, gate, job_id)
            await until_tracked(settings, len({lane_of(rlor_model_id("default", job_id), gate.view.lanes) for job_id in jobs}))
            message = {job_id: (await client.get(f"{JOBS}/{job_id}")).json()["status"]["message"] for job_id in jobs}
    assert opened == [key, key]
    assert "no apiKey" in message["keyless"]
    assert "embedded null byte?" in message["ill"]
    assert message["well"] == ""


async def test_invalid_names_of_runs_are_rejected(gateway: httpx.AsyncClient) -> None:
    for field, value in (("project", "a\x00b"), ("entity", "a/b"), ("runId", "a\nb"), ("apiKey", "k\x00")):
        rejected = await create(gateway, "j", keep_alive(wandbConfig={"enabled": True, field: value}))
        assert (rejected.status_code, f"wandbConfig.{field}" in rejected.text) == (400, True), rejected.text
