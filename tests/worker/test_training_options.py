"""Options of the trainer through the whole worker: references from the ledger, plots in the store, several ranks."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.worker.conftest import WorkerProcess, following, learner
from tests.worker.groups import group

from headrace.core.models import create_model
from headrace.core.settings import Settings
from headrace.core.store import fetch_folder, open_store
from headrace.producers import TrajectoryProducer
from headrace.schemas.events import GroupRejected, JobStateChanged
from headrace.schemas.jobs import JobState
from headrace.schemas.reasons import RejectionReason
from headrace.schemas.state import ModelState, StepRecord
from headrace.schemas.training import BatchPolicy, LoraSettings, ModelSettings, OptimizerSettings, TrainConfig


async def test_a_step_of_the_same_model_is_the_reference_that_the_config_names(shared: Settings) -> None:
    """Step 3 with the version before it as the reference; then a lag that reaches back beyond the first step: the base model."""
    model = await learner(shared, "kl by step")
    async with following(shared, model.model_id) as seen, TrajectoryProducer(shared, model_id=model.model_id) as producer:
        for number, config in enumerate(
            [
                None,
                TrainConfig(kl_penalty_coef=0.1, kl_penalty_step_lag=5),
                TrainConfig(kl_penalty_coef=0.1, kl_penalty_reference_step=1),
                TrainConfig(kl_penalty_coef=0.1, kl_penalty_reference_step=3),
            ]
        ):
            await producer.submit_job([group(f"g{number}", seed=number)], config)
            await seen.until(StepRecord, number + 1)
        steps = seen.of(StepRecord)
    assert "kl_reference" not in steps[0].metrics
    assert steps[1].metrics["kl_reference"] > 1e-9, "one step away from the base model"
    assert steps[2].metrics["kl_reference"] > 1e-9
    assert steps[3].metrics["kl_reference"] == pytest.approx(0, abs=1e-12), "its own version is the reference"


async def test_a_job_of_groups_that_were_trained_before_ends_without_them(shared: Settings) -> None:
    """As when a file with group ids is sent as a job twice."""
    model = await learner(shared, "sent twice")
    async with following(shared, model.model_id) as seen, TrajectoryProducer(shared, model_id=model.model_id) as producer:
        await producer.submit_job([group("a")])
        await seen.until(StepRecord, 1)
        again = await producer.submit_job([group("a"), group("b", seed=1)])
        _, step = await seen.until(StepRecord, 2)
        (refused,) = await seen.until(GroupRejected, 1)
    assert (step.job_id, step.groups) == (again, 1)
    assert (refused.group_id, refused.job_id, refused.reason) == ("a", again, RejectionReason.DUPLICATE)


async def test_a_reference_that_does_not_exist_fails_its_job_with_both_numbers(shared: Settings) -> None:
    model = await learner(shared, "kl to nowhere")
    async with following(shared, model.model_id) as seen, TrajectoryProducer(shared, model_id=model.model_id) as producer:
        await producer.submit_job([group("a")], TrainConfig(kl_penalty_coef=0.1, kl_penalty_reference_step=7))
        events = await seen.until(JobStateChanged, 3)
        (refused,) = await seen.until(GroupRejected, 1)
        await producer.submit_job([group("b")])
        (step,) = await seen.until(StepRecord, 1)
    assert events[-1].state is JobState.FAILED
    assert "kl_penalty_reference_step is 7, but the model has 0 steps" in (events[-1].message or "")
    assert refused.reason is RejectionReason.STEP_FAILED
    assert step.step == 1


async def test_an_adapter_outside_the_store_fails_its_job_and_one_inside_is_used(shared: Settings, tmp_path: Path) -> None:
    settings = ModelSettings(
        base_model="tiny",
        adaptation="lora",
        lora=LoraSettings(r=4, alpha=8),
        batch=BatchPolicy(groups_per_step=2),
        train=TrainConfig(learning_rate=1e-2),
        optimizer=OptimizerSettings(max_grad_norm=1.0),
    )
    model = await create_model(shared, project="tests", name="kl to an adapter", model=settings)
    async with following(shared, model.model_id) as seen, TrajectoryProducer(shared, model_id=model.model_id) as producer:
        await producer.submit_job([group("a")])
        (first,) = await seen.until(StepRecord, 1)
        outside = TrainConfig(kl_penalty_coef=0.1, kl_ref_adapter_path=f"file://{tmp_path}/elsewhere")
        await producer.submit_job([group("b", seed=1)], outside)
        events = await seen.until(JobStateChanged, 6)
        inside = TrainConfig(kl_penalty_coef=0.1, kl_ref_adapter_path=first.weights.uri)
        await producer.submit_job([group("c", seed=2)], inside)
        _, second = await seen.until(StepRecord, 2)
    assert events[-1].state is JobState.FAILED
    assert "is not in this object store" in (events[-1].message or "")
    # The named adapter is the one that the learner holds: it has no distance to itself.
    assert second.metrics["kl_reference"] == pytest.approx(0, abs=1e-12)


async def test_plots_of_a_step_lie_in_the_store_and_the_ledger_says_where(shared: Settings, tmp_path: Path) -> None:
    model = await learner(shared, "plots")
    async with following(shared, model.model_id) as seen, TrajectoryProducer(shared, model_id=model.model_id) as producer:
        await producer.submit_job([group("a")], TrainConfig(plot_tensors=True))
        await producer.submit_job([group("b", seed=1)])
        drawn, not_drawn = await seen.until(StepRecord, 2)
    assert not_drawn.plots is None
    assert drawn.plots is not None
    fetch_folder(open_store(shared.store.url, shared.s3), drawn.plots.uri, drawn.plots.digest, tmp_path / "plots")
    files = sorted(path for path in (tmp_path / "plots").iterdir())
    assert [path.name for path in files] == ["advantages.png", "logprobs.png", "positions.png", "segments.png", "tokens.png", "weights.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in files)


async def test_the_scalars_of_a_model_go_on_from_step_to_step(shared: Settings) -> None:
    model = await learner(shared, "scalars")
    async with following(shared, model.model_id) as seen, TrajectoryProducer(shared, model_id=model.model_id) as producer:
        for number in range(3):
            await producer.submit_job([group(f"g{number}", seed=number)])
        steps = await seen.until(StepRecord, 3)
        states = seen.of(ModelState)
    assert [step.scalars.updates for step in steps] == [1, 2, 3]
    assert [step.scalars.reward_trend.n for step in steps] == [1, 2, 3]
    assert states[-1].scalars == steps[-1].scalars


def rank_of(worker: WorkerProcess, number: int) -> int:
    """The process id of a rank below a worker, or below its launcher, found by the name that it gave itself."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])

    def is_below(pid: int) -> bool:
        while pid in parents and pid != worker.process.pid:
            pid = parents[pid]
        return pid == worker.process.pid

    (rank,) = [pid for pid in parents if is_below(pid) and Path(f"/proc/{pid}/comm").read_text().strip() == f"headrace-rank-{number}"]
    return rank


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(sys.platform != "linux", reason="finds the rank by its name in /proc")
async def test_a_worker_under_torchrun_is_rank_0_and_the_launcher_ends_all_ranks_when_one_is_lost(
    settings: Settings, tmp_path: Path
) -> None:
    """As across nodes: `torchrun --no-python headrace worker`. Only rank 0 talks to Kafka."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    log = tmp_path / "torchrun.log"
    worker = WorkerProcess(settings, log, [*torchrun, "--no-python", sys.executable, "-m", "headrace.cli"])
    try:
        model = await learner(settings, "launched")
        async with following(settings, model.model_id) as seen, TrajectoryProducer(settings, model_id=model.model_id) as producer:
            for number in range(2):
                await producer.submit_job([group(f"g{number}", seed=number)])
            steps = await seen.until(StepRecord, 2)
        assert [step.fingerprint.world_size for step in steps] == [2, 2]
        # The rank below the worker: with it the worker ends, and torchrun ends the other one.
        os.kill(rank_of(worker, 0), signal.SIGKILL)
        async with TrajectoryProducer(settings, model_id=model.model_id) as producer:
            await producer.submit_job([group("last")])
        assert await asyncio.to_thread(worker.process.wait, 120) != 0
    finally:
        worker.close()
        print(log.read_text()[-6000:])  # noqa: T201 - pytest shows it with a failure


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the rank by its name in /proc")
async def test_a_worker_of_two_ranks_trains_what_one_rank_trains_and_survives_the_loss_of_a_rank(
    settings: Settings, shared: Settings, start_worker: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    """The world is ended and restarted around the committed state; nothing is trained twice, nothing is lost."""
    two = settings.model_copy(update={"worker": settings.worker.model_copy(update={"ranks": 2, "zero_stage": 1})})
    worker = start_worker(two)
    weights = []
    for where in (two, shared):
        model = await learner(where, "two ranks")
        async with following(where, model.model_id) as seen, TrajectoryProducer(where, model_id=model.model_id) as producer:
            for number in range(2):
                await producer.submit_job([group(f"g{number}", seed=number), group(f"h{number}", seed=9 + number)])
            steps = await seen.until(StepRecord, 2)
            if where is two:
                assert steps[0].fingerprint.world_size == 2
                os.kill(rank_of(worker, 1), signal.SIGKILL)
            await producer.submit_job([group("last", seed=5)])
            third = (await seen.until(StepRecord, 3))[2]
        assert [step.step for step in (*steps, third)] == [1, 2, 3]
        folder = tmp_path / f"weights-{len(weights)}"
        fetch_folder(open_store(where.store.url, where.s3), third.weights.uri, third.weights.digest, folder)
        weights.append(load_file(folder / "model.safetensors"))
    assert max(float((weights[0][name] - weights[1][name]).abs().max()) for name in weights[0]) < 1e-5
