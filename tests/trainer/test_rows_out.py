"""The rows of a step as a file: what was trained, token by token, and nothing of the training changes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import orjson
import pytest
from safetensors import safe_open
from tests.trainer.tiny import ONE_THREAD, random_groups

from headrace.schemas.reasons import RejectionReason
from headrace.schemas.training import SftConfig, TrainConfig
from headrace.trainer.engine import TrainingEngine
from headrace.trainer.groups import RejectedTrajectory, TokenizedGroup, TokenizedTrajectory
from headrace.trainer.plan import StepPlan
from headrace.trainer.rank import RankWorld
from headrace.trainer.rows_out import SAMPLE
from headrace.trainer.world import WorldSettings

Plans = Callable[..., StepPlan]
SMALL_ROWS = TrainConfig(learning_rate=1e-3, packed_sequence_length=32)
LOST = RejectedTrajectory(index=0, reason=RejectionReason.TOO_LONG, detail="long")
ON_TOKENS = ("advantages", "weights", "ratios", "behaviour_logprobs", "old_logprobs", "new_logprobs")


@pytest.fixture(scope="module")
def engine() -> TrainingEngine:
    return TrainingEngine(ONE_THREAD)


class Rows:
    """The file, read as its module says."""

    def __init__(self, plan: StepPlan) -> None:
        with safe_open(Path(plan.out_dir, "rows", "rows.safetensors"), "np") as file:  # type: ignore[no-untyped-call]  # not annotated
            self.metadata = file.metadata()
            self.arrays: dict[str, npt.NDArray[np.generic]] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
        self.groups = orjson.loads(self.metadata["groups"])

    def __getitem__(self, name: str) -> npt.NDArray[np.generic]:
        return self.arrays[name]

    def sequence(self, s: int) -> tuple[tuple[str, int, int], dict[str, npt.NDArray[np.generic]]]:
        """((group id, trajectory, part), arrays of its tokens)."""
        start, stop = self["sequence_tokens"][s : s + 2].tolist()
        tokens = {name: self[name][start:stop] for name in ("token_ids", "position_ids", "trainable", "predictors", "lags", *ON_TOKENS)}
        whose = (self.groups[self["sequence_groups"][s]], int(self["sequence_trajectories"][s]), int(self["sequence_parts"][s]))  # type: ignore[call-overload]  # an index
        return whose, tokens

    def sequences(self) -> dict[tuple[str, int, int], dict[str, npt.NDArray[np.generic]]]:
        return dict(self.sequence(s) for s in range(len(self["sequence_groups"])))


def two_part_groups() -> tuple[TokenizedGroup, ...]:
    """Trajectories of two sequences each; of the first group the first member was refused."""
    made = []
    for g in random_groups(5, groups=2, rollouts=4):
        a, b, c, d = (trajectory.sequences[0] for trajectory in g.trajectories)
        pair = tuple(
            TokenizedTrajectory(reward=float(i), sequences=two, initial_policy_version=0) for i, two in enumerate(((a, b), (c, d)))
        )
        made.append(replace(g, trajectories=pair))
    return (replace(made[0], rejected=(LOST,)), made[1])


def test_every_token_is_there_with_what_it_counted_for(engine: TrainingEngine, make_plan: Plans) -> None:
    groups = two_part_groups()
    plan = replace(make_plan(groups=groups, config=SMALL_ROWS), report_rows="all")
    result = engine.run(plan)
    rows = Rows(plan)
    assert len(rows["row_numbers"]) == result.num_sequences > 1
    found = rows.sequences()
    assert len(found) == len(rows["sequence_groups"]), "each once"
    assert set(found) == {(group.group_id, index, part) for group in groups for index in group.indices for part in range(2)}, (
        "by their index as they were sent"
    )
    for group in groups:
        for index, trajectory in zip(group.indices, group.trajectories, strict=True):
            for part, sequence in enumerate(trajectory.sequences):
                tokens = found[group.group_id, index, part]
                np.testing.assert_array_equal(tokens["token_ids"], sequence.token_ids)
                np.testing.assert_array_equal(tokens["trainable"], sequence.trainable)
                np.testing.assert_array_equal(tokens["position_ids"], np.arange(len(sequence)))
                np.testing.assert_array_equal(tokens["behaviour_logprobs"], sequence.logprobs)
                for name in ON_TOKENS:
                    np.testing.assert_array_equal(np.isnan(tokens[name]), ~sequence.trainable, name)
                trained = sequence.trainable
                ratio = np.exp(tokens["new_logprobs"] - tokens["old_logprobs"])  # type: ignore[operator]  # floats
                np.testing.assert_allclose(tokens["ratios"][trained], ratio[trained], rtol=1e-5)
                assert np.sign(tokens["advantages"][trained]).tolist() == [1.0 if trajectory.reward else -1.0] * int(trained.sum())  # type: ignore[call-overload]
                assert set(tokens["lags"][trained].tolist()) == {0}
    assert rows.metadata | {"groups": ""} == {
        "layout": "headrace.rows.v1",
        "model_id": "m",
        "incarnation": "i",
        "step": "1",
        "attempt": "attempt",
        "rows": str(result.num_sequences),
        "groups": "",
    }


def test_the_rows_are_those_that_went_through_the_model(engine: TrainingEngine, make_plan: Plans) -> None:
    """A target is predicted by the column of the sequence's token before it; shared stretches stand once."""
    plan = replace(make_plan(config=SMALL_ROWS), report_rows="all")
    result = engine.run(plan)
    rows = Rows(plan)
    assert int(rows["row_columns"][-1]) == len(rows["column_token_ids"]) == result.tokens
    assert (np.diff(rows["row_columns"]) <= 32).all()
    for r, first in enumerate(rows["row_columns"][:-1].tolist()):
        assert rows["segment_starts"][rows["row_segments"][r]] == 0
        for s in range(*rows["row_sequences"][r : r + 2].tolist()):
            _, tokens = rows.sequence(s)
            at = np.flatnonzero(tokens["trainable"])
            columns = first + tokens["predictors"][at]
            np.testing.assert_array_equal(rows["column_token_ids"][columns], tokens["token_ids"][at - 1])
            np.testing.assert_array_equal(rows["column_position_ids"][columns], at - 1)


def weights_of(plan: StepPlan) -> bytes:
    (path,) = Path(plan.out_dir, "weights").glob("*.safetensors")
    return path.read_bytes()


def test_keeping_rows_changes_no_bit_of_the_training_and_none_are_kept_unasked(engine: TrainingEngine, make_plan: Plans) -> None:
    plans = [replace(make_plan(attempt=kept, config=SMALL_ROWS), report_rows=kept) for kept in ("none", "sample", "all")]
    results = [engine.run(plan) for plan in plans]
    assert len({weights_of(plan) for plan in plans}) == 1
    assert len({(result.plan_digest, result.loss) for result in results}) == 1
    assert [Path(plan.out_dir, "rows").exists() for plan in plans] == [False, True, True]


def test_a_sample_is_eight_rows_and_the_same_ones_when_the_step_runs_again(engine: TrainingEngine, make_plan: Plans) -> None:
    many = TrainConfig(learning_rate=1e-3, packed_sequence_length=18)
    runs = []
    for attempt in ("first", "again"):
        plan = replace(make_plan(attempt=attempt, groups=random_groups(1, groups=8), config=many), report_rows="sample")
        result = engine.run(plan)
        runs.append(Rows(plan))
        assert result.num_sequences > SAMPLE
    one, other = runs
    assert len(one["row_numbers"]) == SAMPLE
    assert set(np.diff(one["row_numbers"])) != {1}, "drawn, not the first ones"
    for name, array in one.arrays.items():
        np.testing.assert_array_equal(array, other[name], name)
    every = replace(make_plan(attempt="all", groups=random_groups(1, groups=8), config=many), report_rows="all")
    engine.run(every)
    whole = Rows(every).sequences()
    for whose, tokens in one.sequences().items():
        np.testing.assert_array_equal(tokens["new_logprobs"], whole[whose]["new_logprobs"])


def test_a_supervised_step_keeps_every_example_of_every_epoch(engine: TrainingEngine, make_plan: Plans) -> None:
    groups = random_groups(2, groups=3, rollouts=2)
    plan = replace(make_plan(groups=groups, sft=SftConfig(epochs=2, batch_size=2)), report_rows="all")
    result = engine.run(plan)
    rows = Rows(plan)
    assert set(rows["row_updates"].tolist()) == set(range(result.updates)) == set(range(6))
    seen = [rows.sequence(s) for s in range(len(rows["sequence_groups"]))]
    expected = {(group.group_id, t, 0): x.sequences[0] for group in groups for t, x in enumerate(group.trajectories)}
    assert sorted(whose for whose, _ in seen) == sorted([*expected, *expected])
    for whose, tokens in seen:
        np.testing.assert_array_equal(tokens["token_ids"], expected[whose].token_ids)
        assert np.isnan(tokens["behaviour_logprobs"]).all()
        assert set(tokens["advantages"][expected[whose].trainable].tolist()) == {1.0}


def test_a_step_with_nothing_to_train_keeps_none(engine: TrainingEngine, make_plan: Plans) -> None:
    same = tuple(replace(g, trajectories=tuple(replace(x, reward=1.0) for x in g.trajectories)) for g in random_groups(1))
    plan = replace(make_plan(groups=same), report_rows="all")
    engine.run(plan)
    assert not Path(plan.out_dir, "rows").exists()


@pytest.mark.slow
def test_rows_of_two_ranks_come_together_each_with_its_own_numbers(engine: TrainingEngine, make_plan: Plans) -> None:
    plans = [replace(make_plan(attempt=f"ranks-{size}", config=SMALL_ROWS), report_rows="all") for size in (1, 2)]
    engine.run(plans[0])
    world = RankWorld(WorldSettings(size=2, threads=1))
    world.start()
    try:
        result = world.run(plans[1])
    finally:
        world.kill()
        world.close()
    one, two = (Rows(plan) for plan in plans)
    assert set(two["row_ranks"].tolist()) == {0, 1}
    assert len(two["row_numbers"]) == result.num_sequences
    alone, shared = one.sequences(), two.sequences()
    assert alone.keys() == shared.keys()
    for whose, tokens in alone.items():
        np.testing.assert_array_equal(tokens["token_ids"], shared[whose]["token_ids"])
        for name in ON_TOKENS:
            np.testing.assert_allclose(tokens[name], shared[whose][name], rtol=1e-4, atol=1e-6, err_msg=name)
