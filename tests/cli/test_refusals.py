"""What the command line refuses before anything is reached: no Kafka is needed to learn it. And settings by environment alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.core.settings import WorkerSettings

Headrace = Callable[..., Any]
NOWHERE = {"HEADRACE_KAFKA__BOOTSTRAP_SERVERS": "localhost:1", "HEADRACE_BASE_MODELS": '{"tiny": {"path": "/m"}}'}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("worker", "--ranks", "0"), "greater than or equal to 1"),
        (("worker", "--ranks", "2000"), "ranks: Input should be less than or equal to 1024"),
        (("worker", "--zero-stage", "7"), "less than or equal to 3"),
        (("worker", "--log-level", "nonsense"), "--log-level"),
        (("models", "create", "m", "--base-model", "tiny", "--preset", "nope"), "unknown method 'nope'"),
        (("models", "create", "m", "--base-model", "tiny", "--full", "--lora-rank", "4"), "--lora-rank"),
        (("models", "create", "m", "--preset", "grpo"), "base_model: Field required"),
        (("produce", "groups.jsonl", "--model", "m", "--epochs", "3"), "--epochs need --sft"),
        (("produce", "groups.jsonl", "--model", "m", "--sft", "--learning-rate", "nan"), "--learning-rate"),
        (("produce", "groups.jsonl", "--model", "m", "--job-id", "j"), "add --job or --sft"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_options_that_are_wrong_or_contradict_are_refused_by_name(
    headrace: Headrace, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    (tmp_path / "groups.jsonl").write_text("{}\n")
    ran = headrace(*arguments, **NOWHERE)
    assert ran.code in {1, 2}
    assert said in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("ZERO_STAGE", "7", "worker.zero_stage: Input should be less than or equal to 3"),
        ("RANKS", "many", "worker.ranks: Input should be a valid integer"),
        ("OFFLOAD_OPTIMIZER", "true", "offload_optimizer needs zero_stage 1, 2 or 3; zero_stage is 0"),
    ],
)
def test_a_wrong_setting_of_the_worker_is_refused_by_name(headrace: Headrace, name: str, value: str, said: str) -> None:
    ran = headrace("worker", **NOWHERE, **{f"HEADRACE_WORKER__{name}": value})
    assert ran.code == 1
    assert said in ran.err


def test_every_setting_of_a_worker_can_be_said_in_the_environment(headrace: Headrace) -> None:
    """As text, which is all that an environment holds: a number must not have to be a number already."""
    given = WorkerSettings(
        zero_stage=2, ranks=2, offload_optimizer=True, threads=1, tokens_per_pass=64, instance="w-0", shadow_prefix="other."
    ).model_dump(mode="json")
    ran = headrace("config", "show", "--json", **{f"HEADRACE_WORKER__{name.upper()}": str(value) for name, value in given.items()})
    assert ran.code == 0, ran.err
    shown = {name.removeprefix("worker."): entry for name, entry in ran.json.items() if name.startswith("worker.")}
    assert {name: entry["value"] for name, entry in shown.items()} == given
    assert {entry["source"] for entry in shown.values()} == {"environment"}
