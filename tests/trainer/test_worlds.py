"""One training, many worlds: micro steps, ranks and ZeRO stages change nothing; a world that loses a rank ends and says why."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from safetensors.torch import load_file
from tests.trainer.tiny import ONE_THREAD, group, random_groups, sequence

from headrace.schemas.training import SftConfig, TrainConfig
from headrace.trainer.engine import TrainingEngine
from headrace.trainer.plan import BaseSource, KlReference, StateKey, StepPlan, StepResult
from headrace.trainer.rank import RankDiedError, RankWorld, StepFailedError
from headrace.trainer.world import WorldSettings

Plans = Callable[..., StepPlan]
Runs = Callable[[StepPlan], StepResult]
Stage = Literal[0, 1, 2, 3]
# Rows of 32 tokens: several micro steps a rank, and a number of rows that two ranks can't share evenly.
SMALL_ROWS = TrainConfig(learning_rate=1e-3, packed_sequence_length=32)
# Adam divides a gradient by its own size: where that is nearly 0 rounding alone decides its sign, unless eps is well above rounding.
EPS = 1e-4
ADAPTATIONS: list[Literal["full", "lora"]] = ["full", "lora"]


def three_steps(run: Runs, make_plan: Plans, attempt: str, **options: object) -> tuple[list[StepResult], StepPlan]:
    state: StateKey | None = None
    results: list[StepResult] = []
    for _ in range(3):
        plan = make_plan(state, attempt=attempt, eps=EPS, **options)
        results.append(run(plan))
        state = results[-1].key
    return results, plan


def weights_of(plan: StepPlan) -> dict[str, object]:
    (path,) = Path(plan.out_dir, "weights").glob("*.safetensors")
    return dict(load_file(path))


def furthest(one: StepPlan, other: StepPlan) -> float:
    mine, theirs = weights_of(one), weights_of(other)
    assert mine.keys() == theirs.keys()
    return max(float((mine[name] - theirs[name]).abs().max()) for name in mine)  # type: ignore[operator]  # tensors


@pytest.fixture(params=[0, 1, 2, 3], scope="module")
def two_ranks(request: pytest.FixtureRequest) -> Iterator[tuple[Stage, RankWorld]]:
    world = RankWorld(WorldSettings(size=2, threads=1, zero_stage=request.param))
    world.start()
    yield request.param, world
    world.kill()
    world.close()


@pytest.mark.parametrize("tokens", [24, 48, 96, 4096])
def test_the_update_does_not_depend_on_the_number_of_micro_steps(make_plan: Plans, tokens: int):
    """Against rows of 4,096 tokens, where all is one micro step."""
    one_row, short_rows = (TrainConfig(learning_rate=1e-3, packed_sequence_length=length) for length in (4096, tokens))
    whole = three_steps(TrainingEngine(ONE_THREAD).run, make_plan, "whole", config=one_row)
    parts = three_steps(TrainingEngine(ONE_THREAD).run, make_plan, "parts", config=short_rows)
    assert parts[0][0].num_sequences >= whole[0][0].num_sequences == 1
    for mine, theirs in zip(parts[0], whole[0], strict=True):
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-4)
        assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)
    assert furthest(parts[1], whole[1]) < 1e-6


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("adaptation", ADAPTATIONS)
def test_zero_on_one_rank_trains_the_same_weights(make_plan: Plans, stage: Stage, adaptation: str):
    plain = three_steps(TrainingEngine(ONE_THREAD).run, make_plan, "plain", config=SMALL_ROWS, adaptation=adaptation)
    sharded = three_steps(
        TrainingEngine(WorldSettings(threads=1, zero_stage=stage)).run, make_plan, "sharded", config=SMALL_ROWS, adaptation=adaptation
    )
    assert furthest(sharded[1], plain[1]) < 1e-6
    assert [r.grad_norm for r in sharded[0]] == pytest.approx([r.grad_norm for r in plain[0]], rel=1e-5)
    assert sharded[0][0].fingerprint.zero_stage == stage


@pytest.mark.slow
@pytest.mark.parametrize("adaptation", ADAPTATIONS)
def test_two_ranks_train_the_same_weights_at_every_zero_stage(two_ranks: tuple[Stage, RankWorld], make_plan: Plans, adaptation: str):
    _, world = two_ranks
    alone = three_steps(TrainingEngine(ONE_THREAD).run, make_plan, "alone", config=SMALL_ROWS, adaptation=adaptation)
    evaluation = random_groups(9, groups=5)
    evaluated = three_steps(
        TrainingEngine(ONE_THREAD).run, make_plan, "evaluated", config=SMALL_ROWS, adaptation=adaptation, evaluation=evaluation
    )
    together = three_steps(world.run, make_plan, "together", config=SMALL_ROWS, adaptation=adaptation, evaluation=evaluation)
    assert furthest(together[1], alone[1]) < 1e-6
    for mine, theirs in zip(together[0], alone[0], strict=True):
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-5)
        assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5)
        # Every rank's tokens are in the metrics.
        assert mine.metrics["ess_tokens"] == pytest.approx(theirs.metrics["ess_tokens"], rel=1e-5)
        assert mine.metrics["trainable_tokens"] == theirs.metrics["trainable_tokens"]
    for mine, theirs in zip(together[0], evaluated[0], strict=True):
        for name in ("eval/loss", "eval/ratio_mean", "eval/reward_weighted", "eval/kl_behaviour"):
            assert mine.metrics[name] == pytest.approx(theirs.metrics[name], rel=1e-4), name
    assert together[0][0].fingerprint.world_size == 2


@pytest.mark.slow
def test_matrices_that_zero_3_takes_apart_train_the_same_weights(
    two_ranks: tuple[Stage, RankWorld], make_plan: Plans, make_base: Callable[..., BaseSource]
):
    """ZeRO 3 keeps parameters below 100,000 numbers whole: the other tests' model is all of that kind."""
    stage, world = two_ranks
    if stage != 3:
        pytest.skip("about ZeRO 3")
    base = make_base(hidden_size=400, intermediate_size=320)
    alone = three_steps(TrainingEngine(ONE_THREAD).run, make_plan, "alone", base=base)
    together = three_steps(world.run, make_plan, "together", base=base)
    assert furthest(together[1], alone[1]) < 1e-6


@pytest.mark.slow
def test_a_snapshot_of_one_world_continues_in_another(two_ranks: tuple[Stage, RankWorld], make_plan: Plans):
    stage, world = two_ranks
    straight, last = three_steps(TrainingEngine(ONE_THREAD).run, make_plan, "straight", config=SMALL_ROWS)
    first = make_plan(attempt="there", config=SMALL_ROWS, eps=EPS)
    state = world.run(first).key
    alone = TrainingEngine(ONE_THREAD)
    second = make_plan(state, attempt="there", config=SMALL_ROWS, eps=EPS, load_from=Path(first.out_dir, "snapshot"))
    state = alone.run(second).key
    third = make_plan(state, attempt="there", config=SMALL_ROWS, eps=EPS, load_from=Path(second.out_dir, "snapshot"))
    result = world.run(third)
    assert furthest(third, last) < 1e-6, f"ZeRO {stage}"
    assert result.loss == pytest.approx(straight[2].loss, rel=1e-5)


@pytest.mark.slow
def test_equal_worlds_give_equal_bits(two_ranks: tuple[Stage, RankWorld], make_plan: Plans):
    _, world = two_ranks
    plans = []
    for attempt in ("one", "two"):
        world.run(make_plan(attempt="other", config=SMALL_ROWS, seed=7))
        plans.append(make_plan(attempt=attempt, config=SMALL_ROWS))
        world.run(plans[-1])
    assert furthest(*plans) == 0.0


@pytest.mark.slow
def test_kl_is_centred_over_all_ranks_and_the_learner_is_itself_again(two_ranks: tuple[Stage, RankWorld], make_plan: Plans):
    _, world = two_ranks
    first = make_plan(attempt="reference", config=SMALL_ROWS, adaptation="lora")
    TrainingEngine(ONE_THREAD).run(first)
    reference = KlReference(kind="weights", folder=str(Path(first.out_dir, "weights")))
    config = SMALL_ROWS.model_copy(update={"kl_penalty_coef": 0.7, "kl_loss_coef": 0.2})
    alone = three_steps(TrainingEngine(ONE_THREAD).run, make_plan, "alone", config=config, adaptation="lora", reference=reference)
    together = three_steps(world.run, make_plan, "together", config=config, adaptation="lora", reference=reference)
    assert furthest(together[1], alone[1]) < 1e-6
    assert [r.metrics["kl_reference"] for r in together[0]] == pytest.approx(
        [r.metrics["kl_reference"] for r in alone[0]], rel=1e-4, abs=1e-9
    )


@pytest.mark.slow
def test_a_rank_that_raises_ends_the_world_with_its_traceback(make_plan: Plans):
    world = RankWorld(WorldSettings(size=2, threads=1))
    world.start()
    try:
        with pytest.raises(StepFailedError, match=r"rank \d of 2: (.|\n)*the plan brings none"):
            world.run(make_plan(config=TrainConfig(kl_loss_coef=0.1)))
        assert not world.alive
    finally:
        world.close()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_or_hangs_ends_the_world_and_is_named(make_plan: Plans, number: signal.Signals, rank: int):
    world = RankWorld(WorldSettings(size=2, threads=1, silence_seconds=5))
    world.start()
    try:
        state = world.run(make_plan()).key
        assert state.step == 1
        raised: list[Exception] = []

        def run_for_ever() -> None:
            try:
                while True:
                    world.run(make_plan())
            except (RankDiedError, StepFailedError) as error:
                raised.append(error)

        caller = threading.Thread(target=run_for_ever)
        caller.start()
        pid = world.pids[rank]
        assert pid is not None
        os.kill(pid, number)
        caller.join(60)
        assert isinstance(raised[0], RankDiedError)
        assert str(raised[0]).startswith(f"rank {rank} of 2")
        assert not world.alive
    finally:
        world.close()


def test_offload_and_activation_checkpointing_change_no_weight(make_plan: Plans):
    plain = three_steps(TrainingEngine(ONE_THREAD).run, make_plan, "plain", config=SMALL_ROWS)
    for name, settings in (
        ("offload", WorldSettings(threads=1, zero_stage=2, offload_optimizer=True)),
        ("checkpointing", WorldSettings(threads=1, activation_checkpointing=True)),
    ):
        other = three_steps(TrainingEngine(settings).run, make_plan, name, config=SMALL_ROWS)
        assert furthest(other[1], plain[1]) < 1e-6, name


@pytest.mark.slow
def test_a_rank_without_a_row_makes_a_pass_of_weight_zero(two_ranks: tuple[Stage, RankWorld], make_plan: Plans):
    """Three rows for two ranks: the second rank has nothing in the second micro step."""
    _, world = two_ranks
    rng = np.random.default_rng(0)
    sequences = [
        sequence(rng.integers(0, 256, 12).tolist(), rng.integers(0, 256, 10).tolist(), (-rng.random(10)).tolist()) for _ in range(3)
    ]
    groups = (group([0.0, 1.0, 0.25], sequences),)
    together, alone = (make_plan(groups=groups, config=SMALL_ROWS, attempt=attempt, eps=EPS) for attempt in ("together", "alone"))
    result = world.run(together)
    assert (result.num_sequences, result.metrics["dummy_passes"]) == (3, 1)
    TrainingEngine(ONE_THREAD).run(alone)
    assert furthest(together, alone) < 1e-6


@pytest.mark.slow
def test_a_rank_that_never_gets_a_row_takes_part_all_the_same(two_ranks: tuple[Stage, RankWorld], make_plan: Plans):
    _, world = two_ranks
    groups = (group([0.0], [sequence([1, 2, 3], [4, 5])]),)
    together, alone = (make_plan(groups=groups, sft=SftConfig(epochs=2), attempt=attempt, eps=EPS) for attempt in ("together", "alone"))
    result = world.run(together)
    assert (result.updates, result.num_sequences, result.metrics["dummy_passes"]) == (2, 2, 2)
    TrainingEngine(ONE_THREAD).run(alone)
    assert furthest(together, alone) < 1e-6


@pytest.mark.slow
def test_a_large_plan_does_not_wait_for_a_rank_that_is_stopped(make_plan: Plans):
    """Larger than a pipe takes at once, to a rank that reads nothing."""
    world = RankWorld(WorldSettings(threads=1, silence_seconds=5))
    world.start()
    try:
        world.run(make_plan())
        pid = world.pids[0]
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(RankDiedError, match="no sign of life"):
            world.run(make_plan(groups=random_groups(0, groups=400, rollouts=8)))
    finally:
        world.close()


@pytest.mark.slow
def test_ranks_under_a_launcher_meet_by_its_environment(tmp_path: Path, make_plan: Plans):
    """torchrun, as across nodes: rank 0's process starts a rank below itself, the others serve."""
    import pickle  # noqa: PLC0415 - next to its use

    plan = make_plan(config=SMALL_ROWS, eps=EPS)
    (tmp_path / "plan.pickle").write_bytes(pickle.dumps(plan))
    script = tmp_path / "ranks.py"
    script.write_text(
        "import pickle, pathlib, sys\n"
        "from headrace.trainer.rank import RankWorld\n"
        "from headrace.trainer.rank_main import seat_of_launcher, serve\n"
        "from headrace.trainer.world import WorldSettings\n"
        "if __name__ == '__main__':\n"
        "    size, seat = seat_of_launcher()\n"
        "    settings = WorldSettings(size=size, threads=1)\n"
        "    if seat.rank:\n"
        "        serve(settings, seat)\n"
        "    else:\n"
        "        world = RankWorld(settings, launched=True)\n"
        "        world.start()\n"
        "        folder = pathlib.Path(sys.argv[1])\n"
        "        result = world.run(pickle.loads((folder / 'plan.pickle').read_bytes()))\n"
        "        (folder / 'result.pickle').write_bytes(pickle.dumps(result))\n"
        "        world.close()\n"
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    subprocess.run([*launcher, str(script), str(tmp_path)], check=True, timeout=170, env=os.environ | {"OMP_NUM_THREADS": "1"})
    result = pickle.loads((tmp_path / "result.pickle").read_bytes())  # noqa: S301 - our own
    alone = make_plan(config=SMALL_ROWS, attempt="alone", eps=EPS)
    TrainingEngine(ONE_THREAD).run(alone)
    assert (result.fingerprint.world_size, result.updates) == (2, 1)
    assert furthest(plan, alone) < 1e-6
