"""Rates of updates against their formulas."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.training import OptimizerSettings, SftConfig
from headrace.trainer.learning_rate import MAX_RATE, sft_rate, update_rate


def rate(optimizer: OptimizerSettings, update: int, base: float = 1e-3) -> float:
    return update_rate(base, optimizer, update, reward_multiplier=1.0, trajectories=7, power=0.0)


def test_without_schedule_and_warm_up_the_rate_is_the_configs():
    assert [rate(OptimizerSettings(), update) for update in (0, 1, 10**9)] == [1e-3] * 3


def test_warm_up_grows_from_a_share_to_the_whole_and_never_starts_at_zero():
    optimizer = OptimizerSettings(warmup_updates=3)
    assert [rate(optimizer, update, 1.0) for update in range(6)] == [1 / 4, 2 / 4, 3 / 4, 1, 1, 1]


@pytest.mark.parametrize(
    ("schedule", "decay"), [("linear", lambda x: 1 - 0.9 * x), ("cosine", lambda x: 0.1 + 0.9 * (1 + math.cos(math.pi * x)) / 2)]
)
def test_schedules_are_their_closed_forms_between_warm_up_and_end(schedule: str, decay):
    optimizer = OptimizerSettings(schedule=schedule, warmup_updates=2, schedule_updates=12, min_rate_ratio=0.1)  # type: ignore[arg-type]
    expected = [1 / 3, 2 / 3, *[decay(i / 10) for i in range(11)], 0.1, 0.1]
    assert [rate(optimizer, update, 1.0) for update in range(15)] == pytest.approx(expected, abs=1e-15)
    assert rate(optimizer, 10**9, 1.0) == pytest.approx(0.1, abs=1e-15)


def test_of_several_rates_each_update_has_its_own_and_the_last_goes_on():
    config = SftConfig(learning_rate=(1e-5, 2e-5))
    assert [sft_rate(config, update, 4) for update in range(4)] == [1e-5, 2e-5, 2e-5, 2e-5]


def test_the_trend_multiplies_and_trajectories_by_their_power():
    optimizer = OptimizerSettings(warmup_updates=1)
    got = update_rate(1e-3, optimizer, 0, reward_multiplier=0.25, trajectories=16, power=0.5)
    assert got == pytest.approx(1e-3 * 0.5 * 0.25 * 4, rel=1e-12)
    assert update_rate(1e-3, optimizer, 1, reward_multiplier=1, trajectories=16, power=-1) == pytest.approx(1e-3 / 16, rel=1e-12)


@given(
    base=st.floats(1e-12, 10),
    update=st.integers(0, 10**6),
    multiplier=st.floats(0, 1.7e308),
    trajectories=st.integers(1, 10**9),
    power=st.floats(-4, 4),
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
)
def test_the_rate_is_finite_and_never_above_what_a_config_may_ask_for(
    *, base: float, update: int, multiplier: float, trajectories: int, power: float, schedule: str
):
    end = None if schedule == "constant" else 1000
    optimizer = OptimizerSettings(schedule=schedule, schedule_updates=end, warmup_updates=10)  # type: ignore[arg-type]
    assert 0 <= update_rate(base, optimizer, update, reward_multiplier=multiplier, trajectories=trajectories, power=power) <= MAX_RATE


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"trajectories": 0}, "at least one trajectory, not 0"),
        ({"reward_multiplier": math.nan}, "must be finite and at least 0, not nan"),
        ({"reward_multiplier": -0.1}, "must be finite and at least 0, not -0.1"),
        ({"update": -1}, "count from 0, not -1"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(wrong: dict[str, float], named: str):
    arguments = {"update": 0, "reward_multiplier": 1.0, "trajectories": 1, "power": 0.0} | wrong
    with pytest.raises(ValueError, match=named):
        update_rate(1e-3, OptimizerSettings(), **arguments)  # type: ignore[arg-type]


def test_fine_tunings_schedule_ends_with_its_job():
    config = SftConfig(learning_rate=1.0, schedule="linear", warmup_updates=1)
    assert [sft_rate(config, update, 5) for update in range(5)] == pytest.approx([1 / 2, 1, 3 / 4, 2 / 4, 1 / 4])
    assert [sft_rate(SftConfig(learning_rate=1.0), update, 5) for update in range(5)] == [1.0] * 5


def test_a_warm_up_longer_than_its_job_fills_it():
    config = SftConfig(learning_rate=1.0, schedule="cosine", warmup_updates=3)
    assert [sft_rate(config, update, 2) for update in range(2)] == [1 / 4, 2 / 4]
    assert sft_rate(config, 0, 0) == 1 / 4
    assert sft_rate(config, 3, 3) == 0  # past the end
