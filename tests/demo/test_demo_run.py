"""The whole demo for a few steps: worker and agents as processes, over a real Kafka."""

import asyncio
from pathlib import Path

import pytest
from tests.demo.running import RunningDemo

from headrace.core.kafka import client_options
from headrace.core.settings import KafkaSettings
from headrace.core.topic_admin import partition_counts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
FIELDS = {"steps", "reward_first", "reward_last", "policy_version", "groups", "rejected", "max_lag", "seconds", "tokens_per_second"}


def topics(bootstrap_servers: str) -> set[str]:
    options = client_options(KafkaSettings(bootstrap_servers=bootstrap_servers), "test")
    return {name for name in asyncio.run(partition_counts(options)) if name.startswith("headrace-demo-")}


def test_a_short_run_reports_its_numbers_and_leaves_only_the_figure(tmp_path: Path, kafka: str):
    before = topics(kafka)
    demo = RunningDemo("--steps", "3", "--json", "--bootstrap-servers", kafka, tmp=tmp_path)
    try:
        demo.wait_for_line("step 1/3", seconds=300)
        assert len(demo.look()) >= 6, "a worker with its processes and two agents, each with its supervisor"
        assert demo.end() == 0, "".join(demo.output)
        numbers = demo.numbers()
        assert set(numbers) == FIELDS
        assert numbers["steps"] == numbers["policy_version"] == 3
        assert numbers["groups"] == 3 * 16
        assert 0 < numbers["reward_first"] <= 0.3
        assert numbers["max_lag"] <= 1
        assert numbers["tokens_per_second"] > 0
        assert (tmp_path / "out" / "headrace-demo-vault-seed0-lag1.png").stat().st_size > 10_000
        text = "".join(demo.output)
        assert "The first rollout · policy version 0" in text
        assert "The last rollout · policy version" in text
        assert not demo.survivors(0)
        assert topics(kafka) == before, "the run's topics are deleted"
        assert not list(demo.files.iterdir()), "the run's files are deleted"
    finally:
        demo.close()


def test_smollm2_learns_from_sums_and_is_served_back(tmp_path: Path, kafka: str):
    """A real pretrained model, LoRA, its own chat template: two steps are trained, and the last version samples again."""
    demo = RunningDemo("--model", "smollm2", "--steps", "2", "--json", "--keep", "--bootstrap-servers", kafka, tmp=tmp_path)
    try:
        assert demo.end(850) == 0, "".join(demo.output)
        numbers = demo.numbers()
        assert numbers["steps"] == numbers["policy_version"] == 2
        assert numbers["groups"] == 8
        text = "".join(demo.output)
        assert "The last rollout · policy version 2" in text
        assert "You are a calculator" in text
        (folder,) = demo.files.iterdir()
        assert f"logs, store and base model in {folder}" in text
        assert (folder / "logs" / "worker.log").is_file()
        assert list(folder.glob("store/**/adapter_model.safetensors")), "adapters, not whole models"
        assert not demo.survivors(0)
    finally:
        demo.close()
