"""Replay of what real workers trained: three steps with one rank, then one with two ranks; and that it changes nothing."""

import asyncio
import os
import subprocess
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from tests.cli.conftest import Headrace
from tests.cli.conftest import headrace as headrace  # noqa: PLC0414 - a fixture, shared
from tests.worker.conftest import WorkerProcess, environment_of, following, learner, settings_of
from tests.worker.groups import group

from headrace.consumers.replay.start import find_route
from headrace.core.kafka import client_options
from headrace.core.ledger import StepRange, read_ledger
from headrace.core.models import get_model, model_id_of
from headrace.core.reading import end_offsets
from headrace.core.settings import Settings
from headrace.core.store import open_store
from headrace.core.topic_admin import apply
from headrace.producers import TrajectoryProducer
from headrace.schemas.state import StepRecord
from headrace.schemas.topics import TOPICS
from headrace.schemas.weights import WeightsPublished

pytestmark = pytest.mark.slow
WAIT = 600.0
"""Seconds; pytest's own limit comes first, but where a run raises it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a worker left behind."""

    settings: Settings
    model_id: str
    steps: list[StepRecord]


def everything(settings: Settings) -> dict[str, Any]:
    """What a replay must leave as it is: the end of every topic, all consumer groups with their offsets, all objects and their content."""

    async def of_kafka() -> dict[str, Any]:
        options = client_options(settings.kafka, "test")
        ends = {spec.name: await end_offsets(options, settings.topic_names.full(spec.name)) for spec in TOPICS}
        admin = AIOKafkaAdminClient(**options)
        await admin.start()
        try:
            groups = sorted(name for name, *_ in await admin.list_consumer_groups() if name.startswith(settings.worker_group_id))
            offsets = {name: sorted((await admin.list_consumer_group_offsets(name)).items()) for name in groups}
        finally:
            await admin.close()
        return {"ends": ends, "offsets": offsets}

    store = open_store(settings.store.url, settings.s3)
    return asyncio.run(of_kafka()) | {"objects": {found.key: store.get_bytes(found.key) for found in store.list()}}


async def _train(settings: Settings, model_id: str, numbers: range, steps: int, *, inline_limit: int | None = None) -> None:
    """Send groups `g<number>` and wait until there are so many steps; a low limit makes claims of them."""
    if inline_limit is not None:
        settings = settings.model_copy(update={"producer": settings.producer.model_copy(update={"inline_limit_bytes": inline_limit})})
    async with following(settings, model_id) as seen, TrajectoryProducer(settings, model_id=model_id) as producer:
        for i in numbers:
            sent = await producer.send(group(f"g{i}", seed=i))
            assert sent.claimed == (inline_limit is not None)
        await seen.until(StepRecord, steps, WAIT)


@pytest.fixture(scope="module")
def one_rank(kafka: str, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Trained:
    """Three steps by a worker of one rank, which has ended; the groups of the third are claims."""
    folder = tmp_path_factory.mktemp("replay")
    settings = settings_of(kafka, f"replay{uuid.uuid4().hex[:8]}.", folder, tiny_model)
    asyncio.run(apply(settings))

    async def train() -> str:
        model = await learner(settings)
        await _train(settings, model.model_id, range(4), 2)
        await _train(settings, model.model_id, range(4, 6), 3, inline_limit=1024)
        return model.model_id

    worker = WorkerProcess(settings, folder / "worker.log")
    try:
        model_id = asyncio.run(train())
        assert worker.stop() == 0, (folder / "worker.log").read_text()[-4000:]
    finally:
        worker.close()
    return Trained(settings=settings, model_id=model_id, steps=asyncio.run(read_ledger(settings, model_id)))


@pytest.fixture
def environment(one_rank: Trained) -> dict[str, str]:
    return environment_of(one_rank.settings)


def test_a_fork_sets_options_and_leaves_groups_out_and_says_how_far_it_went(
    headrace: Headrace, one_rank: Trained, environment: dict[str, str], tmp_path: Path
) -> None:
    """Step 1 has nothing left; step 2 trains on one of its two groups, at another rate."""
    excluded = [option for name in ("g0", "g1", "g2") for option in ("--exclude", name)]
    options = ["--set", "learning_rate=1e-4", *excluded, "--to", "weights", "--json"]
    ran = headrace("replay", "--model", one_rank.model_id, "--steps", "1..2", *options, **environment)
    assert ran.code == 0, ran.err
    first, second = ran.json["steps"]
    assert first["loss"] is None
    assert second["loss"] not in {None, one_rank.steps[1].loss}
    assert "nothing left to train on" in ran.err
    (option,) = ran.json["fork"]["config"]
    assert (option["name"], option["a"], option["b"]) == ("config.learning_rate", 1e-3, 1e-4)
    assert 0 < ran.json["distance"]["relative"] < 0.1
    assert (tmp_path / "weights" / "model.safetensors").is_file()


@pytest.fixture(scope="module")
def published(one_rank: Trained) -> str:
    """What was said when a fork of step 2 that changes nothing was published as `branch`; a worker will make it."""
    words = ["replay", "--model", "learner", "--project", "tests", "--steps", "2", "--publish-to", "branch"]
    command = [sys.executable, "-m", "headrace.cli", *words, "--set", "learning_rate=1e-3", "--set", "optimizer.beta1=0.9"]
    ran = subprocess.run(command, env=os.environ | environment_of(one_rank.settings), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_a_fork_that_changes_nothing_has_the_originals_bits(published: str) -> None:
    assert "1 step: equal to the ledger, bit for bit" in published  # step 1, which only leads there
    assert "the fork's weights are the original's, bit for bit" in published


def test_what_does_not_fit_is_refused_before_anything_runs(
    headrace: Headrace, published: str, environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "there").mkdir()
    refused = {
        ("--steps", "2..9"): "steps 2..9 were asked for, but the ledger of learner ends at step 3",
        ("--steps", "2", "--exclude", "g0"): "--exclude g0: no step from 2 to 2 trained on a group of that id",
        ("--steps", "2", "--set", "learning_rate=-1"): "--set learning_rate: Input should be greater than or equal to 0",
        ("--steps", "2", "--set", "optimizer.schedule=linear"): "--set optimizer: schedule='linear' contradicts schedule_updates=None",
        ("--steps", "2", "--set", "packed_sequence_length=65536"): "is above max_sequence_tokens=32768",
        ("--steps", "2", "--to", "there"): "there exists: remove it, or name another folder",
        ("--steps", "2", "--publish-to", "branch"): "project 'tests' has a model 'branch' already",
    }
    for options, said in refused.items():
        ran = headrace("replay", "--model", "learner", "--project", "tests", *options, **environment)
        assert (ran.code, ran.out) == (1, "")
        assert said in ran.err


@pytest.fixture(scope="module")
def two_ranks(one_rank: Trained, published: str, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A fourth step, by a worker of two ranks, which made the model `branch` as well and has ended."""
    worker = one_rank.settings.worker.model_copy(update={"ranks": 2})
    settings = one_rank.settings.model_copy(update={"worker": worker})
    log = tmp_path_factory.mktemp("two-ranks") / "worker.log"

    async def train() -> None:
        await _train(settings, one_rank.model_id, range(6, 8), 4)
        async with following(settings, model_id_of(settings.account, "tests", "branch")) as seen:
            await seen.until(WeightsPublished, 1, WAIT)

    process = WorkerProcess(settings, log)
    try:
        asyncio.run(train())
        assert process.stop() == 0, log.read_text()[-4000:]
    finally:
        process.close()
    return Trained(settings=settings, model_id=one_rank.model_id, steps=asyncio.run(read_ledger(settings, one_rank.model_id)))


def test_steps_of_one_and_of_two_ranks_are_equal_bit_for_bit_and_nothing_has_changed(
    headrace: Headrace, two_ranks: Trained, environment: dict[str, str]
) -> None:
    assert [step.fingerprint.world_size for step in two_ranks.steps] == [1, 1, 1, 2]
    before = everything(two_ranks.settings)
    ran = headrace("replay", "--model", two_ranks.model_id, "--steps", "1..4", "--json", **environment)
    assert ran.code == 0, ran.err
    assert "4 steps: equal to the ledger, bit for bit" in ran.err
    assert [(step["step"], step["same_plan"], step["same_weights"]) for step in ran.json["steps"]] == [
        (n, True, True) for n in (1, 2, 3, 4)
    ]
    assert [step["loss"] for step in ran.json["steps"]] == [step.loss for step in two_ranks.steps]
    assert everything(two_ranks.settings) == before


def test_a_published_fork_is_a_model_with_the_weights_of_its_last_step(two_ranks: Trained) -> None:
    settings, branch = two_ranks.settings, model_id_of(two_ranks.settings.account, "tests", "branch")
    (record,) = asyncio.run(read_ledger(settings, branch))
    state = asyncio.run(get_model(settings, branch)).state
    assert state is not None
    assert (record.cut, state.status, state.policy_version) == ("forked", "active", 1)
    assert record.weights.digest == two_ranks.steps[1].weights.digest
    assert state.scalars == two_ranks.steps[1].scalars


async def test_a_replay_starts_from_the_nearest_snapshot_that_still_exists(two_ranks: Trained) -> None:
    settings = two_ranks.settings
    store = open_store(settings.store.url, settings.s3)
    state = (await get_model(settings, two_ranks.model_id)).state
    assert state is not None
    near = await find_route(settings, store, state, StepRange.parse("4"))
    assert near.start is not None
    assert (near.start.step, near.gone, [record.step for record in near.records]) == (3, 0, [4])
    store.delete(f"{store.resolve(near.start.snapshot.uri)}/parameters.safetensors")
    far = await find_route(settings, store, state, StepRange.parse("4"))
    assert (far.start, far.gone, [record.step for record in far.records]) == (None, 1, [1, 2, 3, 4])


def test_what_differs_is_named_with_its_cause_and_a_payload_that_is_gone_ends_it(
    headrace: Headrace, two_ranks: Trained, environment: dict[str, str]
) -> None:
    """Two ranks where the ledger has one, up to step 3, whose groups are claims."""
    store = open_store(two_ranks.settings.store.url, two_ranks.settings.s3)
    payloads = [stored.key for stored in store.list("payloads/")]
    assert len(payloads) == 2
    store.delete(payloads[0])
    ran = headrace("replay", "--model", two_ranks.model_id, "--steps", "1..3", "--ranks", "2", **environment)
    assert ran.code == 1
    assert "ranks: 2, as asked for; the ledger has 1" in ran.out
    assert [line.split()[1] for line in ran.out.splitlines() if line.startswith("step ") and "DIFFERS" in line] == ["1", "2"]
    assert f"the ledger has {two_ranks.steps[0].weights.digest}" in ran.out
    assert ran.out.count("likely cause: the environment, world_size: 2, the ledger has 1") == 1
    assert "2 of 2 steps are not equal to the ledger, the first is step 1" in ran.out
    assert "step 3: the group at offset" in ran.err
    assert "does not exist: the payload was deleted" in ran.err
