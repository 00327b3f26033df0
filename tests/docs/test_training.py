"""docs/training.md and the code name the same things: options with their types and defaults, metrics, and files that are quoted."""

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel
from tests.consumers.conftest import tiny_model as tiny_model  # noqa: PLC0414 - a fixture, shared
from tests.trainer.tiny import group, sequence
from tests.worker.conftest import following, learner
from tests.worker.conftest import shared as shared  # noqa: PLC0414 - a fixture, shared
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.cli.model_settings import model_settings
from headrace.core.presets import preset
from headrace.core.settings import Settings, WorkerSettings
from headrace.producers.examples import decode_example
from headrace.schemas.state import StepRecord
from headrace.schemas.training import BatchPolicy, OptimizerSettings, SftConfig, TrainConfig
from headrace.trainer.evaluation import NAMES
from headrace.trainer.metrics import LAG_BUCKETS, TokenStats, batch_metrics, token_metrics
from headrace.trainer.options import resolve

ROOT = Path(__file__).parents[2]
SNIPPETS = ROOT / "docs" / "snippets"
PAGE = (ROOT / "docs" / "training.md").read_text()
# `seconds_*` and those below are the engine's own; the step of the last test has them.
OF_THE_STEP = {"loss", "policy_loss", "kl_loss", "grad_norm", "learning_rate", "tokens_per_second", "peak_memory_bytes"} | {
    f"seconds_{phase}" for phase in ("prepare", "pack", "score", "update", "write")
}


def rows(heading: str, first: str = "option") -> list[list[str]]:
    """Cells of the tables of a section whose first column has this head."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    tables = re.findall(rf"^\| {first} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", section, re.MULTILINE)
    lines = [line for table in tables for line in table.splitlines()]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def range_of(kind: type[BaseModel], name: str) -> str:
    """How the page writes a field's type and range, from its JSON Schema."""
    found = kind.model_json_schema()["properties"][name]
    return ", ".join(_range_of(part) for part in found.get("anyOf", [found]) if part.get("type") != "null")


def _range_of(part: dict[str, Any]) -> str:
    if part.get("type") == "array":
        return f"list of {_range_of(part['items'])}"
    if "enum" in part or "const" in part:
        values = part.get("enum", [part.get("const")])
        return ", ".join(f"`{value}`" if isinstance(value, str) else str(value) for value in values)
    word = {"number": "float", "integer": "int", "boolean": "bool", "string": "string"}[part["type"]]
    bounds = [("exclusiveMinimum", ">"), ("minimum", "≥"), ("exclusiveMaximum", "<"), ("maximum", "≤")]
    said = [f"{sign} {number(part[key])}" for key, sign in bounds if key in part]
    return " ".join([word, ", ".join(said)]).strip()


def number(value: float) -> str:
    """Powers of ten from 1e5 and below 1e-4 by their exponent."""
    text = re.sub(r"^(-?1)(0{5,})$", lambda found: f"{found[1]}e{len(found[2])}", f"{value:.10g}")
    return re.sub(r"^-", "−", text.replace("e-0", "e-").replace("e+", "e"))


@pytest.mark.parametrize(
    ("heading", "kind"),
    [
        ("Options", TrainConfig),
        ("Learning rate and optimizer", OptimizerSettings),
        ("Batches", BatchPolicy),
        ("Supervised fine-tuning", SftConfig),
    ],
)
def test_every_option_is_there_in_the_order_of_the_code_with_its_type_and_range(heading: str, kind: type[BaseModel]):
    table = rows(heading)
    assert [names(option)[0] for option, *_ in table] == list(kind.model_fields)
    assert {names(option)[0]: said for option, said, *_ in table} == {name: range_of(kind, name) for name in kind.model_fields}


def written(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return number(value) if isinstance(value, int | float) else str(value)


@pytest.mark.parametrize(
    ("heading", "kind"),
    [("Learning rate and optimizer", OptimizerSettings), ("Batches", BatchPolicy), ("Supervised fine-tuning", SftConfig)],
)
def test_defaults_are_those_of_the_code(heading: str, kind: type[BaseModel]):
    said = {names(option)[0]: default for option, _, default, *_ in rows(heading)}
    assert said == {name: written(field.default) for name, field in kind.model_fields.items()}


def test_settings_of_a_world_are_those_of_the_code():
    table = rows("Ranks", "setting")
    assert len(table) == 8
    for setting, said, default, *_ in table:
        (name,) = names(setting)
        assert said == range_of(WorkerSettings, name)
        assert default == written(WorkerSettings.model_fields[name].default)


def test_defaults_of_a_jobs_options_are_what_they_resolve_to():
    plain, ppo = resolve(TrainConfig()), resolve(TrainConfig(ppo=True))
    assert ppo.loss.epsilon_high == ppo.loss.epsilon
    expected = {
        "learning_rate": written(plain.learning_rate),
        "ppo": written(plain.loss.kind == "ppo"),
        "loss_fn": plain.loss.kind,
        "epsilon": f"ppo {ppo.loss.epsilon}, cispo {plain.loss.epsilon}",
        "epsilon_high": f"ppo ε, cispo {plain.loss.epsilon_high}",
        "importance_sampling_level": plain.loss.level,
        "max_negative_advantage_importance_sampling_weight": written(plain.loss.negative_cap).replace("none", "off"),
        "mask_prob_ratio": written(plain.loss.mask_prob_ratio),
        "kimi_k2_tau": written(plain.loss.kimi_k2_tau).replace("none", "off"),
        "kl_penalty_coef": written(plain.kl.coef),
        "kl_penalty_source": plain.kl.source,
        "advantage_balance": written(plain.advantages.balance),
        "scale_rewards": written(plain.advantages.scale_rewards),
        "normalize_advantages": written(plain.advantages.scale_rewards),
        "scale_learning_rate_by_reward_std_dev": written(plain.scale_rate_by_reward_deviation),
        "num_trajectories_learning_rate_multiplier_power": written(plain.trajectories_power),
        "logprob_calculation_chunk_size": written(plain.logprob_chunk),
        "precalculate_logprobs": written(plain.loss.recompute_old),
        "truncated_importance_sampling": written(plain.loss.truncation_cap).replace("none", "off"),
        "allow_training_without_logprobs": written(plain.allow_training_without_logprobs),
        "plot_tensors": written(plain.plot_tensors),
        "loss_aggregation": plain.aggregation,
        "loss_aggregation_constant": written(plain.aggregation_constant),
        "rescale_advantages": written(plain.advantages.rescale),
        "kl_loss_coef": written(plain.loss.kl_loss_coef),
    }
    said = {names(option)[0]: default for option, _, default, *_ in rows("Options")}
    assert said | expected == said


def test_presets_are_those_of_the_code():
    for name, loss, ratio, bounds, kl, aggregation in rows("Presets", "preset"):
        options = resolve(preset(names(name)[0]))
        low, high = 1 - options.loss.epsilon, 1 + options.loss.epsilon_high
        assert (loss, ratio) == (options.loss.kind.upper(), options.loss.level)
        assert bounds == f"[{low:g}, {high:g}]"
        assert kl == (written(options.loss.kl_loss_coef) if options.loss.kl_loss_coef else "none")
        assert names(aggregation) == [options.aggregation]
        assert not options.advantages.rescale


def documented_metrics() -> set[str]:
    return {name for cell, *_ in rows("Metrics of a step", "metric") for name in names(cell)}


def as_documented(found: set[str]) -> set[str]:
    """By lag there is one name for all lags."""
    return {re.sub(r"^(lag_tokens|ratio_mean_lag|ess_lag)_(\d+|16_up|unknown)$", r"\1_<k>", name) for name in found}


def test_every_metric_is_named_and_no_other():
    lags = np.array([-1, 0, LAG_BUCKETS, LAG_BUCKETS + 1])
    ones = np.array([0.5, 1.0, 1.5, 2.0])
    stats = TokenStats(
        new_N=-ones,
        old_N=-ones / 2,
        behaviour_N=-(ones**2),
        reference_N=-ones * 2,
        ratio_N=ones,
        clipped_N=ones > 1,
        entropy_N=ones,
        advantages_N=ones,
        weights_N=ones,
        lags_N=lags,
    )
    of_tokens = token_metrics(stats)
    of_batch = batch_metrics([group([0.0, 1.0], [sequence([1], [2]), sequence([1], [3])])], [])
    never_without_rows = {"sharing", "rank_balance"}
    assert as_documented({*of_tokens, *of_batch}) | never_without_rows | OF_THE_STEP == documented_metrics()


def test_every_number_of_an_evaluation_is_named_and_no_other():
    assert {name for cell, *_ in rows("Evaluation", "number") for name in names(cell)} == set(NAMES)


@pytest.mark.parametrize(("language", "name"), [("python", "jobs.py"), ("yaml", "model.yaml"), ("json", "examples.jsonl")])
def test_the_page_quotes_the_snippet_files(language: str, name: str):
    assert f"```{language}\n{(SNIPPETS / name).read_text()}```" in PAGE


def test_the_settings_file_makes_a_model():
    settings = model_settings(SNIPPETS / "model.yaml", {})
    assert settings.train.kl_penalty_step_lag == 10
    assert settings.optimizer.schedule == "cosine"
    assert settings.batch.minimum_group_size == 2


def test_the_examples_file_holds_examples():
    lines = (SNIPPETS / "examples.jsonl").read_bytes().splitlines()
    assert [decode_example(line).group.purpose for line in lines] == ["sft", "sft"]


def test_every_command_and_its_options_exist():
    found = re.findall(r"headrace ((?:worker|produce|models create)\b[^`\n]*)", PAGE)
    assert {command.split()[0] for command in found} == {"worker", "produce", "models"}
    for command in found:
        words = ["models", "create"] if command.startswith("models") else command.split()[:1]
        for option in [None, *re.findall(r"--[a-z-]+", command)]:
            # An option that does not exist is complained of before --help is answered.
            result = CliRunner().invoke(app, [*words, "--help"], terminal_width=200)
            assert result.exit_code == 0, words
            assert option is None or option in result.output, (words, option)


def test_links_to_headings_lead_somewhere():
    headings = {re.sub(r"[^a-z0-9 -]", "", line.lower()).replace(" ", "-") for line in re.findall(r"^#+ (.*)$", PAGE, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGE)) <= headings


async def test_the_jobs_example_trains_a_model_both_ways_and_its_metrics_are_named(shared: Settings):
    model = await learner(shared, "training-page", groups_per_step=1)
    environment = os.environ | {
        "HEADRACE_KAFKA__BOOTSTRAP_SERVERS": str(shared.kafka.bootstrap_servers),
        "HEADRACE_TOPICS": shared.topics.model_dump_json(),
        "HEADRACE_STORE": shared.store.model_dump_json(),
    }
    async with following(shared, model.model_id) as seen, asyncio.timeout(120):
        producer = await asyncio.create_subprocess_exec(
            sys.executable, SNIPPETS / "jobs.py", model.model_id, env=environment, stdout=subprocess.PIPE
        )
        output, _ = await producer.communicate()
        assert [line.split()[0] for line in output.decode().splitlines()] == ["sft", "rl"]
        await seen.until(StepRecord, 2)
    steps = seen.of(StepRecord)
    assert [step.updates for step in steps] == [2, 1]
    reported = as_documented({name for step in steps for name in step.metrics})
    assert reported <= documented_metrics()
    assert reported >= OF_THE_STEP | {"kl_reference", "sharing", "rank_balance"}
